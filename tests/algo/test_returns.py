"""What runs backwards through a sequence, and what is whitened afterwards, against loops over its tokens."""

import math

import pytest
import torch
from algo_cases import case
from hypothesis import given
from hypothesis import strategies as st
from packed_batches import EXACT, Packed, packed

from rlkit.algo.distillation import distillation_advantages
from rlkit.algo.ppo import gae
from rlkit.algo.reinforce import returns_to_go
from rlkit.algo.scan import reverse_scan
from rlkit.algo.whitening import whiten

DISCOUNTS = st.sampled_from([1.0, 0.99, 0.5])


def test_returns_by_hand():
    """Tokens: two of the prompt, three trained with one of a tool between. Score 2, penalties 0.1, 0.2, 0.3."""
    mask_T = torch.tensor([0, 0, 1, 0, 1, 1], dtype=torch.bool)
    penalties_T = torch.tensor([9.0, 9.0, 0.1, 9.0, 0.2, 0.3], dtype=torch.float64)
    given = {"mask_T": mask_T, "cu_seqlens": torch.tensor([0, 6]), "max_len": 6}
    returns_T = returns_to_go(torch.full((6,), 2.0, dtype=torch.float64), penalties_T, **given)
    assert returns_T.tolist() == pytest.approx([0, 0, 1.4, 0, 1.5, 1.7], abs=1e-12)
    halved_T = returns_to_go(torch.full((6,), 2.0, dtype=torch.float64), penalties_T, gamma=0.5, **given)
    # 1.7, then -0.2 + 0.85, then -0.1 + 0.325: the tool's token is no step
    assert halved_T.tolist() == pytest.approx([0, 0, 0.225, 0, 0.65, 1.7], abs=1e-12)
    plain_T = returns_to_go(torch.full((6,), 2.0), None, **given)
    assert plain_T.tolist() == [0, 0, 2, 0, 2, 2]


@given(batch=packed(num_columns=2), gamma=DISCOUNTS, garbage=st.sampled_from([math.nan, math.inf, 1e30]))
def test_returns_equal_the_loop(batch: Packed, gamma: float, garbage: float):
    scores = [float(number + 1) for number in range(len(batch.masks))]
    expected = []
    for score, penalties in zip(scores, batch.kept(0), strict=True):
        running, backwards = 0.0, []
        for place, penalty in enumerate(reversed(penalties)):
            running = (score if place == 0 else 0.0) - penalty + gamma * running
            backwards.append(running)
        expected.append(backwards[::-1])
    found_T = returns_to_go(
        batch.sequences.spread(torch.tensor(scores, dtype=torch.float64)),
        batch.column(0, garbage=garbage),
        mask_T=batch.mask_T,
        cu_seqlens=batch.cu_seqlens,
        max_len=batch.max_len,
        gamma=gamma,
    )
    torch.testing.assert_close(found_T, batch.put_back(expected), **EXACT)


def test_gae_by_hand():
    """Rewards 0, 0, 1; values 0.5, 0.6, 0.7; gamma 0.9, lambda 0.8."""
    advantages_T, returns_T = gae(
        torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64),
        torch.tensor([0.5, 0.6, 0.7], dtype=torch.float64),
        mask_T=torch.ones(3, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 3]),
        max_len=3,
        gamma=0.9,
        lambd=0.8,
    )
    # deltas 0.04, 0.03, 0.3; A_2 = 0.3, A_1 = 0.03 + 0.72 * 0.3, A_0 = 0.04 + 0.72 * 0.246
    assert advantages_T.tolist() == pytest.approx([0.21712, 0.246, 0.3], abs=1e-12)
    assert returns_T.tolist() == pytest.approx([0.71712, 0.846, 1.0], abs=1e-12)


@given(batch=packed(num_columns=2, high=3.0), gamma=DISCOUNTS, lambd=DISCOUNTS)
def test_gae_equals_the_loop(batch: Packed, gamma: float, lambd: float):
    all_advantages, all_returns = [], []
    for rewards, values in zip(batch.kept(0), batch.kept(1), strict=True):
        running, advantages = 0.0, [0.0] * len(values)
        for t in reversed(range(len(values))):
            following = values[t + 1] if t + 1 < len(values) else 0.0
            running = rewards[t] + gamma * following - values[t] + gamma * lambd * running
            advantages[t] = running
        all_advantages.append(advantages)
        all_returns.append([a + v for a, v in zip(advantages, values, strict=True)])
    advantages_T, returns_T = gae(
        batch.column(0, garbage=math.nan),
        batch.column(1, garbage=math.nan),
        mask_T=batch.mask_T,
        cu_seqlens=batch.cu_seqlens,
        max_len=batch.max_len,
        gamma=gamma,
        lambd=lambd,
    )
    torch.testing.assert_close(advantages_T, batch.put_back(all_advantages), **EXACT)
    torch.testing.assert_close(returns_T, batch.put_back(all_returns), **EXACT)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 1000])
def test_the_scan_reaches_from_end_to_beginning(length: int):
    carry_T = torch.full((length,), 1.0, dtype=torch.float64)
    carry_T[-1] = 0.0
    values_T = torch.ones(length, dtype=torch.float64)
    assert reverse_scan(values_T, carry_T, max_len=length).tolist() == list(range(length, 0, -1))
    assert values_T.sum() == length and carry_T.sum() == length - 1, "the inputs are not touched"


def test_the_scan_of_nothing_is_nothing():
    assert reverse_scan(torch.zeros(0), torch.zeros(0), max_len=0).numel() == 0


@given(batch=packed(num_columns=2))
def test_distillation_is_minus_the_gap(batch: Packed):
    found_T = distillation_advantages(
        batch.column(0, garbage=math.nan), batch.column(1, garbage=math.nan), mask_T=batch.mask_T, coef=0.5
    )
    pairs = zip(batch.kept(0), batch.kept(1), strict=True)
    expected = [[-0.5 * (a - b) for a, b in zip(ours, theirs, strict=True)] for ours, theirs in pairs]
    torch.testing.assert_close(found_T, batch.put_back(expected), **EXACT)


def test_cp04_whitening_spans_the_ranks():
    """Two ranks hold [1, 2] and [5, 6]; each sees the sums of both."""
    cp04 = case("cp-04")
    shards = [torch.tensor(values, dtype=torch.float64) for values in cp04["input"]["advantages"].values()]
    masks = [torch.ones(len(shard), dtype=torch.bool) for shard in shards]
    whole = torch.cat(whiten(shards, masks)).tolist()
    assert whole == pytest.approx(cp04["expected"]["whitened_ddof1"], abs=1e-5)
    found: list[float] = []
    for mine, mask in zip(shards, masks, strict=True):
        sums = iter([torch.tensor([4.0, 14.0]), torch.tensor([17.0])])  # of both ranks: count and sum, then squares
        found += whiten([mine], [mask], sum_shares=lambda _, sums=sums: next(sums).double())[0].tolist()
    assert found == pytest.approx(whole, abs=1e-12)


@given(batch=packed(num_columns=1, low=990.0, high=1010.0), split=st.integers(0, 40))
def test_whitening_is_the_definition_however_it_is_split(batch: Packed, split: int):
    values = [value for sequence in batch.kept(0) for value in sequence]
    value_T, mask_T = batch.column(0, garbage=math.nan), batch.mask_T
    parts = whiten([value_T[:split], value_T[split:]], [mask_T[:split], mask_T[split:]])
    centre = math.fsum(values) / max(len(values), 1)
    variance = math.fsum((value - centre) ** 2 for value in values) / max(len(values) - 1, 1)
    expected = [[(v - centre) / math.sqrt(variance + 1e-8) for v in sequence] for sequence in batch.kept(0)]
    # values of 1e3 with equal digits: rounding of the mean counts 1e4 times where the variance is nothing
    torch.testing.assert_close(torch.cat(parts), batch.put_back(expected), rtol=1e-8, atol=1e-8)


def test_whitening_keeps_the_digits_of_float32_values():
    values_T = 1e4 + torch.arange(4.0)
    (found_T,) = whiten([values_T], [torch.ones(4, dtype=torch.bool)])
    assert found_T.dtype == torch.float32
    assert found_T.tolist() == pytest.approx([-1.161895, -0.387298, 0.387298, 1.161895], abs=1e-6)


@pytest.mark.parametrize("values", [[], [3.0], [2.5, 2.5, 2.5]], ids=["nothing", "one", "equal"])
def test_whitening_without_spread_gives_zeros(values: list[float]):
    value_T = torch.tensor([*values, math.nan])
    mask_T = torch.tensor([True] * len(values) + [False])
    assert whiten([value_T], [mask_T])[0].tolist() == [0.0] * (len(values) + 1)
