"""`--max-restarts N`: the run is a child process, and a new one takes over where a dead one left its last checkpoint.

Called by `entry.py`. What can be started again is told by the exit status: a part of the run died or hung, or its
driver was killed. The supervisor takes in orphans, so that nothing of an attempt is left when the next one starts; when
it is killed itself, its child gets SIGTERM. Imports neither torch nor ray.
"""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil

from rlkit.cli.exit_status import ATTEMPT, EXIT_RESTARTABLE, EXIT_STUCK, attempt_number
from rlkit.config.schema import RunConfig
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.orchestration.checkpoints import complete_checkpoints
from rlkit.orchestration.manifest import MARKER

SINCE = "RLKIT_SUPERVISED_SINCE"
CLEANUP_TIMEOUT_S = 30.0
"""For what a dead attempt leaves to end by itself (guardians, Ray, the undertaker) before it is killed."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def continue_own_run(cfg: RunConfig, run_dir: Path) -> RunConfig:
    """In a restarted attempt: once this run has saved something, that is where it goes on, whatever `--load`,
    `--ckpt-step`, `--start-rollout-id` and `--no-load-optim` said for its beginning.
    """
    if not attempt_number():
        return cfg
    save = Path(cfg.checkpoint.save) if cfg.checkpoint.save is not None else run_dir / "checkpoints"
    since = float(os.environ[SINCE])
    own = [path for path in complete_checkpoints(save) if (path / MARKER).stat().st_mtime >= since]
    if not own:
        return cfg
    step = max(own, key=lambda path: (path / MARKER).stat().st_mtime).name.removeprefix("iter_")
    return replace(
        cfg,
        checkpoint=replace(cfg.checkpoint, load=None, ckpt_step=int(step), no_load_optim=False),
        rollout=replace(cfg.rollout, start_rollout_id=None),
    )


class Supervisor:
    """Runs attempts one after the other. Main thread only."""

    def __init__(self, argv: Sequence[str], *, run_dir: Path, max_restarts: int) -> None:
        """`argv` is the command of one attempt."""
        self._argv = list(argv)
        self._run_dir = run_dir
        self._max_restarts = max_restarts
        self._since = time.time()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def run(self) -> int:
        """The exit status of the last attempt."""
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)
        for attempt in itertools.count():
            self._child = subprocess.Popen(
                self._argv,
                env={**os.environ, ATTEMPT: str(attempt), SINCE: repr(self._since)},
                start_new_session=True,  # Ctrl-C comes through us, once
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )
            status = self._child.wait()
            end_orphans()
            if self._is_stopping or not is_restartable(status):
                return shell_status(status)
            if attempt == self._max_restarts:
                print(f"gave up after {self._max_restarts} restarts (--max-restarts)", file=sys.stderr)
                return shell_status(status)
            self._say_restart(attempt + 1, status)
        raise AssertionError("the loop above only returns")

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _say_restart(self, attempt: int, status: int) -> None:
        print(
            f"restart {attempt} of {self._max_restarts}: the run ended with status {shell_status(status)}; it goes on "
            f"from its last checkpoint in {self._run_dir}",
            flush=True,
        )
        with Ledger(self._run_dir / "ledger.jsonl") as ledger:
            ledger.write(
                LedgerEvent.RESTARTED,
                attempt=attempt,
                max_restarts=self._max_restarts,
                exit_status=shell_status(status),
            )


def is_restartable(status: int) -> bool:
    """Killed by a signal from outside (out of memory, say), or a part of the run died or hung."""
    return status < 0 or status in (EXIT_RESTARTABLE, EXIT_STUCK)


def shell_status(status: int) -> int:
    """128 + signal, as a shell says it."""
    return status if status >= 0 else 128 - status


def end_orphans() -> None:
    """Wait until nothing of an ended attempt is left below this process; kill what takes too long."""
    me = psutil.Process()
    _, left = psutil.wait_procs(me.children(recursive=True), timeout=CLEANUP_TIMEOUT_S)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=CLEANUP_TIMEOUT_S)
