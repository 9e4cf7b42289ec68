"""Learning from pairs of responses."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig:
    """Direct preference optimisation (`--loss-type dpo_loss`) on pairs of a chosen and a rejected response."""

    dpo_beta: float = 0.1
    """How far the policy may move from the reference: a response's reward is this times its log-ratio to it."""
    dpo_loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: DPO's own loss; `ipo`: the squared distance of the log-ratio margin to 1 / (2 beta)."""
    dpo_label_smoothing: float = 0.0
    """Share of pairs that are taken to be labelled the wrong way round, for the sigmoid loss (conservative DPO)."""
    chosen_key: str = "chosen"
    """Column of the better response: a text, or a list of messages that continues (or repeats and continues) the
    prompt's."""
    rejected_key: str = "rejected"
    """Column of the worse response."""
