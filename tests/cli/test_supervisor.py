"""Restarts: which ends are followed by another attempt, that nothing of an attempt is left, and what signals do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlkit.cli.entry import run_cli
from rlkit.cli.exit_status import ATTEMPT, EXIT_CONFIG, EXIT_FAILED, EXIT_RESTARTABLE, EXIT_STOPPED
from rlkit.cli.supervisor import SINCE, continue_own_run
from rlkit.config.schema import CheckpointConfig, RolloutConfig, RunConfig
from rlkit.observability.ledger import LedgerEvent, read_ledger
from rlkit.orchestration.checkpoints import CheckpointMeta, commit, staging_dir
from rlkit.types.errors import CheckpointError, ConfigError, EngineError, HangError, RunStopped, TrainError, WorkerDied

SUPERVISE = """
import sys
from pathlib import Path
from rlkit.cli.supervisor import Supervisor
sys.exit(Supervisor([sys.executable, "-c", sys.argv[2]], run_dir=Path(sys.argv[1]), max_restarts=2).run())
"""


def supervise(run_dir: Path, attempt: str) -> subprocess.Popen[str]:
    """A supervisor whose attempts run that code."""
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(run_dir), f"import os, signal, subprocess, sys, time\n{attempt}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def restarts(run_dir: Path) -> list[tuple[int, int]]:
    path = run_dir / "ledger.jsonl"
    records = read_ledger(path) if path.exists() else []
    return [(r.fields["attempt"], r.fields["exit_status"]) for r in records if r.event is LedgerEvent.RESTARTED]


@pytest.mark.parametrize(
    "attempt, status, told",
    [
        ("sys.exit(0)", 0, []),
        ("sys.exit(1)", 1, []),
        ("sys.exit(143)", 143, []),
        ("sys.exit(75 if os.environ['RLKIT_ATTEMPT'] == '0' else 0)", 0, [(1, 75)]),
        ("sys.exit(75)", 75, [(1, 75), (2, 75)]),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, [(1, 137), (2, 137)]),
    ],
    ids=["success", "its own fault", "stopped", "once", "for ever", "killed"],
)
def test_which_ends_are_followed_by_a_restart(tmp_path, attempt, status, told):
    supervisor = supervise(tmp_path, attempt)
    output, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == status
    assert restarts(tmp_path) == told
    assert [f"restart {number} of 2" in output for number in (1, 2)] == [len(told) > 0, len(told) > 1]
    assert ("gave up after 2 restarts" in errors) is (len(told) == 2)


def test_nothing_of_a_killed_attempt_is_left_when_the_next_begins(tmp_path):
    """The first attempt leaves a grandchild behind; the second sees whether it is gone."""
    attempt = f"""
path = {str(tmp_path / "pid")!r}
if os.environ["RLKIT_ATTEMPT"] == "0":
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(4)']).pid)"
    open(path, "w").write(subprocess.run([sys.executable, "-c", code], stdout=-1, text=True).stdout)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    os.kill(int(open(path).read()), 0)
    sys.exit(9)
except ProcessLookupError:
    sys.exit(0)
"""
    supervisor = supervise(tmp_path, attempt)
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0 and restarts(tmp_path) == [(1, 137)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_ends_the_restarts(tmp_path, number):
    attempt = """
for name in (signal.SIGTERM, signal.SIGINT):
    signal.signal(name, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""
    supervisor = supervise(tmp_path, attempt)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == "ready\n"
    supervisor.send_signal(number)
    supervisor.communicate(timeout=30)
    assert supervisor.returncode == 75 and restarts(tmp_path) == []


def test_the_attempt_ends_with_a_killed_supervisor(tmp_path):
    supervisor = supervise(tmp_path, "print(os.getpid(), flush=True); time.sleep(60)")
    assert supervisor.stdout is not None
    child = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "error, status",
    [
        (ConfigError("x"), EXIT_CONFIG),
        (CheckpointError("x"), EXIT_FAILED),
        (TrainError("x"), EXIT_FAILED),
        (WorkerDied("x"), EXIT_RESTARTABLE),
        (HangError("x"), EXIT_RESTARTABLE),
        (EngineError("x"), EXIT_RESTARTABLE),
        (RunStopped("x"), EXIT_STOPPED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_exit_status_by_error(monkeypatch, error, status, capsys):
    monkeypatch.setenv(ATTEMPT, "0")

    def main(argv: list[str]) -> None:
        raise error

    assert run_cli(main, []) == status
    assert "x" in capsys.readouterr().err


def checkpoint(directory: Path, step: int) -> None:
    staging = staging_dir(directory, step)
    (staging / "trainer").mkdir()
    commit(staging, CheckpointMeta(step=step, weight_version=step + 1, world_size=1), {})


def test_a_restart_goes_on_from_what_this_run_has_saved(tmp_path, monkeypatch):
    """Not from --load again, and not from what lay in the folder before."""
    cfg = RunConfig(
        checkpoint=CheckpointConfig(load="elsewhere", ckpt_step=3, no_load_optim=True),
        rollout=RolloutConfig(start_rollout_id=7),
    )
    checkpoint(tmp_path / "checkpoints", 8)
    old = time.time() - 100
    os.utime(tmp_path / "checkpoints" / "iter_0000008" / "COMPLETE", (old, old))
    monkeypatch.setenv(SINCE, repr(time.time() - 50))
    monkeypatch.setenv(ATTEMPT, "1")
    assert continue_own_run(cfg, tmp_path) == cfg
    checkpoint(tmp_path / "checkpoints", 4)
    monkeypatch.setenv(ATTEMPT, "0")
    assert continue_own_run(cfg, tmp_path) == cfg
    monkeypatch.setenv(ATTEMPT, "1")
    again = continue_own_run(cfg, tmp_path)
    assert again.checkpoint == CheckpointConfig(ckpt_step=4)
    assert again.rollout.start_rollout_id is None
