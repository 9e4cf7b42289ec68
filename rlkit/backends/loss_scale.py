"""Loss scaling for float16 (Micikevicius et al., 2018): gradients are computed of `scale` times the loss, so that small
ones do not vanish. Used by the backends' trainers.

A step whose gradients overflow is skipped on all ranks. The scale halves at the `hysteresis`-th overflow and at each
later one, and doubles after `loss_scale_window` steps in a row without one, which also restores the hysteresis.
"""

from collections.abc import Mapping

from rlkit.config.schema import PrecisionConfig
from rlkit.types.errors import TrainError

BACKOFF, GROWTH = 0.5, 2.0


class LossScale:
    """The scale of the next backward pass; 1 and never changing without `--fp16`."""

    def __init__(self, cfg: PrecisionConfig) -> None:
        self._cfg = cfg
        self.is_on = cfg.fp16
        self._is_fixed = not cfg.fp16 or cfg.loss_scale is not None
        self.value = (cfg.loss_scale or cfg.initial_loss_scale) if cfg.fp16 else 1.0
        self.num_skipped = 0
        """Optimizer steps skipped since the start of the run."""
        self._num_good = 0
        self._patience = cfg.hysteresis

    def step_taken(self) -> None:
        self._num_good += 1
        if not self._is_fixed and self._num_good == self._cfg.loss_scale_window:
            self._num_good, self._patience = 0, self._cfg.hysteresis
            self.value *= GROWTH

    def step_skipped(self, where: str) -> None:
        """After an overflow. TrainError where the scale cannot fall any more. `where`: for the message."""
        self.num_skipped += 1
        self._num_good = 0
        if self._is_fixed:
            return
        self._patience -= 1
        if self._patience > 0:
            return
        if self.value <= self._cfg.min_loss_scale:
            raise TrainError(
                f"{where}: gradients overflow float16 even at a loss scale of {self.value:g} (--min-loss-scale); "
                "the weights were left as they are. Train in bfloat16 or float32 (drop --fp16)"
            )
        self.value = max(self.value * BACKOFF, self._cfg.min_loss_scale)

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {
            "value": self.value,
            "num_skipped": self.num_skipped,
            "num_good": self._num_good,
            "patience": self._patience,
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from `state`; a fixed scale stays what the flag says."""
        if not self._is_fixed:
            self.value = state["value"]
        self.num_skipped = int(state["num_skipped"])
        self._num_good, self._patience = int(state["num_good"]), int(state["patience"])
