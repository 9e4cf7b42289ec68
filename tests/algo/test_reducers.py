"""Weights of tokens in the loss of a step: what each sample, rollout and token counts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algo.batching import build_updates, loss_weights
from rlkit.algo.overlong import overlong_penalty
from rlkit.algo.reducers import token_weights
from rlkit.types.samples import Sample, SampleStatus


def test_siblings_share_the_weight_of_their_rollout():
    """Rollout 0 is one sample of 4 tokens; rollout 1 fans out into samples of 1 and 3."""
    assert loss_weights([4, 1, 3], per_token_loss=False, rollouts=[0, 1, 1]) == [1 / 8, 1 / 8, 1 / 8]
    assert loss_weights([4, 1, 3], per_token_loss=False) == pytest.approx([1 / 12, 1 / 3, 1 / 9])
    assert loss_weights([4, 1, 3], per_token_loss=False, constant_length=10, rollouts=[0, 1, 1]) == [1 / 20] * 3
    assert loss_weights([4, 1, 3], per_token_loss=True, rollouts=[0, 1, 1]) == [1 / 8] * 3


def test_a_rollout_that_was_rejected_counts_nowhere():
    tokens_R = torch.tensor([2.0, 0.0, 4.0])
    weights = token_weights(torch.tensor([0, 1, 2]), tokens_R, per_token_loss=False)
    assert weights.tolist()[::2] == [1 / 4, 1 / 8]
    assert token_weights(torch.tensor([1]), torch.zeros(3), per_token_loss=True).isfinite().all()
    assert token_weights(torch.tensor([1]), torch.zeros(3), per_token_loss=False).isfinite().all()


@given(
    rollouts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=9),
    constant=st.sampled_from([None, 7]),
)
def test_weights_equal_the_definition(rollouts: list[tuple[int, int]], constant: int | None):
    names = sorted({name for name, _ in rollouts})
    numbers, tokens = [names.index(name) for name, _ in rollouts], [count for _, count in rollouts]
    found = loss_weights(tokens, per_token_loss=False, constant_length=constant, rollouts=numbers)
    for weight, number in zip(found, numbers, strict=True):
        own = sum(count for other, count in zip(numbers, tokens, strict=True) if other == number)
        assert weight == pytest.approx(1.0 / (len(names) * (constant or own)), rel=1e-10)
    if constant is None:
        total = math.fsum(weight * count for weight, count in zip(found, tokens, strict=True))
        assert total == pytest.approx(1.0, abs=1e-10), "a loss of 1 everywhere has mean 1"
    by_token = loss_weights(tokens, per_token_loss=True, rollouts=numbers)
    assert by_token == pytest.approx([1.0 / sum(tokens)] * len(tokens), rel=1e-10)


def sample(group: int, index: int, num_tokens: int) -> Sample:
    return Sample(
        group_id=group,
        index=index,
        seed=0,
        tokens=[1] * (num_tokens + 1),
        prompt_length=1,
        loss_mask=[1] * num_tokens,
        rollout_logprobs=[-1.0] * num_tokens,
        status=SampleStatus.COMPLETED,
        reward=1.0,
    )


@pytest.mark.parametrize("dp", [1, 2])
def test_a_step_has_so_many_rollouts_however_they_fan_out(dp: int):
    samples = [sample(0, 0, 2), sample(0, 1, 3), sample(0, 1, 5), sample(1, 0, 4), sample(1, 1, 1), sample(1, 1, 2)]
    ranks = build_updates(
        samples,
        [float(i) for i in range(6)],
        dp=dp,
        batch_size=2,
        max_tokens=8,
        per_token_loss=False,
        with_rollout_logprobs=True,
    )
    for number, members in enumerate(([0, 1, 2], [3, 4, 5])):
        updates = [rank[number] for rank in ranks]
        assert {(update.num_samples, update.num_rollouts) for update in updates} == {(3, 2)}
        batches = [batch for update in updates for batch in update.micro_batches]
        assert sorted(i for batch in batches for i in batch.sample_ids_S.tolist()) == members
        rollouts = {
            i: rollout
            for batch in batches
            for i, rollout in zip(batch.sample_ids_S.tolist(), batch.rollouts_S.tolist(), strict=True)
        }
        assert [rollouts[i] for i in members] == [0, 1, 1]
        assert sum(batch.loss_weight_T.sum().item() for batch in batches) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (15, 0.0), (16, -0.25), (18, -0.75), (19, -1.0), (20, -1.0)]
)
def test_overlong_answers_lose_reward_little_by_little(length: int, expected: float):
    assert overlong_penalty(length, max_length=19, buffer_length=4) == expected
    assert overlong_penalty(length, max_length=19, buffer_length=4, factor=0.5) == 0.5 * expected
