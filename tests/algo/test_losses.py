import math

import pytest
import torch
from algo_cases import case
from torch import Tensor

from rlkit.algo.batching import loss_weights
from rlkit.algo.losses import log_prob_gap, policy_loss, sft_loss
from rlkit.algo.ppo import clipped_objective
from rlkit.types.errors import ConfigError

LOG2 = math.log(2.0)


def step_loss(token_losses: list[list[float]], weights: list[float]) -> float:
    """What the trainer adds up: sft_loss of log-probs that are minus the wanted token losses."""
    total = 0.0
    for losses, weight in zip(token_losses, weights, strict=True):
        logp_T = -torch.tensor(losses, dtype=torch.float32)
        loss, _ = sft_loss(
            logp_T, mask_T=torch.ones(len(losses), dtype=torch.bool), weight_T=torch.full_like(logp_T, weight)
        )
        total += loss.item()
    return total


def test_token_mean_does_not_depend_on_the_split():
    ls05 = case("ls-05")
    a, b = ls05["input"]["token_losses"]["A"], ls05["input"]["token_losses"]["B"]
    weight_a, weight_b = loss_weights([len(a), len(b)], per_token_loss=True)
    assert weight_a == weight_b
    together = step_loss([a + b], [weight_a])
    apart = step_loss([a, b], [weight_a, weight_b])
    assert together == pytest.approx(ls05["expected"]["loss_for_every_split"], abs=1e-6)
    assert apart == pytest.approx(ls05["expected"]["loss_for_every_split"], abs=1e-6)
    on_two_ranks = [2 * step_loss([a], [weight_a]), 2 * step_loss([b], [weight_b])]
    assert on_two_ranks == pytest.approx(ls05["expected"]["local_losses_rank0_rank1_before_averaging"], abs=1e-6)
    assert sum(on_two_ranks) / 2 == pytest.approx(ls05["expected"]["loss_for_every_split"], abs=1e-6)


def test_the_three_aggregations():
    ls06 = case("ls-06")
    a, b = ls06["input"]["token_losses"]["A"], ls06["input"]["token_losses"]["B"]
    lengths, expected = [len(a), len(b)], ls06["expected"]
    token_mean = loss_weights(lengths, per_token_loss=True)
    sample_mean = loss_weights(lengths, per_token_loss=False)
    constant = loss_weights(lengths, per_token_loss=False, constant_length=ls06["input"]["constant_length"])
    assert step_loss([a, b], token_mean) == pytest.approx(expected["token_mean"], abs=1e-6)
    assert step_loss([a, b], sample_mean) == pytest.approx(expected["seq_mean_token_mean"], abs=1e-6)
    assert step_loss([a, b], constant) == pytest.approx(expected["seq_mean_token_sum_over_constant"], abs=1e-6)


def test_dual_clip_acts_on_negative_advantages_only():
    ls09 = case("ls-09")
    given, rows = ls09["input"], ls09["input"]["rows"]
    log_ratio_T = torch.tensor([math.log(row["ratio"]) for row in rows])
    advantages_T = torch.tensor([float(row["A"]) for row in rows])
    clip = {"eps_clip": given["eps_low"], "eps_clip_high": given["eps_high"]}
    loss_T, clipped_T = clipped_objective(log_ratio_T, advantages_T, eps_clip_c=given["clip_c"], **clip)
    assert loss_T.tolist() == pytest.approx(ls09["expected"]["loss"], abs=1e-6)
    assert clipped_T.tolist() == [True, True, True, False]
    loss_T, _ = clipped_objective(log_ratio_T[:1], advantages_T[:1], **clip)
    assert loss_T.item() == pytest.approx(ls09["expected"]["without_clip_c"], abs=1e-5)
    for bad in given["bad_clip_c"]:
        with pytest.raises(ConfigError, match="eps-clip-c"):
            clipped_objective(log_ratio_T, advantages_T, eps_clip_c=bad, **clip)


def test_dual_clip_reaches_the_policy_loss():
    mask_T, weight_T = torch.ones(1, dtype=torch.bool), torch.ones(1)
    options = {"mask_T": mask_T, "weight_T": weight_T, "eps_clip": 0.2}
    logp_T, old_T, advantage_T = torch.tensor([3 * LOG2 - 5.0]), torch.tensor([-5.0]), torch.tensor([-1.0])
    assert policy_loss(logp_T, old_T, advantage_T, **options)[0].item() == pytest.approx(8.0, rel=1e-6)
    assert policy_loss(logp_T, old_T, advantage_T, eps_clip_c=3.0, **options)[0].item() == pytest.approx(3.0)


def test_the_clip_is_asymmetric():
    ratios = torch.tensor([1.5, 1.25, 0.7, 0.9])
    loss_T, clipped_T = clipped_objective(ratios.log(), torch.tensor([1.0, 1, -1, -1]), eps_clip=0.2, eps_clip_high=0.3)
    assert loss_T.tolist() == pytest.approx([-1.3, -1.25, 0.8, 0.9])
    assert clipped_T.tolist() == [True, False, True, False]


def make_inputs(num_tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    return {
        "logp_T": -noise().abs(),
        "old_logp_T": -noise().abs(),
        "advantages_T": noise(),
        "entropy_T": noise().abs(),
        "ref_logp_T": -noise().abs(),
        "weight_T": noise().abs(),
    }


def run_policy_loss(inputs: dict[str, Tensor], mask_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(
        **inputs, mask_T=mask_T, eps_clip=0.2, eps_clip_c=3.0, entropy_coef=0.1, kl_loss_coef=0.5, kl_loss_type="k3"
    )


def test_policy_loss_equals_the_written_out_sum():
    inputs = make_inputs(20)
    mask_T = torch.arange(20) % 3 != 0
    loss, sums = run_policy_loss(inputs, mask_T)
    total = pg = kl = entropy = drift = clipped = 0.0
    for t in range(20):
        if not mask_T[t]:
            continue
        logp, old, adv, ent, ref, weight = (inputs[name][t].item() for name in inputs)
        ratio = math.exp(logp - old)
        plain, bounded = -ratio * adv, -min(max(ratio, 0.8), 1.2) * adv
        token = max(plain, bounded)
        is_clipped = bounded > plain
        if adv < 0 and token > -3.0 * adv:
            token, is_clipped = -3.0 * adv, True
        k3 = math.exp(ref - logp) - (ref - logp) - 1
        pg, kl, entropy = pg + token * weight, kl + k3 * weight, entropy + ent
        drift, clipped = drift + old - logp, clipped + is_clipped
        total += (token - 0.1 * ent + 0.5 * k3) * weight
    assert loss.item() == pytest.approx(total, abs=1e-10)
    expected = {"loss": total, "pg_loss": pg, "kl_loss": kl, "entropy": entropy, "ppo_kl": drift}
    for name, value in expected.items():
        assert sums[name].item() == pytest.approx(value, abs=1e-10), name
    assert sums["clip_fraction"].item() == clipped
    assert not any(value.requires_grad for value in sums.values())


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_garbage_changes_neither_loss_nor_gradient(garbage: float):
    clean = make_inputs(9)
    mask_T = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    dirty = {name: torch.where(mask_T, value, garbage) for name, value in clean.items()}
    results = []
    for inputs in (clean, dirty):
        inputs["logp_T"].requires_grad_()
        inputs["entropy_T"].requires_grad_()
        loss, sums = run_policy_loss(inputs, mask_T)
        grads = torch.autograd.grad(loss, [inputs["logp_T"], inputs["entropy_T"]])
        results.append([loss.detach(), *sums.values(), *grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert b.isfinite().all()
    assert results[1][-2][~mask_T].abs().sum() == 0


def test_masked_mean_selects():
    """The masked row of ls-11: KL values 0.1, NaN, 0.3 have the masked mean 0.2."""
    ls11 = case("ls-11")
    wanted = torch.tensor([float(value) for value in ls11["input"]["masked_row"]["kl"]])
    mask_T = torch.tensor(ls11["input"]["masked_row"]["mask"], dtype=torch.bool)
    zeros_T = torch.zeros(3)
    _, sums = policy_loss(
        wanted,
        zeros_T,
        zeros_T,
        mask_T=mask_T,
        weight_T=zeros_T + 0.5,
        eps_clip=0.2,
        ref_logp_T=zeros_T,
        kl_loss_type="k1",
    )
    assert sums["kl_loss"].item() == pytest.approx(ls11["expected"]["masked_mean"])


def test_a_huge_ratio_stays_finite():
    logp_T = torch.tensor([-1.0], requires_grad=True)
    for advantage in (-1.0, 1.0):
        for clip_c in (None, 3.0):
            loss, _ = policy_loss(
                logp_T,
                torch.tensor([-200.0]),
                torch.tensor([advantage]),
                mask_T=torch.ones(1, dtype=torch.bool),
                weight_T=torch.ones(1),
                eps_clip=0.2,
                eps_clip_c=clip_c,
            )
            (grad,) = torch.autograd.grad(loss, logp_T)
            assert loss.isfinite() and grad.isfinite().all()


def test_equal_policies_give_the_plain_policy_gradient():
    """At ratio 1 clipped and unclipped coincide; the gradient must be -A * weight, neither halved nor doubled."""
    logp_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages_T, weight_T = torch.tensor([2.0, -3.0]), torch.tensor([0.5, 0.25])
    loss, sums = policy_loss(
        logp_T, logp_T.detach(), advantages_T, mask_T=torch.ones(2, dtype=torch.bool), weight_T=weight_T, eps_clip=0.2
    )
    loss.backward()
    assert logp_T.grad is not None
    torch.testing.assert_close(logp_T.grad, -advantages_T * weight_T)
    assert sums["ppo_kl"].item() == 0.0 and sums["clip_fraction"].item() == 0.0


def test_no_tokens_give_a_zero_loss_with_a_gradient():
    empty = torch.zeros(0, requires_grad=True)
    loss, sums = policy_loss(
        empty,
        empty.detach(),
        empty.detach(),
        mask_T=torch.zeros(0, dtype=torch.bool),
        weight_T=empty.detach(),
        eps_clip=0.2,
    )
    loss.backward()
    assert loss.item() == 0.0 and all(value.item() == 0.0 for value in sums.values())


def test_sft_loss_is_the_weighted_negative_log_likelihood():
    logp_T = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    mask_T = torch.tensor([True, False, True])
    loss, sums = sft_loss(logp_T, mask_T=mask_T, weight_T=torch.tensor([0.5, 9.0, 0.25]), entropy_T=logp_T.detach())
    assert loss.item() == pytest.approx(0.5 + 0.75)
    assert sums["entropy"].item() == -4.0
    loss.backward()
    assert logp_T.grad is not None and logp_T.grad.tolist() == [-0.5, 0.0, -0.25]


def test_log_prob_gap():
    trainer_T, rollout_T = torch.tensor([-1.0, -2.0, math.nan]), torch.tensor([-1.5, -2.25, 0.0])
    total, largest = log_prob_gap(trainer_T, rollout_T, torch.tensor([True, True, False]))
    assert (total.item(), largest.item()) == (0.75, 0.5)
