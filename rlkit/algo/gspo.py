"""GSPO: one length-normalised importance ratio for a whole sequence. Called by `losses.py`.

Shapes: S packed sequences, T packed tokens. Zheng et al. 2025 (arXiv:2507.18071).
"""

from torch import Tensor

from rlkit.algo.sequences import Sequences


def sequence_log_ratio(log_ratio_T: Tensor, mask_T: Tensor, sequences: Sequences) -> Tensor:
    """[T]: at every token the mean log-ratio of its sequence's trained tokens, with the gradient of the token's own.

    log s = 1/n * sum of log-ratios (eq. 7); the token form sg(log s) + logp_t - sg(logp_t) (eq. 14) has, summed over
    the sequence, the gradient of s itself, and needs none through the sum. Masked entries of `log_ratio_T` are finite.
    """
    mean_T = sequences.spread(sequences.means(log_ratio_T, mask_T))
    return mean_T + log_ratio_T - log_ratio_T.detach()
