"""Generating while training: `train_async.py`."""

from dataclasses import dataclass
from typing import Literal

DEFAULT_MAX_STALENESS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncConfig:
    """Generating while training, on GPUs of their own: for `train_async.py` only. docs/async.md."""

    async_mode: Literal["one-step", "full"] | None = None
    """`one-step`: the rollout of step N+1 is generated while step N trains. `full`: generation never stops; groups are
    trained on as they finish, bounded by `--max-staleness`. Unset, `train_async.py` takes `one-step`."""
    max_staleness: int | None = None
    """With `--async-mode full`: how many weight versions the oldest trained token of a group may lie behind the weights
    that train on it. It bounds the groups in flight, too. Unset means 2."""
    stale_groups: Literal["wait", "drop", "downweight"] = "wait"
    """What happens to groups that would become too stale because they take long. `wait`: their step waits for them.
    `drop`: they are left out, and counted. `downweight`: they are trained on with less weight."""
    staleness_decay: float = 0.5
    """With `--stale-groups downweight`: the advantage of a sample is multiplied by this for every version beyond
    `--max-staleness`."""

    @property
    def is_one_step(self) -> bool:
        return self.async_mode == "one-step"

    @property
    def is_full(self) -> bool:
        return self.async_mode == "full"

    @property
    def staleness_limit(self) -> int:
        """`--max-staleness`, or its default."""
        return DEFAULT_MAX_STALENESS if self.max_staleness is None else self.max_staleness
