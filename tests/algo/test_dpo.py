"""DPO: by hand, against a loop over pairs with autograd, and however the pairs are packed."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_batches import EXACT, Packed, packed
from torch import Tensor

from rlkit.algo.batching import build_updates
from rlkit.algo.dpo import dpo_loss, pair_loss
from rlkit.algo.sequences import Sequences
from rlkit.types.samples import Sample, SampleStatus

ROWS = {"sigmoid": "sigmoid", "smoothed": "sigmoid", "ipo": "ipo"}


def naive_pair(margin: Tensor, *, beta: float, loss_type: str, smoothing: float) -> Tensor:
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    right, wrong = (1 / (1 + torch.exp(-sign * beta * margin)) for sign in (1, -1))
    return -(1 - smoothing) * right.log() - smoothing * wrong.log()


def test_the_losses_by_hand():
    """beta 0.5, margins 2 and -2: sigmoid(1) = 0.731059, so the losses are 0.313262 and 1.313262."""
    margins_P = torch.tensor([2.0, -2.0], dtype=torch.float64)
    loss_P, slope_P = pair_loss(margins_P, beta=0.5, loss_type="sigmoid")
    assert loss_P.tolist() == pytest.approx([0.31326168751822286, 1.3132616875182228], abs=1e-12)
    assert slope_P.tolist() == pytest.approx([-0.5 * 0.2689414213699951, -0.5 * 0.7310585786300049], abs=1e-12)
    loss_P, _ = pair_loss(margins_P, beta=0.5, loss_type="sigmoid", label_smoothing=0.1)
    # 0.9 * 0.313262 + 0.1 * 1.313262
    assert loss_P.tolist() == pytest.approx([0.4132616875182229, 1.2132616875182228], abs=1e-12)
    loss_P, slope_P = pair_loss(margins_P, beta=0.5, loss_type="ipo")
    assert loss_P.tolist() == [1.0, 9.0] and slope_P.tolist() == [2.0, -6.0]


def test_a_pair_by_hand():
    """Log-ratios: chosen 0.5 + 0.5 (its third token is masked), rejected -1. beta 1: margin 2."""
    given: dict[str, Any] = {
        "mask_T": torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool),
        "is_chosen_S": torch.tensor([True, False]),
        "sequences": Sequences.of(torch.tensor([0, 4, 6]), 6),
        "weight_T": torch.tensor([9.0, 0.25, 0.25, 9.0, 9.0, 0.5], dtype=torch.float64),
    }
    logp_T = torch.tensor([0.0, -1.0, -2.0, math.nan, 0.0, -3.0], dtype=torch.float64, requires_grad=True)
    ref_T = torch.tensor([0.0, -1.5, -2.5, math.inf, 0.0, -2.0], dtype=torch.float64)
    loss, sums = dpo_loss(logp_T, ref_T, beta=1.0, **given)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-2.0)), abs=1e-12)
    slope = -1 / (1 + math.exp(2.0))
    assert torch.autograd.grad(loss, logp_T)[0].tolist() == pytest.approx([0, slope, slope, 0, 0, -slope], abs=1e-12)
    found = {name: value.item() for name, value in sums.items()}
    expected = {"dpo_accuracy": 1.0, "dpo_margin": 2.0, "dpo_chosen_reward": 1.0, "dpo_rejected_reward": -1.0}
    assert found == pytest.approx({"loss": loss.item(), "dpo_chosen_logp": -3.0, **expected})


@given(
    batch=packed(num_columns=2),
    beta=st.sampled_from([0.05, 0.5, 2.0]),
    loss_type=st.sampled_from(["sigmoid", "ipo"]),
    smoothing=st.sampled_from([0.0, 0.2]),
)
def test_dpo_equals_the_loop(batch: Packed, beta: float, loss_type: str, smoothing: float):
    """An odd last sequence is in no pair."""
    smoothing = smoothing if loss_type == "sigmoid" else 0.0
    num_pairs = len(batch.masks) // 2
    is_chosen_S = torch.tensor([n % 2 == 0 and n < 2 * num_pairs for n in range(len(batch.masks))])
    logp_T = batch.column(0, garbage=math.nan).requires_grad_()
    lengths = [len(mask) for mask in batch.masks]
    weight_T = torch.cat([torch.full((n,), 0.1 * (s + 1), dtype=torch.float64) for s, n in enumerate(lengths)])
    loss, sums = dpo_loss(
        logp_T,
        batch.column(1, garbage=math.inf),
        mask_T=batch.mask_T,
        weight_T=weight_T,
        is_chosen_S=is_chosen_S,
        sequences=batch.sequences,
        beta=beta,
        loss_type=loss_type,  # pyright: ignore[reportArgumentType]
        label_smoothing=smoothing,
    )
    leaves = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in batch.kept(0)]
    total, margins, weights = torch.zeros((), dtype=torch.float64), [], []
    for pair in range(num_pairs):
        ratios = [leaves[s].sum() - math.fsum(batch.kept(1)[s]) for s in (2 * pair, 2 * pair + 1)]
        weights.append(sum(0.1 * (s + 1) * len(batch.kept(0)[s]) for s in (2 * pair, 2 * pair + 1)))
        margins.append(ratios[0] - ratios[1])
        pair_value = naive_pair(margins[-1], beta=beta, loss_type=loss_type, smoothing=smoothing)
        total = total + weights[-1] * pair_value
    torch.testing.assert_close(loss.detach(), total.detach(), **EXACT)
    margin = sum(w * beta * m.item() for w, m in zip(weights, margins, strict=True))
    assert sums["dpo_margin"].item() == pytest.approx(margin, abs=1e-10)
    if num_pairs:
        gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        (found_T,) = torch.autograd.grad(loss, logp_T)
        torch.testing.assert_close(found_T, batch.put_back([g.tolist() for g in gradients]), **EXACT)


def pairs() -> list[Sample]:
    rng = random.Random(1)
    samples = []
    for number, length in enumerate([3, 9, 1, 1, 30, 2, 5, 6, 4, 7]):
        samples.append(
            Sample(
                group_id=number // 2,
                index=number % 2,
                seed=0,
                tokens=[rng.randrange(30) for _ in range(length + 2)],
                prompt_length=2,
                loss_mask=[1] * length,
                status=SampleStatus.COMPLETED,
                reward=0.0,
            )
        )
    return samples


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 16, 1000])
def test_a_pair_stays_together_and_weighs_as_much_as_another(dp: int, max_tokens: int):
    samples = pairs()
    options: dict[str, Any] = {"batch_size": 10, "per_token_loss": False, "with_rollout_logprobs": False}
    ranks = build_updates(samples, [1.0, -1.0] * 5, dp=dp, max_tokens=max_tokens, keep_groups=True, **options)
    seen, total = [], 0.0
    for batch in (batch for updates in ranks for update in updates for batch in update.micro_batches):
        ids = batch.sample_ids_S.tolist()
        assert all(first % 2 == 0 and second == first + 1 for first, second in zip(ids[::2], ids[1::2], strict=True))
        assert batch.advantages_S.tolist() == [1.0, -1.0] * (len(ids) // 2)
        seen += ids
        sequences = Sequences.of(batch.cu_seqlens, batch.num_tokens)
        weights = sequences.sums(batch.loss_weight_T)[0].view(-1, 2).sum(1)
        assert weights.tolist() == pytest.approx([0.2] * (len(ids) // 2))
        total += weights.sum().item()
    assert sorted(seen) == list(range(10)) and total == pytest.approx(1.0)


def test_half_a_pair_is_left_out():
    samples = pairs()
    samples[4].loss_mask = [0] * 30
    options: dict[str, Any] = {"batch_size": 10, "per_token_loss": False, "with_rollout_logprobs": False}
    (updates,) = build_updates(samples, [1.0, -1.0] * 5, dp=1, max_tokens=1000, keep_groups=True, **options)
    (batch,) = updates[0].micro_batches
    assert batch.sample_ids_S.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert updates[0].num_samples == 8
