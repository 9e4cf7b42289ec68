"""Clip, GSPO and CISPO: value and gradient of the policy loss, by hand and against loops over tokens."""

import math

import pytest
import torch
from algo_cases import case
from hypothesis import given
from hypothesis import strategies as st
from packed_batches import EXACT, Packed, mean, packed

from rlkit.algo.cispo import cispo_objective
from rlkit.algo.gspo import sequence_log_ratio
from rlkit.algo.kl import token_kl, unbiased_kl
from rlkit.algo.losses import mismatch_kl, policy_loss
from rlkit.algo.opsm import drifted_sequences
from rlkit.algo.ppo import clipped_objective
from rlkit.algo.sequences import Sequences

LOW, HIGH = 0.1, 0.3


def test_ls12_one_ratio_for_a_sequence():
    ls12 = case("ls-12")
    log_T = torch.tensor(ls12["input"]["log_ratios"], dtype=torch.float64)
    mask_T = torch.tensor(ls12["input"]["mask"], dtype=torch.bool)
    eps, expected, near = ls12["input"]["eps"], ls12["expected"], {"abs": ls12["tolerance"]}
    log_ratio_T = sequence_log_ratio(log_T, mask_T, Sequences.of(torch.tensor([0, 4]), 4))
    assert log_ratio_T[:3].exp().tolist() == pytest.approx([expected["sequence_ratio"]] * 3, **near)
    for advantage, name in ((1.0, "loss_A_plus1"), (-1.0, "loss_A_minus1")):
        loss, _ = policy_loss(
            log_T,
            torch.zeros_like(log_T),
            torch.full_like(log_T, advantage),
            mask_T=mask_T,
            weight_T=torch.full_like(log_T, 1 / 3),
            eps_clip=eps,
            objective="gspo",
            sequences=Sequences.of(torch.tensor([0, 4]), 4),
        )
        assert loss.item() == pytest.approx(expected[name], **near)


def test_gspos_gradient_is_that_of_the_sequence_ratio():
    """d/d logp of -A * exp(mean log-ratio), by autograd through the mean itself."""
    old_T = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
    logp_T = torch.tensor([-0.98, -0.52, -1.97], dtype=torch.float64, requires_grad=True)
    direct = -2.0 * (logp_T - old_T).mean().exp()
    (expected_T,) = torch.autograd.grad(direct, logp_T)
    loss, _ = policy_loss(
        logp_T,
        old_T,
        torch.full((3,), 2.0, dtype=torch.float64),
        mask_T=torch.ones(3, dtype=torch.bool),
        weight_T=torch.full((3,), 1 / 3, dtype=torch.float64),
        eps_clip=0.2,
        objective="gspo",
        sequences=Sequences.of(torch.tensor([0, 3]), 3),
    )
    assert loss.item() == pytest.approx(direct.item(), abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss, logp_T)[0], expected_T, **EXACT)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logp_T = torch.log(torch.tensor([0.8, 0.4, 0.1], dtype=torch.float64)).requires_grad_()
    old_T = torch.log(torch.tensor([0.4, 0.4, 0.4], dtype=torch.float64))  # ratios 2, 1 and 1/4
    loss_T, clipped_T = cispo_objective(
        logp_T, logp_T - old_T, torch.tensor([1.0, -1.0, 2.0]), eps_clip=0.5, eps_clip_high=0.25
    )
    assert clipped_T.tolist() == [True, False, True]
    expected = [-1.25 * math.log(0.8), math.log(0.4), -0.5 * 2 * math.log(0.1)]
    assert loss_T.tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.grad(loss_T.sum(), logp_T)[0].tolist() == pytest.approx([-1.25, 1.0, -1.0], abs=1e-12)
    free_T, clipped_T = cispo_objective(logp_T, logp_T - old_T, torch.ones(3), eps_clip=1.0, eps_clip_high=9.0)
    assert not clipped_T.any() and free_T[2].item() == pytest.approx(-0.25 * math.log(0.1), abs=1e-12)


@given(
    batch=packed(num_columns=4),
    objective=st.sampled_from(["clip", "gspo", "cispo"]),
    clip_c=st.sampled_from([None, 1.5]),
    shift=st.sampled_from([0.0, 0.2]),
)
def test_policy_loss_and_gradient_equal_the_loop(batch: Packed, objective: str, clip_c: float | None, shift: float):
    """Columns: log-probs, old ones (drawn nearby), advantages, weights of the importance correction."""
    near = [[new + 0.1 * old for new, old in zip(*pair, strict=True)] for pair in zip(*batch.columns[:2], strict=True)]
    batch = Packed(masks=batch.masks, columns=[batch.columns[0], near, *batch.columns[2:]])
    clip_c = None if objective == "cispo" else clip_c
    total, gradients = 0.0, []
    rows = zip(*(batch.kept(n) for n in range(4)), strict=True)
    for logps, olds, raw_advantages, importances in rows:
        logs = [new - old for new, old in zip(logps, olds, strict=True)]
        row = []
        for t, (logp, own_log, raw, importance) in enumerate(
            zip(logps, logs, raw_advantages, importances, strict=True)
        ):
            advantage = raw + 1.5
            ratio = math.exp(mean(logs) if objective == "gspo" else own_log)
            bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
            if objective == "cispo":
                token, slope = -bounded * advantage * logp, -bounded * advantage
            else:
                token = max(-ratio * advantage, -bounded * advantage)
                slope = -ratio * advantage if token == -ratio * advantage else 0.0
                if clip_c is not None and advantage < 0 and token > -clip_c * advantage:
                    token, slope = -clip_c * advantage, 0.0
            weight = 0.1 * (t + 1)
            total += token * importance * weight
            row.append(slope * importance * weight)
        gradients.append(row)
    weights = [[0.1 * (t + 1) for t in range(len(row))] for row in gradients]
    logp_T = batch.column(0, garbage=math.nan).requires_grad_()
    loss, sums = policy_loss(
        logp_T,
        batch.column(1, garbage=math.inf),
        batch.column(2, garbage=math.nan) + 1.5,
        mask_T=batch.mask_T,
        weight_T=torch.where(batch.mask_T, batch.put_back(weights), math.nan),
        eps_clip=LOW,
        eps_clip_high=HIGH,
        eps_clip_c=clip_c,
        objective=objective,  # pyright: ignore
        sequences=batch.sequences,
        importance_T=batch.column(3, garbage=math.nan),
    )
    assert loss.item() == pytest.approx(total, abs=1e-10)
    torch.testing.assert_close(torch.autograd.grad(loss, logp_T)[0], batch.put_back(gradients), **EXACT)
    assert sums["pg_loss"].item() == loss.item()


def test_gspo_at_ratio_one_is_the_plain_policy_gradient():
    logp_T = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([2.0, 2.0, -3.0], dtype=torch.float64)
    for objective in ("gspo", "cispo", "clip"):
        loss, sums = policy_loss(
            logp_T,
            logp_T.detach(),
            advantages_T,
            mask_T=torch.ones(3, dtype=torch.bool),
            weight_T=torch.ones(3, dtype=torch.float64),
            eps_clip=0.2,
            objective=objective,
            sequences=Sequences.of(torch.tensor([0, 2, 3]), 3),
        )
        torch.testing.assert_close(torch.autograd.grad(loss, logp_T)[0], -advantages_T, **EXACT)
        assert sums["clip_fraction"].item() == 0.0


@given(batch=packed(num_columns=2), ratio=st.floats(-1, 1, width=32))
def test_unbiased_kl_has_the_gradient_of_the_kl(batch: Packed, ratio: float):
    """ratio * (logp - ref) at each token, DeepSeek-V3.2."""
    logp_T = batch.column(0).requires_grad_()
    ref_T = batch.column(1)
    old_T = logp_T.detach() - ratio
    value_T = unbiased_kl(token_kl(logp_T, ref_T, kl_type="k3"), logp_T - old_T)
    plain_T = token_kl(logp_T.detach(), ref_T, kl_type="k3")
    torch.testing.assert_close(value_T.detach(), math.exp(ratio) * plain_T, **EXACT)
    (found_T,) = torch.autograd.grad(value_T.sum(), logp_T)
    torch.testing.assert_close(found_T, math.exp(ratio) * (logp_T.detach() - ref_T), **EXACT)


def test_unbiased_kl_is_unbiased_over_the_whole_vocabulary():
    """Expectation under the old policy, instead of sampling: the gradient with respect to logits is that of the KL."""
    generator = torch.Generator().manual_seed(0)
    logits, old, ref = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    logp, old_logp, ref_logp = (x.log_softmax(0) for x in (logits, old, ref))
    (expected,) = torch.autograd.grad((logp.exp() * (logp - ref_logp)).sum(), logits, retain_graph=True)
    for kl_type in ("k1", "k3"):
        kl = unbiased_kl(token_kl(logp, ref_logp, kl_type=kl_type), logp - old_logp)
        (found,) = torch.autograd.grad((old_logp.exp() * kl).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, expected, **EXACT)
    plain = (old_logp.exp() * token_kl(logp, ref_logp, kl_type="k3")).sum()
    (biased,) = torch.autograd.grad(plain, logits)
    assert (biased - expected).abs().max() > 0.1, "without the ratio it is another gradient"


def test_the_kl_loss_uses_the_ratio_when_asked():
    logp_T = torch.tensor([-1.0], dtype=torch.float64)
    results = []
    for use_unbiased_kl in (False, True):
        _, sums = policy_loss(
            logp_T,
            logp_T - 0.5,
            torch.zeros(1, dtype=torch.float64),
            mask_T=torch.ones(1, dtype=torch.bool),
            weight_T=torch.ones(1, dtype=torch.float64),
            eps_clip=0.2,
            ref_logp_T=logp_T - 1.0,
            kl_loss_coef=1.0,
            kl_loss_type="k1",
            use_unbiased_kl=use_unbiased_kl,
        )
        results.append(sums["kl_loss"].item())
    assert results == pytest.approx([1.0, math.exp(0.5)], abs=1e-12)


@given(batch=packed(num_columns=3), delta=st.sampled_from([1e-4, 0.3]))
def test_drifted_sequences_are_bad_and_far_away(batch: Packed, delta: float):
    expected = []
    for logps, olds, raw in zip(*(batch.kept(n) for n in range(3)), strict=True):
        drift = mean([old - new for old, new in zip(olds, logps, strict=True)])
        expected.append([float(value + 1.5 < 0 and drift > delta) for value in raw])
    found_T = drifted_sequences(
        batch.column(0, garbage=0.0),
        batch.column(1, garbage=9.0),
        batch.column(2) + 1.5,
        batch.mask_T,
        batch.sequences,
        delta=delta,
    )
    assert found_T.double().tolist() == batch.put_back(expected).tolist()


@given(batch=packed(num_columns=2))
def test_mismatch_is_estimated_under_what_the_engine_sampled(batch: Packed):
    pairs = [pair for rows in zip(batch.kept(0), batch.kept(1), strict=True) for pair in zip(*rows, strict=True)]
    k1, k3 = mismatch_kl(batch.column(0, garbage=math.nan), batch.column(1, garbage=math.nan), batch.mask_T)
    assert k1.item() == pytest.approx(math.fsum(engine - trainer for trainer, engine in pairs), abs=1e-10)
    logs = [trainer - engine for trainer, engine in pairs]
    assert k3.item() == pytest.approx(math.fsum(math.exp(d) - d - 1 for d in logs), abs=1e-10)


@given(batch=packed(num_columns=2))
def test_clip_without_a_second_bound_is_symmetric(batch: Packed):
    log_T, advantages_T = 0.3 * batch.column(0) + 0.3, batch.column(1) + 1.5
    both = [clipped_objective(log_T, advantages_T, eps_clip=0.2, eps_clip_high=high)[0] for high in (None, 0.2)]
    assert torch.equal(*both)
