"""`grade` under hostile input, from everywhere, and what it leaves behind."""

import asyncio
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlkit.rewards import algebra, grade
from rlkit.rewards.process import GraderProcess, WorkerLostError
from rlkit.rewards.wire import WorkerSetup
from rlkit.types.errors import RewardError

LIMIT_S = 10.0
HOSTILE = {
    "tower": (r"\boxed{9**9**9**9}", r"\sqrt{2}"),
    "power of a sum": (r"\boxed{(x+y+z+1)^{99999}}", r"(x+y+z)^{2}"),
    "braces": (r"\boxed{" + "{" * 5000 + "}" * 5000 + "}", "1"),
    "open braces": (r"\boxed{" * 5000, "1"),
    "fractions": (r"\boxed{" + r"\frac{1}{1+" * 200 + "x" + "}" * 200 + "}", "x"),
    "parentheses": (r"\boxed{" + "(" * 400 + "x" + ")" * 400 + "}", "x"),
    "digits": (r"\boxed{" + "9" * 100_000 + "}", "9"),
    "megabytes": ("x \\frac{1}{" * 400_000 + r"\boxed{7}", "8"),
    "megabytes in a box": (r"\boxed{" + "a+" * 1_000_000 + "b}", "8"),
    "commas": (r"\boxed{" + "x," * 300 + "x}", "y," * 300 + "y"),
    "backslashes": ("\\" * 1_000_000, "1"),
    "answers": ("Answer: " * 200_000, "1"),
    "choices": ("I choose not A or " * 50_000, "A"),
    "exponent": (r"\boxed{1e9999}", "1"),
    "tiny": (r"\boxed{10^{-99999}}", "0"),
}


SLOWLY_HOSTILE = {
    "factorials": (r"\boxed{((10!)!)!\cdot x}", "2x"),
    "tower with a variable": (r"\boxed{x^{9^{9^{9}}}}", "x"),
    "nested factorials": (r"\boxed{" + "(" * 20 + "9" + "!)" * 20 + "x}", "2x"),
    "sum": (r"\boxed{\sum_{i=1}^{10^{9}}\frac{1}{i^{i}}}", "1"),
    "integral": (r"\boxed{\int_0^1 e^{\sin(x^{x^{x}})}dx}", "1"),
}


@pytest.mark.parametrize("name", [*HOSTILE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY_HOSTILE)])
def test_hostile_input_scores_zero_in_bounded_time(name):
    response, label = (HOSTILE | SLOWLY_HOSTILE)[name]
    for rm_type in ("math", "dapo", "gpqa", "f1"):
        began = time.monotonic()
        assert grade(rm_type, response, label) < 0.1
        assert time.monotonic() - began < LIMIT_S, rm_type
    assert grade("math", r"\boxed{\sqrt{12}}", r"2\sqrt{3}") == 1.0, "algebra still works"


def test_a_hostile_answer_costs_its_limit_once():
    response, label = r"\boxed{x^{8^{9^{9}}}}", "x"
    grade("math", response, label)
    began = time.monotonic()
    assert grade("math", response, label) == 0.0
    assert time.monotonic() - began < 0.1


def test_many_threads_grade_at_once():
    rows = [(f"\\boxed{{\\sqrt{{{n * n * 2}}}}}", f"{n}\\sqrt{{2}}", 1.0) for n in range(2, 14)]
    rows += [(f"\\boxed{{\\sqrt{{{n * n * 2 + 1}}}}}", f"{n}\\sqrt{{2}}", 0.0) for n in range(2, 14)]
    rows += [(f"\\boxed{{{n}}}", n, 1.0) for n in range(40)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        rewards = list(pool.map(lambda row: grade("math", row[0], row[1]), rows))
    assert rewards == [row[2] for row in rows]


@pytest.mark.slow
def test_more_hostile_threads_than_processes_delay_but_do_not_spoil_others():
    def hostile(n: int) -> tuple[float, float]:
        began = time.monotonic()
        return grade("math", f"\\boxed{{x^{{9^{{9^{{{n + 9}}}}}}}}}", "x"), time.monotonic() - began

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        results = list(pool.map(hostile, range(24)))
    assert {reward for reward, _ in results} == {0.0}
    assert max(seconds for _, seconds in results) < algebra.QUEUE_LIMIT_S + algebra.CALL_LIMIT_S
    assert grade("math", r"\boxed{\sqrt{98}}", r"7\sqrt{2}") == 1.0


def test_waiting_for_other_threads_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait behind hostile answers is longer than a call may work, and does not count against it."""
    monkeypatch.setattr(algebra, "_MAX_PROCESSES", 1)
    monkeypatch.setattr(algebra, "CPU_LIMIT_S", 1.0)
    monkeypatch.setattr(algebra, "CALL_LIMIT_S", 2.5)
    service = algebra.AlgebraService()
    assert service.any_equal((("\\sqrt{5}", "5^{1/2}"),))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        hostile = [pool.submit(service.any_equal, ((f"x^{{{10**9 + n}}}-1", "y"),)) for n in range(4)]
        time.sleep(0.2)
        began = time.monotonic()
        right = [pool.submit(service.any_equal, ((f"\\sqrt{{{n}}}", f"({n})^{{1/2}}"),)) for n in (3, 7)]
        assert [future.result(timeout=60) for future in right] == [True, True]
        assert time.monotonic() - began > algebra.CALL_LIMIT_S, "they had to wait for the hostile ones"
        assert [future.result(timeout=60) for future in hostile] == [False] * 4


def test_a_call_that_never_gets_a_process_is_an_error_and_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "_MAX_PROCESSES", 1)
    service = algebra.AlgebraService()
    assert service.any_equal((("\\sqrt{5}", "5^{1/2}"),))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(service.any_equal, (("x^{1000000000}-1", "y"),))
        time.sleep(0.2)
        monkeypatch.setattr(algebra, "QUEUE_LIMIT_S", 0.3)
        with pytest.raises(RewardError, match="no algebra process was free"):
            service.any_equal((("\\sqrt{3}", "3^{1/2}"),))
        assert hostile.result(timeout=60) is False
    monkeypatch.setattr(algebra, "QUEUE_LIMIT_S", 60.0)
    assert service.any_equal((("\\sqrt{3}", "3^{1/2}"),))


def test_works_inside_an_event_loop():
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        return [
            grade("math", r"\boxed{\sqrt{18}}", r"3\sqrt{2}"),
            await loop.run_in_executor(None, grade, "math", r"\boxed{\sqrt{18}}", r"3\sqrt{2}"),
            await asyncio.to_thread(grade, "math", r"\boxed{\sqrt{19}}", r"3\sqrt{2}"),
        ]

    assert asyncio.run(main()) == [1.0, 1.0, 0.0]


def run_program(program: str, **kwargs) -> dict:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, **kwargs)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def graders_of(session: str) -> list[psutil.Process]:
    """Grader processes that carry `session` in their environment."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "rlkit-grader" in (process.info["cmdline"] or []):
            try:
                if process.environ().get("GRADER_TEST") == session:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
    return found


def wait_until_none(session: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while graders_of(session):
        assert time.monotonic() < deadline, f"orphans: {graders_of(session)}"
        time.sleep(0.1)


def test_needs_neither_ray_nor_torch_works_from_any_folder_and_leaves_nothing_at_exit():
    session = f"exit-{os.getpid()}"
    out = run_program(
        r"""
import json, sys
from rlkit.rewards import grade
rewards = [grade("math", r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), grade("math", r"\boxed{\sqrt{8}}", r"2\sqrt{3}")]
heavy = ("ray", "torch", "transformers", "numpy", "sympy", "multiprocessing")
print(json.dumps({"rewards": rewards, "imported": [name for name in heavy if name in sys.modules]}))
""",
        cwd="/",
        env={**os.environ, "GRADER_TEST": session, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert out == {"rewards": [1.0, 0.0], "imported": []}
    wait_until_none(session, 2.0)


def test_a_killed_parent_leaves_no_grader_even_in_the_middle_of_a_grading():
    session = f"kill-{os.getpid()}"
    program = r"""
import threading
from rlkit.rewards import grade
grade("math", r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
threading.Thread(target=grade, args=("math", r"\boxed{x^{9^{9^{9}}}}", "x"), daemon=True).start()
print("busy", flush=True)
import time; time.sleep(60)
"""
    env = {**os.environ, "GRADER_TEST": session}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"busy\n"
    assert graders_of(session)
    parent.kill()
    parent.wait()
    wait_until_none(session, 8.0)
    parent.stdout.close()


def test_a_fork_has_graders_of_its_own():
    out = run_program(
        r"""
import json, os
from rlkit.rewards import grade
ask = lambda n: grade("math", rf"\boxed{{\sqrt{{{n}}}}}", r"2\sqrt{2}")
first = ask(8)
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(write, json.dumps([ask(8), ask(7)]).encode())
    os._exit(0)
os.waitpid(pid, 0)
print(json.dumps([first, json.loads(os.read(read, 100)), ask(6), ask(8)]))
"""
    )
    assert out == [1.0, [1.0, 0.0], 0.0, 1.0]


def test_a_verdict_of_a_busy_machine_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall limit says nothing about the answers; the processor limit does."""
    service = algebra.AlgebraService()
    verdicts = [algebra.Verdict(False, is_final=False), algebra.Verdict(True)]
    monkeypatch.setattr(algebra, "_ask", lambda *_: verdicts.pop(0))
    pair = ("x+x", "2x")
    assert [service.any_equal((pair,)) for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize(("cpu_limit_s", "wall_limit_s", "limit"), [(0.2, 20.0, "processor"), (None, 0.5, "wall")])
def test_a_time_limit_says_which_clock_it_went_by(
    tmp_path: Path, cpu_limit_s: float | None, wall_limit_s: float, limit: str
) -> None:
    path = tmp_path / "spin.py"
    path.write_text("def spin(*_):\n    while True:\n        pass\n")
    setup = WorkerSetup(
        custom_path=f"{path}:spin", wall_limit_s=wall_limit_s, cpu_limit_s=cpu_limit_s, memory_limit_bytes=None
    )
    process = GraderProcess(setup, quiet=True)
    try:
        with pytest.raises(WorkerLostError) as raised:
            process.submit("", "", None).result(timeout=60)
        assert raised.value.limit == limit
    finally:
        process.close()
