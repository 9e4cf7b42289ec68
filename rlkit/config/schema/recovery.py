"""What happens when a part of a run dies, hangs, or is told to stop."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Restarts, and limits on waiting."""

    max_restarts: int = 0
    """Start the run again by itself from its last checkpoint, up to so many times, when one of its processes dies or
    hangs; 0 ends the run. Wrong input and errors of the training itself never restart it."""
    sigterm_grace_s: float = 60.0
    """Seconds from SIGTERM within which the end of the running step is waited for, to save and exit with status 143;
    then, or at a second SIGTERM, the run ends unsaved. 0 ends it at once."""
    hang_timeout_s: float = 1800.0
    """Seconds without any progress (no sample, no training call, no weight update) after which the run writes the
    stacks of its processes to `logs/hang`, says who was waited for, and fails."""
