"""One run at a time in a folder: two would train on, and replace, each other's checkpoints. Called by `session.py`."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlkit.types.errors import CheckpointError

logger = logging.getLogger(__name__)

LOCK = ".rlkit.lock"


@contextmanager
def exclusive(*folders: Path) -> Iterator[None]:
    """Make the folders where they are missing and hold the lock of each; CheckpointError if another process has one.
    Several names may mean one folder. The system gives locks back when this process ends, however it ends. A file
    system without locks is warned about.
    """
    with ExitStack() as locks:
        for folder in {folder.resolve() for folder in folders}:
            folder.mkdir(parents=True, exist_ok=True)
            locks.enter_context(_lock(folder))
        yield


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
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
