"""A server process never outlives the process that started it, however that one ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlkit.orchestration.processes import ServerProcess

# A server that ignores SIGTERM and has a child of its own, as SGLang has.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from rlkit.orchestration.processes import ServerProcess
process = ServerProcess([sys.executable, "-c", sys.argv[2]], env={}, log_path=Path(sys.argv[1]))
print("started", flush=True)
time.sleep(600)
"""


def wait_for(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def logged_pid(log: Path) -> int:
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    return int(log.read_text())


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stop_ends_the_whole_tree(tmp_path):
    process = ServerProcess([sys.executable, "-c", STUBBORN], env={}, log_path=tmp_path / "log")
    grandchild = logged_pid(tmp_path / "log")
    server = psutil.Process(grandchild).ppid()
    process.stop()
    assert process.exit_status() is not None
    wait_for(lambda: not is_running(grandchild) and not is_running(server), 2.0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_death_of_the_owner_ends_the_whole_tree(tmp_path, how):
    log = tmp_path / "log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log), STUBBORN], stdout=subprocess.PIPE)
    grandchild = logged_pid(log)
    server = psutil.Process(grandchild).ppid()
    os.kill(owner.pid, how)
    owner.wait()
    wait_for(lambda: not is_running(grandchild) and not is_running(server))


def test_killed_guardian_takes_the_server_along(tmp_path):
    process = ServerProcess(
        [sys.executable, "-c", "import time; print(1); time.sleep(600)"], env={}, log_path=tmp_path / "log"
    )
    guardian = psutil.Process(process._guardian.pid)
    wait_for(lambda: bool(guardian.children()))
    server = guardian.children()[0].pid
    guardian.kill()
    wait_for(lambda: not is_running(server), 3.0)
    assert process.exit_status() is not None


def test_exit_status_and_tail(tmp_path):
    code = "import sys; print('the reason'); sys.exit(7)"
    process = ServerProcess([sys.executable, "-c", code], env={}, log_path=tmp_path / "log")
    assert process.wait(poll_s=0.02) == 7
    assert process.tail() == "the reason"


def test_environment_is_added_and_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_TEST_GONE", "1")
    code = "import os; print(os.environ.get('RLKIT_TEST_GONE'), os.environ['RLKIT_TEST_NEW'])"
    env = {"RLKIT_TEST_GONE": None, "RLKIT_TEST_NEW": "yes"}
    process = ServerProcess([sys.executable, "-c", code], env=env, log_path=tmp_path / "log")
    process.wait(poll_s=0.02)
    assert process.tail() == "None yes"
