"""Exit statuses of a run, and what tells a process that it is an attempt of a supervised run."""

import os

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_STUCK = 70
"""The watchdog's (`orchestration/watchdog.py`), when even the driver's main thread hung."""
EXIT_RESTARTABLE = 75
"""EX_TEMPFAIL: a part of the run died or hung; starting again may help."""
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143
"""128 + SIGTERM: stopped as asked, with everything saved."""

ATTEMPT = "RLKIT_ATTEMPT"
"""Environment variable with the number of the attempt, from 0; unset where nobody supervises."""


def attempt_number() -> int | None:
    return int(os.environ[ATTEMPT]) if ATTEMPT in os.environ else None
