"""What is optimised."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    """Advantages and loss. Formulas and papers: docs/algorithms.md."""

    advantage_estimator: Literal["grpo", "rloo"] = "grpo"
    """`grpo`: reward minus the mean of its prompt group, over its standard deviation. `rloo`: minus the mean of the
    group's other samples."""
    disable_grpo_std_normalization: bool = False
    """Centre only, do not divide by the group's standard deviation (as Dr.GRPO)."""
    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """Policy gradient, or supervised cross-entropy on given responses."""
    calculate_per_token_loss: bool = False
    """Mean over all trained tokens of the step; off: mean over samples of their token means."""
    eps_clip: float = 0.2
    """The ratio is clipped at 1 - eps_clip from below."""
    eps_clip_high: float | None = None
    """and at 1 + eps_clip_high from above; unset means `--eps-clip`."""
    eps_clip_c: float | None = None
    """Dual clip for negative advantages: the loss is at most -c * advantage; must be above 1."""
    use_kl_loss: bool = False
    """Add `--kl-loss-coef` times KL(policy, reference) to the loss; loads the reference model."""
    kl_loss_coef: float = 0.0
    """Weight of the KL term. 0 with `--use-kl-loss` reports the KL without training on it."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """KL estimator; low_var_kl is k3 clamped to [-10, 10]."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. Entropy is reported in any case."""
    use_rollout_logprobs: bool = False
    """Take the engine's log-probs as the old policy's instead of scoring again."""
