"""Where a Ray worker's words go. In a module of its own, because it needs no torch: see `engine_process.py`."""

import os
import sys
from pathlib import Path

from rlkit.observability.logs import set_up_logging
from rlkit.observability.stack_dumps import dump_stacks_on_signal


def claim_output(run_dir: Path, process: str) -> None:
    """Send this Ray worker's log, standard output and standard error to `<run>/logs/<process>.log`."""
    path = set_up_logging(run_dir, process)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    dump_stacks_on_signal(path)
