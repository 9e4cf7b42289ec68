"""From graded samples to what each training rank receives: one `Update` per optimizer step. Called by `rollout/`.

The loss denominators are fixed here, once per optimizer step over all ranks, and travel as `loss_weight_T`; so no later
sum depends on packing, micro-batching or the number of ranks.
"""

import math
from collections.abc import Hashable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from rlkit.algo.packing import plan_step
from rlkit.algo.reducers import token_weights
from rlkit.types.batches import PackedBatch, Update
from rlkit.types.errors import DataError
from rlkit.types.samples import Sample


def build_updates(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    *,
    dp: int,
    batch_size: int,
    max_tokens: int,
    per_token_loss: bool,
    with_rollout_logprobs: bool,
    constant_length: int | None = None,
    cp: int = 1,
    require_reward: bool = True,
    keep_groups: bool = False,
) -> list[list[Update]]:
    """[rank][optimizer step] of one rollout.

    Each block of `batch_size` consecutive rollouts, of one sample each unless they fan out into several, makes one
    optimizer step (the last block holds what is left). Inside a block, samples that cannot be trained on take no
    compute: not trainable, no finite reward (with `require_reward`; SFT has none), or a loss mask of zeros. A block
    without any trainable sample becomes an update without micro-batches. With `keep_groups` the samples of a group are
    neighbours in one micro-batch, and a group of which one cannot be trained on is left out. Raises DataError when a
    sample's lists do not fit together.
    """
    assert len(samples) == len(advantages) and batch_size > 0
    ranks: list[list[Update]] = [[] for _ in range(dp)]
    runs = [list(run) for _, run in groupby(range(len(samples)), key=lambda i: rollout_of(samples[i]))]
    for start in range(0, len(runs), batch_size):
        block = [i for run in runs[start : start + batch_size] for i in run]
        lost = {samples[i].group_id for i in block if not is_trained_on(samples[i], require_reward=require_reward)}
        kept = [i for i in block if is_trained_on(samples[i], require_reward=require_reward)]
        if keep_groups:
            kept = [i for i in kept if samples[i].group_id not in lost]
        for i in kept:
            _check(samples[i], i, with_rollout_logprobs=with_rollout_logprobs)
        num_loss_tokens = sum(sum(samples[i].loss_mask) for i in kept)
        number_of = {rollout: n for n, rollout in enumerate(dict.fromkeys(rollout_of(samples[i]) for i in kept))}
        rollouts = [number_of[rollout_of(samples[i])] for i in kept]
        weights = loss_weights(
            [sum(samples[i].loss_mask) for i in kept],
            rollouts=rollouts,
            per_token_loss=per_token_loss,
            constant_length=constant_length,
        )
        weight_of = dict(zip(kept, weights, strict=True))
        units = [[i] for i in kept]
        if keep_groups:
            units = [list(unit) for _, unit in groupby(kept, key=lambda i: samples[i].group_id)]
        lengths = [sum(samples[i].total_length for i in unit) for unit in units]
        plan = plan_step(lengths, dp=dp, max_tokens=max_tokens, cp=cp)
        for updates, micro_batches in zip(ranks, plan.micro_batches, strict=True):
            chosen = [[i for member in members for i in units[member]] for members in micro_batches]
            packed = [
                pack(
                    [samples[i] for i in members],
                    sample_ids=members,
                    advantages=[advantages[i] for i in members],
                    token_weights=[weight_of[i] for i in members],
                    rollouts=[number_of[rollout_of(samples[i])] for i in members],
                    with_rollout_logprobs=with_rollout_logprobs,
                )
                for members in chosen
            ]
            updates.append(
                Update(
                    micro_batches=packed,
                    num_loss_tokens=num_loss_tokens,
                    num_samples=len(kept),
                    num_rollouts=len(number_of),
                )
            )
    return ranks


def rollout_of(sample: Sample) -> Hashable:
    """What names a rollout in the run. The samples that one rollout fans out into stand side by side and share it."""
    return sample.group_id, sample.index


def is_trained_on(sample: Sample, *, require_reward: bool = True) -> bool:
    """Whether the sample takes part in the loss (and in its denominators)."""
    has_reward = sample.reward is not None and math.isfinite(sample.reward)
    return sample.status.is_trainable and (has_reward or not require_reward) and any(sample.loss_mask)


def loss_weights(
    num_loss_tokens: Sequence[int],
    *,
    per_token_loss: bool,
    constant_length: int | None = None,
    rollouts: Sequence[int] | None = None,
) -> list[float]:
    """Weight of one trained token of each sample. `num_loss_tokens` counts those of all samples of one optimizer step;
    `rollouts` numbers their rollouts from 0, unset: each sample is one.
    """
    assert all(tokens > 0 for tokens in num_loss_tokens)
    rollouts_S = torch.tensor(range(len(num_loss_tokens)) if rollouts is None else rollouts, dtype=torch.int64)
    tokens_S = torch.tensor(num_loss_tokens, dtype=torch.float64)
    tokens_R = torch.zeros(int(rollouts_S.max()) + 1 if rollouts_S.numel() else 0, dtype=torch.float64)
    tokens_R.index_add_(0, rollouts_S, tokens_S)
    return token_weights(rollouts_S, tokens_R, per_token_loss=per_token_loss, constant_length=constant_length).tolist()


def pack(
    samples: Sequence[Sample],
    *,
    sample_ids: Sequence[int],
    advantages: Sequence[float],
    token_weights: Sequence[float],
    with_rollout_logprobs: bool,
    rollouts: Sequence[int] | None = None,
) -> PackedBatch:
    """Lay samples end to end. No samples give the empty dummy that keeps ranks in step. `rollouts` unset: each sample
    is one."""
    lengths = np.array([sample.total_length for sample in samples], dtype=np.int64)
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    num_tokens = int(bounds[-1])
    ramp = np.arange(lengths.max() if len(lengths) else 0, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    mask = np.zeros(num_tokens, dtype=np.bool_)
    weight = np.zeros(num_tokens, dtype=np.float32)
    rollout_logp = np.zeros(num_tokens, dtype=np.float32)
    tokens = np.empty(num_tokens, dtype=np.int64)
    places = zip(samples, bounds[:-1].tolist(), bounds[1:].tolist(), token_weights, strict=True)
    for sample, start, end, token_weight in places:
        first = start + sample.prompt_length
        tokens[start:end] = sample.tokens
        positions[start:end] = ramp[: end - start]
        mask[first:end] = np.frombuffer(bytes(sample.loss_mask), dtype=np.bool_)
        np.multiply(mask[first:end], np.float32(token_weight), out=weight[first:end])
        if with_rollout_logprobs:
            rollout_logp[first:end] = sample.rollout_logprobs
    return PackedBatch(
        tokens_T=_tensor(tokens),
        positions_T=_tensor(positions),
        cu_seqlens=_tensor(bounds.astype(np.int32)),
        max_seqlen=int(lengths.max()) if len(lengths) else 0,
        loss_mask_T=_tensor(mask),
        loss_weight_T=_tensor(weight),
        advantages_S=_tensor(np.array(advantages, dtype=np.float32)),
        sample_ids_S=_tensor(np.array(sample_ids, dtype=np.int64)),
        rollouts_S=_tensor(np.array(range(len(samples)) if rollouts is None else rollouts, dtype=np.int64)),
        rollout_logp_T=_tensor(rollout_logp) if with_rollout_logprobs else None,
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)


def _check(sample: Sample, position: int, *, with_rollout_logprobs: bool) -> None:
    """Once, at the boundary; everything inside trusts it."""
    where = f"sample {position} of the rollout (group {sample.group_id}, index {sample.index})"
    if not 0 < sample.prompt_length < sample.total_length:
        raise DataError(
            f"{where} has a prompt of {sample.prompt_length} and {sample.total_length} tokens in all; "
            "prompt and response need at least one each"
        )
    if len(sample.loss_mask) != sample.response_length:
        raise DataError(
            f"{where} has a loss mask of {len(sample.loss_mask)} entries for {sample.response_length} response tokens"
        )
    if with_rollout_logprobs and len(sample.rollout_logprobs) != sample.response_length:
        raise DataError(
            f"{where} has {len(sample.rollout_logprobs)} log-probs for {sample.response_length} response tokens, "
            "it needs one a token"
        )
