"""Estimators of KL(policy, reference) from the log-probs of sampled tokens. Called by `losses.py`.

With d = log p_ref - log p_policy of a token that the policy sampled (Schulman, "Approximating KL Divergence", 2020):
k1 = -d is unbiased with high variance, k2 = d^2 / 2 is biased with low variance, k3 = exp(d) - d - 1 is unbiased, never
negative and of low variance. Their *gradients* are those of the KL only after multiplying by the importance ratio of
the token (DeepSeek-V3.2, arXiv:2512.02556), see `unbiased_kl`.
"""

from typing import Literal, assert_never

from torch import Tensor

KlType = Literal["k1", "k2", "k3", "low_var_kl"]

MAX_LOG_RATIO = 20.0
"""exp is taken of nothing larger: e^20 = 4.9e8 is finite in float32, and far outside any ratio worth a gradient."""

LOW_VAR_KL_BOUND = 10.0


def token_kl(logp: Tensor, ref_logp: Tensor, *, kl_type: KlType) -> Tensor:
    """KL estimate of each token, same shape as `logp`, differentiable with respect to it.

    Inputs are finite: mask before the call. In k3 and low_var_kl the difference is bounded to [-20, 20] before exp, so
    value and gradient stay finite (the gradient of a bounded token is 0); low_var_kl bounds the result to [-10, 10] as
    well.
    """
    difference = ref_logp - logp
    match kl_type:
        case "k1":
            return -difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            return _k3(difference)
        case "low_var_kl":
            return _k3(difference).clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND)
        case _:
            assert_never(kl_type)


def unbiased_kl(kl_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """Estimates times exp(logp - old), differentiable through both, for tokens that an older policy sampled.

    With k3 the gradient of a token is ratio * (logp - ref) * grad logp, that of the KL itself; without the ratio k3
    pulls along the wrong divergence. The log-ratio is bounded to [-20, 20].
    """
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * kl_T


def _k3(difference: Tensor) -> Tensor:
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1: exp(d) - 1 loses all digits where policy and reference nearly agree, which is most of training
    return bounded.expm1() - bounded
