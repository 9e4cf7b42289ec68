"""From flags to what is scored, weighed and reported: `Objective` on packed batches, however they are split."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.algo.advantages import estimate_advantages
from rlkit.algo.batching import build_updates, rollout_of
from rlkit.algo.objective import LossReport, Objective
from rlkit.config.fields import all_fields, sections
from rlkit.config.schema import RunConfig
from rlkit.types.batches import PackedBatch, Update
from rlkit.types.samples import Sample, SampleStatus


def make_config(**fields: Any) -> RunConfig:
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in ({"rollout_batch_size": 4, "n_samples_per_prompt": 2} | fields).items():
        parts[all_fields()[name].section][name] = value
    return RunConfig(**{section: cls(**parts[section]) for section, cls in sections().items()})


def make_samples() -> list[Sample]:
    """Groups of 3, 1, 2 and 2; a masked sample, a single token, a rollout that came out as two samples."""
    rng = random.Random(0)
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 1), (3, 0), (3, 1)]
    samples = []
    for number, (group, index) in enumerate(places):
        length = (5, 1, 9, 3, 4, 2, 6, 7, 8)[number]
        mask = [0] * length if number == 3 else [int(rng.random() < 0.7) for _ in range(length)]
        mask[-1] = int(number != 3)
        samples.append(
            Sample(
                group_id=group,
                index=index,
                seed=0,
                tokens=[number] * (length + 2),
                prompt_length=2,
                loss_mask=mask,
                rollout_logprobs=[-2.0 * rng.random() for _ in range(length)],
                status=SampleStatus.COMPLETED,
                reward=rng.random(),
            )
        )
    return samples


def scored(batch: PackedBatch, column: int) -> Tensor:
    """A log-prob for each token that depends on the sample and the place in it alone."""
    samples_T = batch.sample_ids_S.repeat_interleave(batch.cu_seqlens.diff().long())
    return -(1.0 + torch.sin(1.7 * samples_T + 0.9 * batch.positions_T + column))


def run(cfg: RunConfig, *, dp: int, max_tokens: int, batch_size: int = 8) -> tuple[dict[str, float], dict[Any, float]]:
    """(summed report, gradient of each token by sample and place) of one rollout on `dp` simulated ranks."""
    samples = make_samples()
    estimator = cfg.algo.advantage_estimator
    advantages = estimate_advantages(
        [s.reward for s in samples],
        [s.group_id for s in samples],
        estimator=estimator,
        divide_by_std=True,
        rollouts=[rollout_of(s) for s in samples],
    )
    ranks = build_updates(
        samples,
        advantages,
        dp=dp,
        batch_size=batch_size,
        max_tokens=max_tokens,
        per_token_loss=cfg.algo.calculate_per_token_loss,
        constant_length=cfg.algo.loss_constant_length,
        with_rollout_logprobs=True,
    )
    ranks = [[update for update in updates if update.num_loss_tokens > 0] for updates in ranks]
    prepared = [[with_scores(cfg, update, number) for number, update in enumerate(updates)] for updates in ranks]
    finished = finish_on_all_ranks(cfg, prepared, [update.num_rollouts for update in ranks[0]])
    totals: dict[str, float] = {}
    gradients: dict[Any, float] = {}
    for step in (batches for updates in finished for batches in updates):
        for batch in step:
            logp_T = (scored(batch, 0) + 0.05 * torch.cos(scored(batch, 5) * 9)).requires_grad_()
            report: LossReport = Objective(cfg).loss(batch, logp_T, scored(batch, 4).abs())
            for name, value in report.sums.items():
                totals[name] = totals.get(name, 0.0) + value.item()
            if batch.num_tokens == 0:
                continue
            (grad_T,) = torch.autograd.grad(report.loss, logp_T)
            samples_T = batch.sample_ids_S.repeat_interleave(batch.cu_seqlens.diff().long())
            for place in zip(samples_T.tolist(), batch.positions_T.tolist(), grad_T.tolist(), strict=True):
                gradients[place[:2]] = place[2]
    assert totals.keys() == set(Objective(cfg).sum_names)
    return totals, gradients


def with_scores(cfg: RunConfig, update: Update, number: int) -> list[PackedBatch]:
    """What the backend fills in."""
    objective, filled = Objective(cfg), []
    for batch in update.micro_batches:
        if objective.needs_old(number):
            batch = replace(batch, old_logp_T=scored(batch, 0))
        if cfg.needs_reference:
            batch = replace(batch, ref_logp_T=scored(batch, 1))
        if cfg.needs_teacher:
            batch = replace(batch, teacher_logp_T=scored(batch, 2))
        filled.append(batch)
    return filled


def finish_on_all_ranks(cfg: RunConfig, ranks: list[list[list[PackedBatch]]], num_rollouts: list[int]):
    """Runs `finish` of every rank again and again; each pass answers one more collective with the sum over ranks."""
    answers: list[Tensor] = []
    while True:
        asked: list[Tensor] = []
        finished = []
        for updates in ranks:
            number = 0

            def answer(partial: Tensor, asked: list[Tensor] = asked) -> Tensor:
                nonlocal number
                number += 1
                if number <= len(answers):
                    return answers[number - 1].clone()
                if number == len(answers) + 1:
                    asked.append(partial.clone())
                return partial

            finished.append(Objective(cfg, sum_over_data=answer).finish(updates, num_rollouts=num_rollouts))
        if not asked:
            return finished
        assert len(asked) == len(ranks), "all ranks take part in the same collectives"
        answers.append(torch.stack(asked).sum(dim=0))


OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo", "use_rollout_logprobs": True},
    "cispo": {"advantage_estimator": "cispo", "use_rollout_logprobs": True, "eps_clip": 1.0},
    "dr_grpo": {"loss_constant_length": 16, "disable_grpo_std_normalization": True},
    "dapo": {"calculate_per_token_loss": True, "eps_clip_high": 0.28},
    "reinforce": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "kl_coef": 0.1,
        "gamma": 0.9,
    },
    "baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
    "distilled": {"use_opd": True, "opd_teacher_load": "teacher", "opd_kl_coef": 0.3},
    "tis": {"use_tis": True, "tis_clip_low": 0.5},
    "icepop": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.6, "tis_clip": 1.8},
    "mis": {
        "use_tis": True,
        "tis_level": "sequence",
        "tis_batch_normalize": True,
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.7,
        "rs_upper_bound": 1.5,
        "rs_veto_threshold": 0.2,
    },
    "rejected_per_token": {"calculate_per_token_loss": True, "use_rs": True, "rs_lower_bound": 0.8},
    "rejected_constant": {"loss_constant_length": 16, "use_rs": True, "rs_lower_bound": 0.8},
    "unbiased_kl": {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True, "entropy_coef": 0.01},
    "opsm": {"use_opsm": True, "opsm_delta": 1e-3},
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("batch_size", [8, 3], ids=["one_step", "three_steps"])
def test_neither_packing_nor_ranks_change_the_step(name: str, batch_size: int):
    cfg = make_config(**OBJECTIVES[name])
    totals, gradients = run(cfg, dp=1, max_tokens=1000, batch_size=batch_size)
    assert max(abs(gradient) for gradient in gradients.values()) > 1e-3
    for dp, max_tokens in ((1, 1), (1, 20), (2, 20), (3, 1000)):
        others, other_gradients = run(cfg, dp=dp, max_tokens=max_tokens, batch_size=batch_size)
        assert others == pytest.approx(totals, rel=1e-5, abs=1e-5), (dp, max_tokens)
        assert other_gradients == pytest.approx(gradients, rel=1e-5, abs=1e-7), (dp, max_tokens)


@pytest.mark.parametrize("name", ["icepop", "mis", "rejected_per_token", "rejected_constant"])
def test_rejected_tokens_leave_the_denominator(name: str):
    """The weights of what is kept add up as if the rest had never been there."""
    cfg = make_config(**OBJECTIVES[name])
    samples = make_samples()
    options = {"per_token_loss": cfg.algo.calculate_per_token_loss, "constant_length": cfg.algo.loss_constant_length}
    ranks = build_updates(
        samples, [1.0] * 9, dp=1, batch_size=8, max_tokens=1000, with_rollout_logprobs=True, **options
    )
    (before,) = with_scores(cfg, ranks[0][0], 0)
    (((after,),),) = finish_on_all_ranks(cfg, [[[before]]], [ranks[0][0].num_rollouts])
    kept_T = after.loss_weight_T > 0
    assert 0 < kept_T.sum() < before.loss_mask_T.sum()
    assert after.importance_T is not None and not after.importance_T[~kept_T].any()
    if cfg.algo.loss_constant_length is None:
        assert after.loss_weight_T.sum().item() == pytest.approx(1.0, abs=1e-6)
    else:
        kept_S = after.loss_weight_T.split(after.cu_seqlens.diff().tolist())
        rollouts = {n for n, weight in zip(after.rollouts_S.tolist(), kept_S, strict=True) if weight.any()}
        weights = after.loss_weight_T[kept_T].tolist()
        assert weights == pytest.approx([1 / (len(rollouts) * 16)] * len(weights))


def test_normalised_weights_have_mean_one_over_the_step():
    cfg = make_config(use_tis=True, tis_batch_normalize=True)
    totals, _ = run(cfg, dp=2, max_tokens=20)
    count = sum(sum(s.loss_mask) for s in make_samples())
    assert totals["importance_weight"] / count == pytest.approx(1.0, abs=1e-6)


def test_whitened_advantages_are_those_of_all_trained_tokens():
    cfg = make_config(**OBJECTIVES["reinforce"])
    ranks = build_updates(
        make_samples(), [1.0] * 9, dp=2, batch_size=3, max_tokens=20, per_token_loss=False, with_rollout_logprobs=True
    )
    prepared = [[with_scores(cfg, update, number) for number, update in enumerate(updates)] for updates in ranks]
    finished = finish_on_all_ranks(cfg, prepared, [update.num_rollouts for update in ranks[0]])
    flat = [batch for updates in finished for step in updates for batch in step]
    values = torch.cat([b.advantages_T[b.loss_mask_T] for b in flat if b.advantages_T is not None]).double()
    assert values.numel() == sum(sum(s.loss_mask) for s in make_samples())
    assert values.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert values.std().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [False, True, True]),
        ({"use_tis": True}, [False, True, True]),
        ({"normalize_advantages": True}, [False, True, True]),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, [False, True, True]),
        ({"kl_coef": 0.1}, [True, True, True]),
        ({"use_opd": True, "opd_teacher_load": "t"}, [True, True, True]),
        ({"use_rs": True}, [True, True, True]),
        ({"use_tis": True, "tis_mode": "mask"}, [True, True, True]),
        ({"use_tis": True, "tis_batch_normalize": True}, [True, True, True]),
        ({"use_rollout_logprobs": True}, [False, False, False]),
        ({"use_rollout_logprobs": True, "kl_coef": 0.1}, [False, False, False]),
        ({"loss_type": "sft_loss"}, [False, False, False]),
    ],
)
def test_old_log_probs_are_scored_only_when_they_must_be(fields: dict[str, Any], expected: list[bool]):
    objective = Objective(make_config(**fields))
    assert [objective.needs_old(number) for number in range(3)] == expected


def test_what_an_unscored_first_step_takes_for_old_is_the_current_policy():
    """Ratio 1, and importance weights of the very log-probs that the loss sees."""
    samples = make_samples()
    ranks = build_updates(
        samples, [1.0] * 9, dp=1, batch_size=8, max_tokens=1000, per_token_loss=True, with_rollout_logprobs=True
    )
    (batch,) = ranks[0][0].micro_batches
    logp_T = scored(batch, 0).requires_grad_()
    report = Objective(make_config(use_tis=True)).loss(batch, logp_T, logp_T.detach().abs())
    assert report.sums["ppo_kl"].item() == 0.0
    assert batch.rollout_logp_T is not None
    weight_T = (logp_T.detach() - batch.rollout_logp_T).exp().clamp(0.0, 2.0)
    expected_T = torch.where(batch.loss_mask_T, -weight_T * batch.loss_weight_T, 0.0)
    torch.testing.assert_close(torch.autograd.grad(report.loss, logp_T)[0], expected_T)
    squares = torch.where(batch.loss_mask_T, weight_T, 0.0).square().sum().item()
    assert report.sums["importance_squared"].item() == pytest.approx(squares, rel=1e-6)


def test_kl_as_reward_reaches_the_advantages_by_hand():
    """One sample of two trained tokens, advantage 1: A_t = 1 - 0.5 * (KL of this token and of the later ones)."""
    cfg = make_config(kl_coef=0.5, kl_loss_type="k1")
    sample = replace(make_samples()[0], tokens=[1, 2, 3], prompt_length=1, loss_mask=[1, 1], rollout_logprobs=[-1, -1])
    ranks = build_updates(
        [sample], [1.0], dp=1, batch_size=1, max_tokens=9, per_token_loss=True, with_rollout_logprobs=True
    )
    (batch,) = ranks[0][0].micro_batches
    batch = replace(batch, old_logp_T=torch.tensor([0.0, -1.0, -2.0]), ref_logp_T=torch.tensor([0.0, -1.4, -1.8]))
    (((finished,),),) = finish_on_all_ranks(cfg, [[[batch]]], [1])
    assert finished.advantages_T is not None
    assert finished.advantages_T.tolist() == pytest.approx([0.0, 1 - 0.5 * (0.4 - 0.2), 1 + 0.5 * 0.2])


def test_what_follows_from_other_metrics():
    objective = Objective(make_config(use_tis=True))
    derived = objective.derive({"train/importance_weight": 2.0, "train/importance_squared": 7.0, "train/loss": 1.0})
    assert derived == {"train/importance_weight": 2.0, "train/loss": 1.0, "train/importance_ess": 4 / 7}
    assert Objective(make_config()).derive({"train/loss": 1.0}) == {"train/loss": 1.0}


def test_supervised_training_reports_no_policy():
    objective = Objective(make_config(loss_type="sft_loss"))
    assert objective.sum_names == ("loss", "entropy") and objective.max_names == ()


def test_an_empty_batch_takes_part():
    """A rank that holds only dummies answers the same collectives and adds nothing."""
    cfg = make_config(**OBJECTIVES["mis"])
    totals, _ = run(cfg, dp=3, max_tokens=1000, batch_size=1)
    assert all(math.isfinite(value) for value in totals.values())
