"""Every process of a run can be told to write its Python stacks into its own log: SIGUSR1. Works also while it sits in
C code. The watchdog uses it where py-spy is not installed or not allowed.
"""

import faulthandler
import os
import signal
from pathlib import Path

DUMP_SIGNAL = signal.SIGUSR1
_descriptors: dict[Path, int] = {}
"""Kept open: faulthandler writes to them when the signal comes."""


def dump_stacks_on_signal(log: Path) -> None:
    """From now on SIGUSR1 appends the stacks of all threads of this process to `log`."""
    if log not in _descriptors:
        _descriptors[log] = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    faulthandler.register(DUMP_SIGNAL, file=_descriptors[log], all_threads=True, chain=False)
