"""Micro-batches as the stages of a pipeline want them. Called by `backend.py`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlkit.algo.context_shards import num_padding_tokens, pad_row
from rlkit.algo.logprobs import scored_positions
from rlkit.backends.attention.context import context_layout
from rlkit.backends.attention.packed import PackedLayout, packed_layout
from rlkit.backends.megatron.parallel import Ranks
from rlkit.config.schema import RunConfig
from rlkit.types.batches import PackedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """A packed batch with what the model needs to run it."""

    batch: PackedBatch
    layout: PackedLayout
    scored_N: Tensor  # int64 [N]; positions of the trained tokens that this rank scores
    predictors_N: Tensor  # int64 [N]; for each, which of this rank's hidden states predicts it
    tokens_T: Tensor  # int64; this rank's tokens of the row
    positions_T: Tensor  # int64; theirs

    def to(self, device: torch.device) -> "MicroBatch":
        if device.type == "cpu":
            return self
        return MicroBatch(
            batch=self.batch.to(device),
            layout=self.layout.to(device),
            scored_N=self.scored_N.to(device),
            predictors_N=self.predictors_N.to(device),
            tokens_T=self.tokens_T.to(device),
            positions_T=self.positions_T.to(device),
        )


def micro_batch(batch: PackedBatch, ranks: Ranks, cfg: RunConfig) -> MicroBatch:
    """Prepare a batch that lies on the CPU. An empty one becomes two untrained tokens; rows are padded so that ranks
    that share them hold equally many tokens, under sequence parallelism also each tensor-parallel rank.
    """
    if batch.num_tokens == 0:
        batch = _dummy(batch)
    cp = ranks.mesh.context_size
    tensor = ranks.tensor.size if cfg.megatron.sequence_parallel else 1
    batch = pad_row(batch, num_padding_tokens(batch.num_tokens, cp * tensor))
    layout = packed_layout(batch.cu_seqlens)
    scored_N = scored_positions(batch.loss_mask_T, batch.cu_seqlens)
    predictors_N, tokens_T, positions_T = scored_N - 1, batch.tokens_T, batch.positions_T
    if cp > 1:
        context = context_layout(
            batch.cu_seqlens.tolist(), cp=cp, rank=ranks.mesh.context_rank, group=ranks.mesh.context_group
        )
        layout = replace(layout, context=context)
        local_N = context.local_of_row[predictors_N]
        scored_N, predictors_N = scored_N[local_N >= 0], local_N[local_N >= 0]
        tokens_T, positions_T = tokens_T[context.positions], positions_T[context.positions]
    return MicroBatch(
        batch=batch,
        layout=layout,
        scored_N=scored_N,
        predictors_N=predictors_N,
        tokens_T=tokens_T,
        positions_T=positions_T,
    )


def without_loss(micro: MicroBatch) -> MicroBatch:
    """The same tokens, none of which is trained on."""
    batch = micro.batch
    untrained = replace(
        batch,
        loss_mask_T=torch.zeros_like(batch.loss_mask_T),
        loss_weight_T=torch.zeros_like(batch.loss_weight_T),
        sample_ids_S=torch.full_like(batch.sample_ids_S, -1),
    )
    return replace(micro, batch=untrained, scored_N=micro.scored_N[:0], predictors_N=micro.predictors_N[:0])


def _dummy(batch: PackedBatch) -> PackedBatch:
    return replace(
        batch,
        tokens_T=torch.zeros(2, dtype=torch.int64),
        positions_T=torch.arange(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        max_seqlen=2,
        loss_mask_T=torch.zeros(2, dtype=torch.bool),
        loss_weight_T=torch.zeros(2),
        advantages_S=torch.zeros(1),
        sample_ids_S=torch.full((1,), -1, dtype=torch.int64),
        rollouts_S=torch.zeros(1, dtype=torch.int64),
        rollout_logp_T=None if batch.rollout_logp_T is None else torch.zeros(2),
    )
