"""CISPO: the importance ratio is clipped and held fixed, so that no token loses its gradient. Called by `losses.py`.

Shapes: T packed tokens. MiniMax-M1 (arXiv:2506.13585).
"""

from torch import Tensor

from rlkit.algo.kl import MAX_LOG_RATIO


def cispo_objective(
    logp_T: Tensor, log_ratio_T: Tensor, advantages_T: Tensor, *, eps_clip: float, eps_clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """(token losses, bool: the ratio was clipped), both [T]: -sg(clip(ratio, 1 - eps_clip, 1 + eps_clip_high)) * A *
    logp. Inputs are finite. `eps_clip` = 1 leaves the ratio free from below, as the paper does.
    """
    eps_high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio_T = log_ratio_T.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded_T = ratio_T.clamp(1.0 - eps_clip, 1.0 + eps_high)
    return -bounded_T * advantages_T * logp_T, bounded_T != ratio_T
