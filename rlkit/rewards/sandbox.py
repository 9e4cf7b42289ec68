"""Grader `code`: runs the program of a response against the tests of its row, under limits. Called by `pool.py` in a
thread.

Each run is a process of its own in a folder of its own, with a clean environment, limits on time, memory, file size and
processes, and no network where the kernel allows that (`sandbox_program.py`). Everything of it is gone afterwards.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.rewards.extract import after_thinking

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 2**20
"""Of anything a program writes, its output included."""
_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_PROGRAM = Path(__file__).with_name("sandbox_program.py")
_warned = threading.Event()


class NoTestsError(ValueError):
    """A row has no tests, or tests that cannot be read; the message says what is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one run."""

    wall_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTest:
    """One run of the program: what it reads and has to write, or the statements that have to pass behind it."""

    stdin: str = ""
    stdout: str | None = None
    checks: str = ""


def extract_program(response: str) -> str | None:
    """The last fenced Python block behind any thinking; None without one."""
    blocks = _FENCE.findall(after_thinking(response))
    return blocks[-1] if blocks else None


def read_tests(label: object, metadata: Mapping[str, Any]) -> list[ProgramTest]:
    """`metadata["tests"]`, or else the label: a list (or JSON text of one) of `{"input", "output"}` objects and assert
    statements, or an object `{"inputs": [...], "outputs": [...]}`. NoTestsError for anything else.
    """
    given: Any = metadata.get("tests", label)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = [given]  # assert statements as they are
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= given.keys():
        inputs, outputs = given["inputs"], given["outputs"]
        given = [{"input": a, "output": b} for a, b in zip(inputs, outputs, strict=False)]
    if not isinstance(given, list) or not given:
        raise NoTestsError('no tests: metadata "tests" is a list of {"input", "output"} objects or assert statements')
    pairs = [item for item in given if isinstance(item, Mapping)]
    asserts = [item for item in given if isinstance(item, str)]
    if len(pairs) + len(asserts) < len(given) or any(not {"input", "output"} <= pair.keys() for pair in pairs):
        raise NoTestsError(f'tests must be {{"input", "output"}} objects or assert statements, got {str(given)[:200]}')
    tests = [ProgramTest(stdin=_lines(pair["input"]), stdout=_lines(pair["output"])) for pair in pairs]
    return tests + ([ProgramTest(checks="\n".join(asserts))] if asserts else [])


def passes(program: str, tests: Sequence[ProgramTest], limits: Limits) -> bool:
    """Whether the program passes every test; the first that fails ends it."""
    return all(_passes(program, test, limits) for test in tests)


def _lines(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _passes(program: str, test: ProgramTest, limits: Limits) -> bool:
    with tempfile.TemporaryDirectory(prefix="rlkit-code-", ignore_cleanup_errors=True) as outer:
        folder = Path(outer) / "work"
        folder.mkdir()
        for path, mode in ((Path(outer), 0o755), (folder, 0o777)):
            path.chmod(mode)  # the program may run as another user
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "checks.py").write_text(test.checks, encoding="utf-8", errors="replace")
        (Path(outer) / "stdin").write_text(test.stdin, encoding="utf-8", errors="replace")
        exit_code, reached_the_end = _run(folder, limits)
        if test.stdout is None:
            return reached_the_end
        if exit_code != 0:
            return False
        said = (Path(outer) / "stdout").read_text(encoding="utf-8", errors="replace")
        return _same_output(said, test.stdout)


def _run(folder: Path, limits: Limits) -> tuple[int | None, bool]:
    """Run it once -> (exit code, None after a time limit; whether it came to its end, checks included)."""
    word = secrets.token_hex(16)
    report_read, report_write = os.pipe()
    word_read, word_write = os.pipe()
    os.write(word_write, word.encode())
    os.close(word_write)
    options = {
        "cpu_s": math.ceil(limits.wall_s) + 1,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": MAX_FILE_BYTES,
        "report_fd": report_write,
        "word_fd": word_read,
    }
    outer = folder.parent
    with (outer / "stdin").open("rb") as stdin, (outer / "stdout").open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_PROGRAM), json.dumps(options)],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(folder),
            pass_fds=(report_write, word_read),
            start_new_session=True,
        )
        os.close(report_write)
        os.close(word_read)
        try:
            code = process.wait(limits.wall_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it may have started
            process.wait()
    with os.fdopen(report_read, "rb") as report:
        os.set_blocking(report_read, False)  # a process that got away could hold the other end open
        said = (report.read() or b"").decode(errors="replace").split()
    if said[:1] == ["network"] and not _warned.is_set():
        _warned.set()
        logger.warning(
            "rm_type code: this kernel or container does not allow a network namespace, so only Python's own sockets "
            "are closed to the programs that are graded"
        )
    return code, code == 0 and said[1:] == [word]


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
    }


def _same_output(said: str, wanted: str) -> bool:
    """Line by line; blanks at the ends of lines and blank lines at the end do not count."""
    return _trimmed(said) == _trimmed(wanted)


def _trimmed(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
