"""Off-policy sequence masking. Called by `objective.py`.

Shapes: S packed sequences, T packed tokens. DeepSeek-V3.2 (arXiv:2512.02556).
"""

from torch import Tensor

from rlkit.algo.sequences import Sequences


def drifted_sequences(
    logp_T: Tensor, old_logp_T: Tensor, advantages_T: Tensor, mask_T: Tensor, sequences: Sequences, *, delta: float
) -> Tensor:
    """bool [T]: trained tokens of negative advantage in sequences whose mean old - current log-prob is above `delta`.

    Their loss is to be left out, while denominators stay: an answer that was bad, and that the policy hardly gives any
    more, has nothing left to teach.
    """
    drift_T = sequences.spread(sequences.means(old_logp_T.detach() - logp_T.detach(), mask_T))
    return mask_T & (advantages_T < 0) & (drift_T > delta)
