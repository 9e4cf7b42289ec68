"""What SIGTERM does: within `--sigterm-grace-s` the run saves at the end of its step and stops; after that, or at a
second SIGTERM, it is interrupted as by Ctrl-C.
"""

import signal
from collections.abc import Callable
from types import FrameType

from rlkit.types.errors import RunStopped


class StopRequest:
    """The request, once there is one. Main thread only."""

    def __init__(self, grace_s: float, say: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._say = say
        self.is_set = False
        self._can_wait = False
        """Whether steps are running, so that the end of one will come."""
        self._previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._on_sigterm),
            signal.SIGALRM: signal.signal(signal.SIGALRM, self._on_alarm),
        }

    def install_again(self) -> None:
        """After `ray.init`, which puts a SIGTERM handler of its own there; from now on steps run."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._can_wait = True

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop_at(self, next_step: int, *, is_saved: bool) -> None:
        """Between two steps: RunStopped if the run was asked to stop and the last step has been saved."""
        if self.is_set and is_saved:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise RunStopped(f"stopped by SIGTERM before step {next_step}, all saved; the same command continues")

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self.is_set or not self._can_wait or self._grace_s == 0:
            raise KeyboardInterrupt(f"signal {number}")
        self.is_set = True
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        self._say(f"SIGTERM: saving at the end of this step, if that comes within {self._grace_s:g} s")

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"SIGTERM, and the step did not end within {self._grace_s:g} s")
