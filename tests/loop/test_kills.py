"""SIGKILL of any process of a run: soon nothing of it is left, and the next start continues from the last
checkpoint."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
import pytest

from rlkit.observability.audit import audit
from rlkit.observability.ledger import read_ledger

pytestmark = [pytest.mark.loop, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
GONE_WITHIN_S = 15.0


def start(
    tiny_model: Path, task: Path, run_dir: Path, num_steps: int, *layout: str, program: str = "train.py"
) -> subprocess.Popen[bytes]:
    argv = [
        sys.executable, program, "--hf-checkpoint", tiny_model, "--prompt-data", task / "train.jsonl",
        "--label-key", "label", "--custom-rm-path", f"{task / 'reward.py'}:share_of_digits",
        "--rollout-batch-size", 8, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 12,
        "--num-rollout", num_steps, "--save-interval", 1, "--keep-checkpoints", 2, "--num-gpus-per-node", 4,
        "--device", "cpu", "--output-dir", run_dir, *layout,
    ]  # fmt: skip
    with (run_dir.parent / "console.txt").open("ab") as console:
        return subprocess.Popen([str(part) for part in argv], cwd=ROOT, stdout=console, stderr=console)


def rows(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what()} did not happen within {timeout_s:.0f} s"
        time.sleep(0.1)
    return time.monotonic() - began


def family(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The driver, everything below it, and torch's shared-memory managers, which leave their family."""
    root = psutil.Process(driver.pid)
    managers = [
        process
        for process in psutil.process_iter(["name", "create_time"])
        if "torch_shm_manager" in (process.info["name"] or "") and process.info["create_time"] >= root.create_time()
    ]
    return [root, *root.children(recursive=True), *managers]


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def listening_ports(processes: list[psutil.Process]) -> set[int]:
    pids = {process.pid for process in processes}
    found = psutil.net_connections(kind="tcp")
    return {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN and c.pid in pids}


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


VICTIMS = {
    "driver": lambda command: "train.py" in command or "train_async.py" in command,
    "rank": lambda command: "ray::TrainWorker" in command,
    "engine": lambda command: "rlkit.engines.embedded.server" in command and "guardian" not in command,
    "router": lambda command: "sglang::router" in command,  # the name that it gives its process
}


@pytest.mark.parametrize("layout", [("--colocate",), ("--rollout-num-gpus", "1")], ids=["colocated", "split"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_is_left_and_the_next_start_resumes(tiny_model, task, tmp_path, victim, layout):
    run_dir, memory_before = tmp_path / "run", shared_memory()
    layout = ("--actor-num-gpus-per-node", "1", *layout)
    driver = start(tiny_model, task, run_dir, 1000, *layout)
    try:
        wait_for(lambda: len(rows(run_dir)) >= 2 or driver.poll() is not None, 240.0, lambda: "the second step")
        assert driver.poll() is None, (tmp_path / "console.txt").read_text()
        processes = family(driver)
        ports = listening_ports(processes)
        target = next(process for process in processes if VICTIMS[victim](command_of(process)))
        target.send_signal(signal.SIGKILL)
        seconds = wait_for(lambda: driver.poll() is not None, GONE_WITHIN_S, lambda: "the end of the driver")
        left = GONE_WITHIN_S - seconds
        remaining = lambda: [process for process in processes if not is_gone(process)]  # noqa: E731
        wait_for(lambda: not remaining(), left, lambda: f"the end of {remaining()}")
        assert driver.returncode != 0
        assert not ports & listening_ports(list(psutil.process_iter()))
        assert shared_memory() - memory_before == set()
    finally:
        if driver.poll() is None:
            driver.kill()
    last_saved = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("iter_*"))
    again = start(tiny_model, task, run_dir, last_saved + 3, *layout)
    assert again.wait(240.0) == 0, (tmp_path / "console.txt").read_text()
    assert f"continuing at step {last_saved + 1}" in (tmp_path / "console.txt").read_text()
    assert [row["step"] for row in rows(run_dir)] == list(range(last_saved + 3))
    ledger = audit(read_ledger(run_dir / "ledger.jsonl"))
    assert ledger.problems == []
    assert (ledger.attempts, ledger.num_steps, ledger.is_finished) == (2, last_saved + 3, True)
