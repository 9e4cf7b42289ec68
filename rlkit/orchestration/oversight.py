"""What watches over a session from the side: the watchdog, and the answer to SIGTERM."""

from contextlib import ExitStack
from pathlib import Path

from rlkit.config.schema import RecoveryConfig
from rlkit.observability.console import Console
from rlkit.observability.stack_dumps import dump_stacks_on_signal
from rlkit.orchestration.startup import Fleet
from rlkit.orchestration.stopping import StopRequest
from rlkit.orchestration.waits import Waits
from rlkit.orchestration.watchdog import Watchdog


class Oversight:
    """Made in the driver's main thread before anything is started; ends with the exit stack."""

    def __init__(self, cfg: RecoveryConfig, run_dir: Path, *, console: Console, exit_stack: ExitStack) -> None:
        self.waits = Waits()
        dump_stacks_on_signal(run_dir / "logs" / "driver.log")
        self.stop = StopRequest(cfg.sigterm_grace_s, console.say)
        exit_stack.callback(self.stop.close)
        self._watchdog = Watchdog(self.waits, timeout_s=cfg.hang_timeout_s, run_dir=run_dir)
        exit_stack.callback(self._watchdog.close)
        exit_stack.push(self._watchdog.explain)

    def all_is_up(self, fleet: Fleet) -> None:
        """Steps begin now."""
        self.stop.install_again()
        self._watchdog.ask_rollouts = fleet.rollouts.waits
        self._watchdog.engine_urls = fleet.engine_urls
