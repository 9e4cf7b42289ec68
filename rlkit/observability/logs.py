"""Python logging of every process of a run: all of it into `<run>/logs/<process>.log`, warnings on the console too.

Called once at the start of each process (driver, rollout manager, training ranks). A second call in the same process
replaces the first one's handlers, because Ray reuses worker processes.
"""

import logging
import sys
from pathlib import Path

from rlkit.config.redaction import without_secrets

_HANDLER_PREFIX = "rlkit:"
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(name)s: %(message)s"
_CHATTY = ("aiohttp.access", "asyncio", "filelock", "fsspec", "httpx", "matplotlib", "PIL", "urllib3")
"""Loggers of libraries whose INFO lines say nothing about a run."""


def set_up_logging(run_dir: Path, process: str, *, console_level: int | None = None, level: int = logging.INFO) -> Path:
    """Log into `<run_dir>/logs/<process>.log` (appending) and return that path.

    `console_level` also sends messages of that level and above to stderr: the driver passes WARNING, other processes
    nothing, so that the console stays calm. Python warnings go the same way as log messages.
    """
    path = run_dir / "logs" / f"{process}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    for handler in [h for h in root.handlers if (h.name or "").startswith(_HANDLER_PREFIX)]:
        root.removeHandler(handler)
        handler.close()

    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(_Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
    handlers: list[logging.Handler] = [to_file]
    if console_level is not None:
        to_console = logging.StreamHandler(sys.stderr)
        to_console.setLevel(console_level)
        to_console.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
        handlers.append(to_console)
    for number, handler in enumerate(handlers):
        handler.name = f"{_HANDLER_PREFIX}{number}"
        root.addHandler(handler)

    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
    return path


class _Formatter(logging.Formatter):
    """Leaves secrets of the environment and of addresses out, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))
