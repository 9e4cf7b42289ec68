"""What a critic learns, against loops over tokens in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_batches import Packed, packed

from rlkit.algo.value import value_fit, value_loss


def naive_value_loss(value: float, old: float, target: float, clip: float) -> tuple[float, float, bool]:
    """(loss, its derivative, whether the clip decided)."""
    clipped = min(max(value, old - clip), old + clip)
    plain_loss, clipped_loss = (value - target) ** 2 / 2, (clipped - target) ** 2 / 2
    if clipped_loss > plain_loss:
        return clipped_loss, 0.0, True
    return plain_loss, value - target, False


def test_the_value_loss_by_hand():
    """Old 0, clip 0.2. Towards 1: 0.5 is clipped to 0.2, whose loss (0.32) is larger and flat; -0.5 is clipped to -0.2,
    but its own loss (1.125) is larger and pulls."""
    values_T = torch.tensor([0.5, -0.5, 0.1, 7.0], dtype=torch.float64, requires_grad=True)
    loss, sums = value_loss(
        values_T,
        torch.zeros(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.float64),
        mask_T=torch.tensor([True, True, True, False]),
        weight_T=torch.ones(4, dtype=torch.float64),
        value_clip=0.2,
    )
    assert loss.item() == pytest.approx(0.32 + 1.125 + 0.405, abs=1e-12)
    assert torch.autograd.grad(loss, values_T)[0].tolist() == pytest.approx([0.0, -1.5, -0.9, 0.0], abs=1e-12)
    assert sums["clip_fraction"].item() == 1.0


@given(
    batch=packed(num_columns=3, high=3.0),
    clip=st.sampled_from([1e-3, 0.2, 5.0]),
    garbage=st.sampled_from([math.nan, math.inf]),
)
def test_the_value_loss_equals_the_loop(batch: Packed, clip: float, garbage: float):
    values_T = batch.column(0, garbage=garbage).requires_grad_()
    weight_T = torch.linspace(0.1, 1.0, values_T.numel(), dtype=torch.float64)
    loss, sums = value_loss(
        values_T,
        batch.column(1, garbage=garbage),
        batch.column(2, garbage=garbage),
        mask_T=batch.mask_T,
        weight_T=weight_T,
        value_clip=clip,
    )
    weights = weight_T[batch.mask_T].tolist()
    columns = ([value for values in batch.kept(number) for value in values] for number in range(3))
    rows = [naive_value_loss(*row, clip) for row in zip(*columns, strict=True)]
    assert loss.item() == pytest.approx(math.fsum(w * row[0] for w, row in zip(weights, rows, strict=True)), abs=1e-10)
    assert sums["clip_fraction"].item() == sum(row[2] for row in rows)
    expected_T = torch.zeros_like(weight_T)
    expected_T[batch.mask_T] = torch.tensor([w * row[1] for w, row in zip(weights, rows, strict=True)]).double()
    torch.testing.assert_close(torch.autograd.grad(loss, values_T)[0], expected_T, rtol=1e-6, atol=1e-7)


@given(batch=packed(num_columns=2, high=3.0), offset=st.sampled_from([0.0, 1e6]), num_ranks=st.sampled_from([1, 2]))
def test_the_fit_equals_the_loop(batch: Packed, offset: float, num_ranks: int):
    """Also where a large mean would eat the digits of a sum of squares, and where ranks hold equal shares."""
    values = [value for row in batch.kept(0) for value in row]
    targets = [value + offset for row in batch.kept(1) for value in row]
    given = [batch.column(0, garbage=math.nan)], [batch.column(1, garbage=math.nan) + offset], [batch.mask_T]
    found = value_fit(*given, sum_shares=lambda partial: num_ranks * partial).tolist()
    if not values:
        assert found == [0.0, 0.0, 0.0]
        return
    mean_value, mean_target = math.fsum(values) / len(values), math.fsum(targets) / len(targets)
    assert found[:2] == pytest.approx([mean_value, mean_target], rel=1e-12)
    spread = math.fsum((target - mean_target) ** 2 for target in targets)
    errors = [target - value for target, value in zip(targets, values, strict=True)]
    rest = math.fsum((error - math.fsum(errors) / len(errors)) ** 2 for error in errors)
    if spread > 1e-6:
        assert found[2] == pytest.approx(1 - rest / spread, rel=1e-6, abs=1e-6 if offset else 1e-10)


def test_a_perfect_critic_explains_everything_and_a_constant_one_nothing():
    returns, masks = [torch.tensor([1.0, 2.0, 4.0])], [torch.ones(3, dtype=torch.bool)]
    assert value_fit(returns, returns, masks)[2].item() == 1.0
    assert value_fit([torch.zeros(3)], returns, masks)[2].item() == 0.0
    assert value_fit([torch.zeros(3)], [torch.ones(3)], masks)[2].item() == 0.0, "equal returns have nothing to explain"
