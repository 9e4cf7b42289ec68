"""Estimators of KL(policy, reference) from the log-probs of sampled tokens. Called by `losses.py`.

With d = log p_ref - log p_policy of a token that the policy sampled (Schulman, "Approximating KL Divergence", 2020):
k1 = -d is unbiased with high variance, k2 = d^2 / 2 is biased with low variance, k3 = exp(d) - d - 1 is unbiased, never
negative and of low variance.
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


def _k3(difference: Tensor) -> Tensor:
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1: exp(d) - 1 loses all digits where policy and reference nearly agree, which is most of training
    return bounded.expm1() - bounded
