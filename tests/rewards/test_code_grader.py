"""Programs of responses run against tests, and cannot do what they should not."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from rlkit.config.schema import RewardConfig
from rlkit.rewards.pool import GradeResult, GraderPool
from rlkit.rewards.sandbox import Limits, NoTestsError, ProgramTest, extract_program, passes, read_tests
from rlkit.types.samples import Sample

LIMITS = Limits(wall_s=10.0, memory_bytes=512 * 2**20)
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def says(program: str, stdout: str, *, stdin: str = "", limits: Limits = LIMITS) -> bool:
    return passes(program, [ProgramTest(stdin=stdin, stdout=stdout)], limits)


def test_standard_input_and_output():
    tests = [ProgramTest(stdin="1 2\n", stdout="3"), ProgramTest(stdin="5 6", stdout="11\n\n")]
    assert passes(ADD, tests, LIMITS)
    assert not passes(ADD.replace("+ b", "- b"), tests, LIMITS)
    assert not passes(ADD, [*tests, ProgramTest(stdin="1 1", stdout="3")], LIMITS), "every test has to pass"
    assert says("import sys\nprint('x  ')\nsys.exit()", "x"), "a program may end itself"
    assert not says("print('x')\nraise SystemExit(1)", "x")


def test_assert_statements():
    checks = [ProgramTest(checks="assert double(2) == 4\nassert double(0) == 0")]
    assert passes("def double(x):\n    return 2 * x", checks, LIMITS)
    assert not passes("def double(x):\n    return x + 2", checks, LIMITS)
    for cheat in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"):
        assert not passes(f"def double(x):\n    return 0\n{cheat}", checks, LIMITS), cheat


@pytest.mark.parametrize(
    "program",
    [
        "import socket\ns = socket.socket()\ns.settimeout(2)\ns.connect(('127.0.0.1', {port}))\nprint('out')",
        "import os\nif os.fork() == 0:\n    os._exit(0)\nprint('out')",
        "import subprocess\nsubprocess.run(['true'])\nprint('out')",
        "import os\nos.system('true')\nprint('out')",
        "open({outside!r}, 'w').write('x')\nprint('out')",
        "import pathlib\npathlib.Path({outside!r}).unlink()\nprint('out')",
        "x = bytearray(2 * 1024**3)\nprint('out')",
        "open('big', 'wb').write(b'x' * 2**25)\nprint('out')",
        "import ctypes\nctypes.CDLL(None).getpid()\nprint('out')",
        "import os\nassert 'SECRET_TOKEN' in os.environ\nprint('out')",
        "import rlkit\nprint('out')",
        "def f(:\n",
    ],
    ids=[
        "socket", "fork", "subprocess", "system", "write_outside", "unlink_outside", "memory", "file_size", "ctypes",
        "environment", "packages", "syntax",
    ],
)  # fmt: skip
def test_what_a_program_cannot_do(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import socket

    monkeypatch.setenv("SECRET_TOKEN", "s")
    outside = tmp_path / "file"
    outside.write_text("here")
    outside.chmod(0o666)
    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = program.replace("{port}", str(server.getsockname()[1])).replace("{outside!r}", repr(str(outside)))
        assert not says(source, "out")
    assert outside.read_text() == "here"
    assert says("print('out')", "out"), "and the next program runs"


def test_a_program_may_use_its_own_folder():
    assert says("open('a', 'w').write('x')\nprint(open('a').read())", "x")
    assert says("import tempfile\nwith tempfile.TemporaryFile() as f:\n    print('x')", "x")


def test_time_limits_end_a_program_and_all_of_it():
    began = time.monotonic()
    assert not says("while True:\n    pass", "x", limits=Limits(wall_s=0.5, memory_bytes=2**29))
    assert not says("import time\ntime.sleep(60)", "x", limits=Limits(wall_s=0.5, memory_bytes=2**29))
    assert time.monotonic() - began < 8


def test_the_last_python_block_counts():
    response = "<think>```python\nbad\n```</think>First\n```\nprint(1)\n```\nor rather\n```python\nprint(2)\n```\n"
    assert extract_program(response) == "print(2)\n"
    assert extract_program("print(2)") is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{"input": "1", "output": "2"}], [ProgramTest(stdin="1", stdout="2")]),
        (
            {"inputs": ["1", ["2", "3"]], "outputs": [1, 5]},
            [ProgramTest(stdin="1", stdout="1"), ProgramTest(stdin="2\n3", stdout="5")],
        ),
        (["assert f(1)", "assert f(2)"], [ProgramTest(checks="assert f(1)\nassert f(2)")]),
        (json.dumps([{"input": "1", "output": "2"}]), [ProgramTest(stdin="1", stdout="2")]),
        ("assert f(1)", [ProgramTest(checks="assert f(1)")]),
    ],
)
def test_forms_of_tests(given: Any, expected: list[ProgramTest]):
    assert read_tests(None, {"tests": given}) == expected
    assert read_tests(given, {}) == expected


@pytest.mark.parametrize("given", [None, [], {}, [{"input": "1"}], [3]])
def test_rows_without_tests_are_named(given: Any):
    with pytest.raises(NoTestsError, match="assert statements"):
        read_tests(given, {})


def test_code_in_a_pool():
    def sample(response: str, **metadata: Any) -> Sample:
        return Sample(group_id=0, index=0, seed=0, tokens=[1, 2], prompt_length=1, response=response, metadata=metadata)

    async def main() -> tuple[list[GradeResult], dict[str, int]]:
        pool = GraderPool(RewardConfig(rm_type="code"))
        tests = [{"input": "1 2", "output": "3"}]
        try:
            results = await asyncio.gather(
                pool.grade(sample(f"```python\n{ADD}\n```", tests=tests)),
                pool.grade(sample("```python\nprint(4)\n```", tests=tests)),
                pool.grade(sample(ADD, tests=tests)),
                pool.grade(sample(f"```python\n{ADD}\n```")),
            )
            return list(results), pool.counters()
        finally:
            await pool.aclose()

    results, counts = asyncio.run(main())
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, None]
    assert counts["error"] == 1 and "tests" in (results[3].error or "")


def test_the_kernel_takes_rights_away_too():
    """Under the audit hook, which ordinary Python cannot pass, lie another user, no interfaces, and hard limits."""
    import os

    assert says("import resource\nprint(resource.getrlimit(resource.RLIMIT_AS)[1])", str(LIMITS.memory_bytes))
    interpreter = Path(os.__file__)
    is_for_everybody = all(folder.stat().st_mode & 0o001 for folder in interpreter.parents)
    if os.geteuid() == 0 and is_for_everybody:  # not where Python lies in root's own home
        assert says("import os\nprint(os.getuid())", "65534")
    assert says("import resource\nprint(resource.getrlimit(resource.RLIMIT_NPROC)[1])", "1")
