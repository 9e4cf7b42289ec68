"""What a training rank receives: an `Update` per optimizer step, made of `PackedBatch` micro-batches, and how it was
planned.

Shapes: S packed sequences, T packed tokens. Every per-token tensor is aligned with the token it is about: entry t
belongs to `tokens_T[t]`, whose log-prob comes from the logits of position t-1. Entries at sequence starts and in
prompts are zero.

Invariant: `loss_weight_T` already holds the global denominator of the whole optimizer step, so the loss of a step is
the plain sum of `token_loss_T * loss_weight_T` over all micro-batches of all ranks. It depends on neither packing,
micro-batching nor rank count.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Whole sequences laid end to end: one micro-batch of one rank. May hold zero sequences (a dummy that keeps
    collectives in step)."""

    tokens_T: Tensor  # int64 [T]
    positions_T: Tensor  # int64 [T]; restarts at 0 in every sequence
    cu_seqlens: Tensor  # int32 [S+1]; sequence s is tokens_T[cu_seqlens[s]:cu_seqlens[s+1]]
    max_seqlen: int  # longest sequence; 0 when empty
    loss_mask_T: Tensor  # bool [T]; True where a sampled token is trained on
    loss_weight_T: Tensor  # f32 [T]; share of each token in the step's loss, 0 where masked
    advantages_S: Tensor  # f32 [S]; what each sample's tokens share: its advantage, or score for token returns (SFT: 1)
    sample_ids_S: Tensor  # int64 [S]; position of each sample in the rollout, for metrics and replay
    rollouts_S: Tensor  # int64 [S]; number of each sample's rollout inside the optimizer step; siblings share it
    rollout_logp_T: Tensor | None  # f32 [T]; engine log-probs; None for SFT
    old_logp_T: Tensor | None = None  # f32 [T]; policy log-probs before the first step; filled by the backend
    ref_logp_T: Tensor | None = None  # f32 [T]; reference log-probs; filled by the backend when KL is used
    teacher_logp_T: Tensor | None = None  # f32 [T]; teacher log-probs; filled by the backend for distillation
    values_T: Tensor | None = None  # f32 [T]; the critic's values before the first step; filled by the backend for PPO
    returns_T: Tensor | None = None  # f32 [T]; what the critic learns; filled by `algo.objective`
    advantages_T: Tensor | None = None  # f32 [T]; filled by `algo.objective` where tokens of a sample differ
    importance_T: Tensor | None = None  # f32 [T]; filled by `algo.objective` where weights need the whole step

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.numel()

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch with every tensor on `device`. The only device move in the package."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer step as one data-parallel rank sees it. All ranks hold equally many micro-batches."""

    micro_batches: list[PackedBatch]
    num_loss_tokens: int
    """Trained tokens of the whole step over all ranks; the denominator of token means and of per-token metrics."""
    num_samples: int
    """Samples with at least one trained token, over all ranks."""
    num_rollouts: int
    """Rollouts these samples are of, over all ranks: fewer where a rollout fans out into several samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Which samples form which micro-batch on which rank, for one optimizer step. Made by `algo.packing.plan_step`."""

    micro_batches: list[list[list[int]]]
    """[rank][micro-batch] -> sample indices, relative to the list that was planned."""

    @property
    def dp(self) -> int:
        return len(self.micro_batches)

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches[0])
