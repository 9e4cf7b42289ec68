"""Ends a run in which nothing moves any more, with a diagnosis instead of silence.

A thread of the driver looks at `Waits`. After `--hang-timeout-s` without progress it asks everybody what they wait for,
writes state and stacks of all processes to `logs/hang/`, and interrupts the main thread, whose error the session turns
into a HangError. A main thread that does not come out of it ends with the process.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from rlkit.engines.client import EngineClient
from rlkit.orchestration.stacks import dump_stacks, run_processes, stopped_processes
from rlkit.orchestration.waits import Waits
from rlkit.types.errors import HangError

logger = logging.getLogger(__name__)

INTERRUPT = signal.SIGUSR2
PROBE_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 90.0
"""For the main thread to take everything down after the interrupt."""
EXIT_STUCK = 70


class Watchdog:
    """Started and closed by the session, in the main thread."""

    def __init__(self, waits: Waits, *, timeout_s: float, run_dir: Path) -> None:
        self._waits = waits
        self._timeout_s = timeout_s
        self._directory = run_dir / "logs" / "hang"
        self.ask_rollouts: Callable[[float], list[str]] | None = None
        """What the rollout manager waits for, within so many seconds; set when there is one."""
        self.engine_urls: Callable[[], Sequence[str]] = list
        self._closed = threading.Event()
        self._message = ""
        self._previous = signal.signal(INTERRUPT, self._interrupt)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        signal.signal(INTERRUPT, self._previous)

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout_s / 4)):
            if self._waits.idle_s > self._timeout_s:
                self._message = self.diagnosis()
                if self._waits.idle_s <= self._timeout_s or self._closed.is_set():
                    continue  # it moved while we looked
                logger.error(self._message)
                os.kill(os.getpid(), INTERRUPT)
                if not self._closed.wait(EXIT_TIMEOUT_S):
                    print(self._message, file=sys.stderr, flush=True)
                    os._exit(EXIT_STUCK)  # what is below this process is ended by the undertaker
                return

    def diagnosis(self) -> str:
        """Who waits for whom, who does not answer, and where the stacks are. Takes seconds."""
        idle_s, waits = self._waits.idle_s, self._waits.describe()
        lines = [f"nothing has moved for {idle_s:.0f} s (--hang-timeout-s {self._timeout_s:g})", *waits]
        if self.ask_rollouts is not None:
            lines += self.ask_rollouts(PROBE_TIMEOUT_S)
        for index, url in enumerate(self.engine_urls()):
            if not is_alive(url):
                lines.append(f"engine {index} ({url}) does not answer")
        processes = run_processes()
        lines += stopped_processes(processes)
        directory = self._directory / time.strftime("%Y%m%d-%H%M%S")
        lines += dump_stacks(processes, directory)
        (directory / "diagnosis.txt").write_text("\n".join(lines) + "\n")
        lines.append(f"stacks and states of all processes are in {directory}")
        return "\n".join(lines)

    def explain(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """For an exit stack: an interrupt of ours becomes a HangError, anything else stays what it is."""
        if self._message and isinstance(error, KeyboardInterrupt):
            raise HangError(self._message) from error

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # the one exception that Ray lets through its own waiting


def is_alive(url: str) -> bool:
    async def ask() -> bool:
        async with EngineClient(url, timeout_s=PROBE_TIMEOUT_S) as client:
            return await client.is_alive()

    return asyncio.run(ask())
