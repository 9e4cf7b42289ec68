import math
import time
from dataclasses import replace

import pytest
import torch

from rlkit.algo.batching import build_updates, is_trained_on, loss_weights, pack
from rlkit.types.batches import PackedBatch, Update
from rlkit.types.errors import DataError
from rlkit.types.samples import Sample, SampleStatus


def make_sample(number: int, prompt: int, mask: list[int], **changes: object) -> Sample:
    tokens = [1000 * number + i for i in range(prompt + len(mask))]
    sample = Sample(
        group_id=number // 2,
        index=number % 2,
        seed=0,
        tokens=tokens,
        prompt_length=prompt,
        loss_mask=mask,
        rollout_logprobs=[-0.1 * (i + 1) for i in range(len(mask))],
        status=SampleStatus.COMPLETED,
        reward=1.0,
    )
    return replace(sample, **changes)


def updates_of(samples: list[Sample], **options: object) -> list[list[Update]]:
    settings = {
        "dp": 1,
        "batch_size": len(samples),
        "max_tokens": 1000,
        "per_token_loss": False,
        "with_rollout_logprobs": True,
    }
    return build_updates(samples, [float(i + 1) for i in range(len(samples))], **(settings | options))


def batches_of(ranks: list[list[Update]]) -> list[PackedBatch]:
    return [batch for updates in ranks for update in updates for batch in update.micro_batches]


def test_a_packed_batch_lays_samples_end_to_end():
    samples = [make_sample(0, 2, [1, 0, 1]), make_sample(1, 1, [1])]
    batch = pack(
        samples, sample_ids=[4, 9], advantages=[0.5, -1.0], token_weights=[0.25, 0.5], with_rollout_logprobs=True
    )
    assert batch.tokens_T.tolist() == [0, 1, 2, 3, 4, 1000, 1001]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 7] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 5
    assert batch.loss_mask_T.tolist() == [False, False, True, False, True, False, True]
    assert batch.loss_weight_T.tolist() == [0, 0, 0.25, 0, 0.25, 0, 0.5]
    assert batch.advantages_S.tolist() == [0.5, -1.0]
    assert batch.sample_ids_S.tolist() == [4, 9]
    assert batch.rollout_logp_T is not None
    assert batch.rollout_logp_T.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, -0.1])


def test_an_empty_batch_is_valid():
    batch = pack([], sample_ids=[], advantages=[], token_weights=[], with_rollout_logprobs=False)
    assert (batch.num_tokens, batch.num_sequences, batch.max_seqlen) == (0, 0, 0)
    assert batch.cu_seqlens.tolist() == [0]
    assert batch.rollout_logp_T is None


@pytest.mark.parametrize("per_token_loss", [False, True], ids=["sample_mean", "token_mean"])
@pytest.mark.parametrize(("dp", "max_tokens"), [(1, 1000), (1, 7), (2, 7), (3, 1000)])
def test_weights_sum_to_one_however_the_step_is_split(per_token_loss: bool, dp: int, max_tokens: int):
    samples = [make_sample(i, 1 + i % 3, [1] * (1 + i % 4)) for i in range(7)]
    ranks = updates_of(samples, dp=dp, max_tokens=max_tokens, per_token_loss=per_token_loss)
    total = sum(batch.loss_weight_T.double().sum().item() for batch in batches_of(ranks))
    assert total == pytest.approx(1.0, abs=1e-6)
    by_sample = {}
    for batch in batches_of(ranks):
        for number, start, end in zip(
            batch.sample_ids_S.tolist(), batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
        ):
            by_sample[number] = batch.loss_weight_T[start:end].max().item()
    num_tokens = [len(sample.loss_mask) for sample in samples]
    for number, tokens in enumerate(num_tokens):
        expected = 1 / sum(num_tokens) if per_token_loss else 1 / (len(samples) * tokens)
        assert by_sample[number] == pytest.approx(expected, rel=1e-6)
    assert {update.num_loss_tokens for updates in ranks for update in updates} == {sum(num_tokens)}
    assert {update.num_samples for updates in ranks for update in updates} == {len(samples)}


def test_each_block_of_samples_is_one_optimizer_step():
    samples = [make_sample(i, 1, [1, 1]) for i in range(8)]
    ranks = updates_of(samples, batch_size=3, dp=2)
    for step, members in enumerate([{0, 1, 2}, {3, 4, 5}, {6, 7}]):
        found = [batch.sample_ids_S.tolist() for updates in ranks for batch in updates[step].micro_batches]
        assert {number for numbers in found for number in numbers} == members
        assert ranks[0][step].num_samples == len(members)
        assert len(ranks[0][step].micro_batches) == len(ranks[1][step].micro_batches)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": SampleStatus.ABORTED},
        {"status": SampleStatus.FAILED},
        {"reward": None},
        {"reward": math.nan},
        {"loss_mask": [0, 0]},
    ],
    ids=["aborted", "failed", "unscored", "nan", "masked"],
)
def test_samples_that_cannot_be_trained_take_no_compute(changes: dict[str, object]):
    samples = [make_sample(0, 1, [1, 1]), make_sample(1, 1, [1, 1], **changes), make_sample(2, 1, [1])]
    assert not is_trained_on(samples[1])
    ranks = updates_of(samples)
    assert [batch.sample_ids_S.tolist() for batch in batches_of(ranks)] == [[0, 2]]
    assert (ranks[0][0].num_samples, ranks[0][0].num_loss_tokens) == (2, 3)
    kept_only = updates_of([samples[0], samples[2]])
    assert torch.equal(batches_of(ranks)[0].loss_weight_T, batches_of(kept_only)[0].loss_weight_T)


def test_a_step_without_trainable_samples_is_empty_on_all_ranks():
    samples = [make_sample(i, 1, [1], reward=None if i < 2 else 1.0) for i in range(4)]
    ranks = updates_of(samples, batch_size=2, dp=2)
    assert [len(updates) for updates in ranks] == [2, 2]
    assert [updates[0].micro_batches for updates in ranks] == [[], []]
    assert (ranks[0][0].num_loss_tokens, ranks[0][1].num_loss_tokens) == (0, 2)


def test_sft_samples_need_no_reward():
    samples = [make_sample(0, 1, [1], reward=None, rollout_logprobs=[])]
    (batch,) = batches_of(updates_of(samples, require_reward=False, with_rollout_logprobs=False))
    assert batch.sample_ids_S.tolist() == [0]
    assert batch.rollout_logp_T is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_length": 0, "loss_mask": [1] * 4}, "prompt of 0"),
        ({"loss_mask": [1, 1]}, "loss mask of 2 entries for 3"),
        ({"rollout_logprobs": [-0.1]}, "1 log-probs for 3"),
    ],
    ids=["no_prompt", "mask", "logprobs"],
)
def test_lists_that_do_not_fit_are_named(changes: dict[str, object], message: str):
    samples = [make_sample(0, 1, [1, 1, 1]), make_sample(1, 1, [1, 1, 1], **changes)]
    with pytest.raises(DataError, match=f"sample 1 .*{message}"):
        updates_of(samples)


def test_loss_weights_of_an_empty_step():
    assert loss_weights([], per_token_loss=True) == []
    assert loss_weights([], per_token_loss=False) == []


def test_packing_256_samples_of_1000_tokens_is_fast():
    samples = [make_sample(i, 200, [1] * 800) for i in range(256)]
    start = time.process_time()
    updates_of(samples, dp=2, max_tokens=8192)
    assert time.process_time() - start < 0.6  # 0.06 s on an idle core
