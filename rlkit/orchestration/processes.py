"""Server processes that a run owns: engines and the router. Started through the guardian, logged to a file, stopped by
process id."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlkit.orchestration.undertaker import PROPER_END

STOP_TIMEOUT_S = 8.0
"""Longer than the guardian's own grace, so that it is the guardian that ends the group."""


def start_undertaker(run_dir: Path) -> Callable[[], None]:
    """Have everything below this process ended, and the report of `run_dir` written, should it be killed. Call what is
    returned at a proper end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlkit.orchestration.undertaker", str(run_dir)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )

    def say_proper_end() -> None:
        process.communicate(PROPER_END, timeout=STOP_TIMEOUT_S)

    return say_proper_end


def last_lines(path: Path, num_lines: int = 20) -> str:
    """The end of a text file."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 16384))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])


class ServerProcess:
    """One child process and its log file."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str | None], log_path: Path) -> None:
        """Start `argv`; `env` adds to this process's environment, or removes where the value is None."""
        merged = dict(os.environ)
        for key, value in env.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = value
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._guardian = subprocess.Popen(
                [sys.executable, "-m", "rlkit.orchestration.guardian", *argv],
                stdin=subprocess.PIPE,  # never written to: its end of file tells the guardian that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=merged,
                start_new_session=True,  # Ctrl-C in the terminal is for the driver alone
            )

    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._guardian.poll()

    def tail(self, num_lines: int = 20) -> str:
        """The last lines of the log, for error messages."""
        return last_lines(self.log_path, num_lines)

    def stop(self) -> None:
        """End the process and everything that it started; returns when it is gone."""
        if self._guardian.poll() is None:
            self._guardian.terminate()
        try:
            self._guardian.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()  # the command follows by PR_SET_PDEATHSIG
            self._guardian.wait()
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()

    def wait(self, poll_s: float = 0.2) -> int:
        """Block until it ends by itself; its exit status."""
        while (status := self.exit_status()) is None:
            time.sleep(poll_s)
        return status
