"""Every error rlkit raises on purpose. Each also inherits the built-in it resembles, and survives pickling between Ray
processes.

`ConfigError` is the user's input before anything is launched; the others name the part of a run that failed.
Programming mistakes stay plain `assert`s.
"""

from rlkit.config.errors import ConfigError as ConfigError
from rlkit.config.errors import GuardError as GuardError
from rlkit.config.errors import RlkitError as RlkitError


class DataError(RlkitError, ValueError):
    """A prompt file or a row of it is wrong. The message names file, line and key."""


class RewardError(RlkitError, ValueError):
    """A grader is unknown, misconfigured or returned something that is not a reward."""


class PlacementError(RlkitError, RuntimeError):
    """The cluster cannot hold the layout. The message says what was asked and what is there."""


class EngineError(RlkitError, RuntimeError):
    """An inference engine refused a request, stopped answering or died."""


class EngineUnavailable(EngineError):
    """An engine could not be reached or failed inside: another one, or a restarted one, may do better."""


class SyncError(RlkitError, RuntimeError):
    """A weight update did not reach an engine as intended."""


class TrainError(RlkitError, RuntimeError):
    """A training rank cannot go on, e.g. the gradient is not finite."""


class WorkerDied(RlkitError, RuntimeError):
    """A process of the run ended without saying why, e.g. killed from outside or out of memory."""


class HangError(RlkitError, RuntimeError):
    """Nothing of the run has moved for `--hang-timeout-s`. The message says who was waited for."""


class RunStopped(RlkitError, RuntimeError):
    """The run was asked to stop (SIGTERM) and has saved everything at the end of a step."""


class CheckpointError(RlkitError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit the run."""
