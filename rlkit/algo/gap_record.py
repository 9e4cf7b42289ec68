"""Keeps the log-prob difference of every token of a rollout on the device until somebody asks. Called by the backends.

Costs two bytes a token of device memory, one subtraction a micro-batch, and one copy to the host when it is read.
"""

import numpy as np
import torch
from torch import Tensor

from rlkit.types.batches import PackedBatch
from rlkit.types.gaps import LARGEST, NO_GAPS, TokenGaps


class GapRecord:
    """Of the rollout that is being trained on."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []
        self._bounds: list[Tensor] = []
        self._values: list[Tensor] = []

    def clear(self) -> None:
        self._ids, self._bounds, self._values = [], [], []

    def add(self, batch: PackedBatch, logp_T: Tensor) -> None:
        """Note a micro-batch. Compared are the log-probs of the weights that the rollout started with, where they were
        scored: as in `train_rollout_logprob_abs_diff`.
        """
        if batch.rollout_logp_T is None:
            return
        scored_T = logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T
        gap_T = torch.where(batch.loss_mask_T, scored_T - batch.rollout_logp_T, 0.0)
        self._values.append(gap_T.clamp(-LARGEST, LARGEST).to(torch.float16))
        self._ids.append(batch.sample_ids_S)
        self._bounds.append(batch.cu_seqlens[1:])

    def read(self) -> TokenGaps:
        """What was noted since `clear`. Waits for the device."""
        if not self._values:
            return NO_GAPS
        ids: list[int] = []
        ends: list[int] = []
        kept: list[np.ndarray] = []
        total = 0
        for ids_S, bounds_S, value_T in zip(self._ids, self._bounds, self._values, strict=True):
            bounds = bounds_S.tolist()
            padded = value_T.cpu().numpy()
            kept.append(padded[: bounds[-1]] if bounds else padded[:0])
            ids += ids_S.tolist()
            ends += [total + bound for bound in bounds]
            total += bounds[-1] if bounds else 0
        return TokenGaps(sample_ids=ids[: len(ends)], ends=ends, values=np.concatenate(kept))
