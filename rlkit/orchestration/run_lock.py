"""One run at a time in a folder: two would train on, and replace, each other's checkpoints. Called by `session.py`."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlkit.types.errors import CheckpointError

logger = logging.getLogger(__name__)

LOCK = ".rlkit.lock"


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; CheckpointError if another process has it. The system gives it back when this process
    ends, however it ends. A file system without locks is warned about.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
            raise CheckpointError(
                f"{folder} is in use by another run ({owner}); end it, wait for it, or choose another --output-dir"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): make sure that no other run uses it", folder, error)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
