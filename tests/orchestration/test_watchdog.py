"""Waits, the diagnosis of a hang, SIGTERM, and stacks of processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import psutil
import pytest

from rlkit.orchestration import stacks
from rlkit.orchestration.stopping import StopRequest
from rlkit.orchestration.waits import Waits
from rlkit.orchestration.watchdog import Watchdog
from rlkit.types.errors import HangError, RunStopped


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_waits_say_whom_since_when_and_how_long_nothing_moved():
    clock = Clock()
    waits = Waits(clock)
    clock.now = 50.0
    assert waits.idle_s == 0.0 and waits.describe() == []
    pending = [0, 1]
    with waits.waiting(lambda: f"training rank {', '.join(map(str, pending))} of 2", "training step 3"):
        assert waits.idle_s == 0.0
        clock.now = 60.0
        pending.remove(0)
        assert waits.idle_s == 10.0
        waits.progress()
        clock.now = 63.0
        assert waits.idle_s == 3.0
        with waits.waiting("engines", "the update"):
            clock.now = 64.0
            assert waits.describe() == [
                "the driver waits for training rank 1 of 2: training step 3, since 14 s",
                "the driver waits for engines: the update, since 1 s",
            ]
        assert waits.idle_s == 0.0
    clock.now = 1e6
    assert waits.idle_s == 0.0


def test_a_wait_ends_with_an_error_too():
    waits = Waits()
    with pytest.raises(ValueError, match="oops"), waits.waiting("engines", "an update"):
        raise ValueError("oops")
    assert waits.describe() == []


@pytest.fixture
def stopped_child():
    """A process that has been told SIGSTOP."""
    child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    assert child.stdout is not None and child.stdout.readline()
    child.send_signal(signal.SIGSTOP)
    yield child
    child.kill()
    child.wait()


@pytest.mark.parametrize("has_py_spy", [True, False])
def test_a_hang_is_interrupted_with_a_diagnosis(tmp_path, stopped_child, monkeypatch, has_py_spy):
    """The main thread sleeps in a wait; the error comes to it, names everybody, and stacks are on the disk."""
    if not has_py_spy:
        monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    waits = Waits()
    watchdog = Watchdog(waits, timeout_s=0.4, run_dir=tmp_path)
    watchdog.ask_rollouts = lambda timeout_s: ["3 samples wait for their rewards"]
    watchdog.engine_urls = lambda: ["http://127.0.0.1:9"]
    began = time.monotonic()
    try:
        with pytest.raises(HangError) as caught, ExitStack() as stack:
            stack.push(watchdog.explain)
            with waits.waiting("training rank 1 of 2", "training step 3"):
                time.sleep(120)
    finally:
        watchdog.close()
    assert time.monotonic() - began < 100
    for said in (
        "nothing has moved for",
        "the driver waits for training rank 1 of 2: training step 3",
        "3 samples wait for their rewards",
        "engine 0 (http://127.0.0.1:9) does not answer",
        f"process {stopped_child.pid} is stopped (SIGSTOP or a debugger)",
    ):
        assert said in str(caught.value)
    (folder,) = (tmp_path / "logs" / "hang").iterdir()
    assert (folder / "diagnosis.txt").is_file()
    assert f"{stopped_child.pid} stopped" in (folder / "processes.txt").read_text()


def test_progress_keeps_the_watchdog_quiet(tmp_path):
    waits = Waits()
    watchdog = Watchdog(waits, timeout_s=0.5, run_dir=tmp_path)
    try:
        with waits.waiting("rollout manager", "generating step 0"):
            for _ in range(15):
                time.sleep(0.1)
                waits.progress()
        time.sleep(0.8)  # and waiting for nobody is no hang
    finally:
        watchdog.close()
    assert not (tmp_path / "logs").exists()


SLEEPER = """
import sys, time
from pathlib import Path
from rlkit.observability.stack_dumps import dump_stacks_on_signal
def where_it_sleeps():
    print(1, flush=True)
    time.sleep(600)
if len(sys.argv) > 1:
    dump_stacks_on_signal(Path(sys.argv[1]))
where_it_sleeps()
"""


def test_stacks_by_signal_and_never_to_a_process_that_would_die_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    log = tmp_path / "rank.log"
    children = [
        subprocess.Popen([sys.executable, "-c", SLEEPER, *args], stdout=subprocess.PIPE) for args in ([str(log)], [])
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline()
        told = stacks.dump_stacks([psutil.Process(child.pid) for child in children], tmp_path / "hang")
        assert told == [f"1 processes wrote their stacks to the end of their own log in {tmp_path}"]
        assert "where_it_sleeps" in log.read_text()
        assert [child.poll() for child in children] == [None, None]
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.fixture
def request_to_stop():
    said: list[str] = []
    request = StopRequest(0.3, said.append)
    request.install_again()
    yield request, said
    request.close()


def test_sigterm_waits_for_the_end_of_the_step(request_to_stop):
    request, said = request_to_stop
    request.stop_at(4, is_saved=True)  # nobody has asked
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.is_set and "saving at the end of this step" in said[0]
    request.stop_at(5, is_saved=False)
    with pytest.raises(RunStopped, match="before step 6"):
        request.stop_at(6, is_saved=True)
    time.sleep(0.5)  # the time limit is off


def test_sigterm_interrupts_when_the_step_takes_too_long(request_to_stop):
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match=r"did not end within 0\.3 s"):
        time.sleep(5)


def test_a_second_sigterm_interrupts_at_once(request_to_stop):
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)


def test_sigterm_while_starting_or_without_grace_interrupts_at_once():
    for grace_s, steps_run in ((0.0, True), (60.0, False)):
        request = StopRequest(grace_s, print)
        if steps_run:
            request.install_again()
        try:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
        finally:
            request.close()


def test_waits_are_safe_to_read_from_a_thread():
    waits = Waits()
    errors: list[Exception] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                waits.describe()
                assert waits.idle_s >= 0.0
            except RuntimeError as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(3000):
        with waits.waiting("a", str(number)):
            pass
    is_over.set()
    reader.join()
    assert errors == []
