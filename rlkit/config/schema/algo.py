"""What is optimised."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    """Advantages and loss. Formulas and papers: docs/algorithms.md."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = "grpo"
    """The algorithm. `grpo`: reward minus the mean of its prompt group, over its standard deviation; `gspo` and `cispo`
    share that and change the loss. `rloo`: minus the mean of the group's other samples. `reinforce_plus_plus`: the
    reward itself; `..._baseline`: minus the group's mean; both whitened over the rollout. `ppo`: the
    reward itself, estimated token by token (GAE) with a critic."""
    disable_grpo_std_normalization: bool = False
    """Centre only, do not divide by the group's standard deviation (as Dr.GRPO)."""
    normalize_advantages: bool = False
    """Whiten advantages over all trained tokens of the rollout, of all ranks."""
    gamma: float = 1.0
    """Discount per trained token, of REINFORCE++'s returns and of PPO's."""
    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss"] = "policy_loss"
    """Policy gradient, supervised cross-entropy on given responses, or DPO on pairs of given responses."""
    calculate_per_token_loss: bool = False
    """Mean over all trained tokens of the step; off: mean over samples of their token means."""
    loss_constant_length: int | None = None
    """Divide each sample's token sum by this constant instead of its own length (Dr.GRPO); often
    `--rollout-max-response-len`."""
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
    """KL estimator, of the loss and of `--kl-coef`; low_var_kl is k3 clamped to [-10, 10]."""
    use_unbiased_kl: bool = False
    """Multiply each token's KL loss by its importance ratio, which makes its gradient that of the KL
    (DeepSeek-V3.2)."""
    kl_coef: float = 0.0
    """KL as reward: each trained token pays this times its KL to the reference, and its return holds what it and all
    later ones pay. Loads the reference model. Instead of `--kl-loss-coef`."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. Entropy is reported in any case."""
    use_rollout_logprobs: bool = False
    """Take the engine's log-probs as the old policy's instead of scoring again."""
    overlong_buffer_len: int | None = None
    """DAPO's soft overlong punishment: the last tokens before `--rollout-max-response-len`, over which the reward falls
    linearly."""
    overlong_penalty_factor: float = 1.0
    """Subtracted from the reward of a response of full length."""
    use_opsm: bool = False
    """Off-policy sequence masking: leave out samples of negative advantage whose policy has moved too far."""
    opsm_delta: float = 1e-4
    """Too far: mean of old minus current log-prob over the sample's trained tokens is above this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchConfig:
    """Correction for the gap between the engine that samples and the trainer that scores (TIS, MIS, IcePop)."""

    use_tis: bool = False
    """Weigh each token's policy loss by the importance ratio trainer / engine of the old policy."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of each token, product over the sample's trained tokens, or geometric mean over them."""
    tis_mode: Literal["truncate", "clip", "mask"] = "clip"
    """Ratios outside of [tis_clip_low, tis_clip]: `truncate` lowers those above, `clip` also raises those below, `mask`
    leaves the tokens out of loss and denominator (IcePop)."""
    tis_clip: float = 2.0
    """Upper end of the weights."""
    tis_clip_low: float = 0.0
    """Lower end of the weights."""
    tis_batch_normalize: bool = False
    """Divide the weights by their mean over the whole optimizer step."""
    use_rs: bool = False
    """Rejection: leave tokens out of loss and denominator whose ratio is outside of [rs_lower_bound,
    rs_upper_bound]."""
    rs_level: Literal["token", "sequence", "geometric"] = "token"
    """As `--tis-level`; at the other two whole samples are rejected."""
    rs_upper_bound: float = 2.0
    """Largest ratio that is kept."""
    rs_lower_bound: float = 0.5
    """Smallest ratio that is kept."""
    rs_veto_threshold: float | None = None
    """Reject the whole sample if the ratio of any token is below this, e.g. 1e-4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """On-policy distillation from a teacher that scores what the policy samples."""

    use_opd: bool = False
    """Subtract `--opd-kl-coef` times (log-prob of the policy minus that of the teacher) from each token's advantage."""
    opd_kl_coef: float = 1.0
    """Weight of the teacher. With rewards that are all equal, nothing else is learned."""
    opd_teacher_load: str | None = None
    """Folder of the teacher's Hugging Face checkpoint, of the same tokenizer; sharded over the training ranks and on
    the GPU only while it scores."""
