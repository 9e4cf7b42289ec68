"""The loss of one optimizer step written out over whole samples: no packing, and autograd throughout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit.algo.advantages import estimate_advantages
from rlkit.config.schema import RunConfig
from rlkit.types.samples import Sample


def scores_of(cfg: RunConfig, samples: Sequence[Sample]) -> list[float]:
    """The scalar of each sample that a rollout would give it."""
    if cfg.is_dpo:
        return [1.0 if sample.index == 0 else -1.0 for sample in samples]
    estimator = cfg.algo.advantage_estimator
    return estimate_advantages(
        [sample.reward for sample in samples],
        [sample.group_id for sample in samples],
        estimator=estimator,
        divide_by_std=not cfg.algo.disable_grpo_std_normalization,
    )


def naive_loss(
    cfg: RunConfig,
    samples: Sequence[Sample],
    logps: Sequence[Tensor],
    entropies: Sequence[Tensor],
    refs: Sequence[Tensor],
    teachers: Sequence[Tensor],
) -> Tensor:
    """All samples make one step; those without a trained token take no part. One tensor [response tokens] each."""
    masks = [torch.tensor(sample.loss_mask, dtype=torch.bool) for sample in samples]
    olds = [logp.detach() for logp in logps]
    if cfg.algo.use_rollout_logprobs:
        olds = [torch.tensor(sample.rollout_logprobs) for sample in samples]
    kept, weights = masks, [torch.ones_like(old) for old in olds]
    advantages = [torch.zeros_like(old) for old in olds]
    if not cfg.is_supervised:
        advantages = naive_advantages(cfg, scores_of(cfg, samples), masks, olds, refs, teachers)
        pairs = [naive_importance(cfg, s, old, m) for s, old, m in zip(samples, olds, masks, strict=True)]
        weights, kept = [weight for weight, _ in pairs], [keep for _, keep in pairs]
        if cfg.mismatch.tis_batch_normalize:
            mean = torch.cat([w[k] for w, k in zip(weights, kept, strict=True)]).mean()
            weights = [weight / mean for weight in weights]
    num_tokens = sum(int(keep.sum()) for keep in kept)
    num_samples = sum(bool(keep.any()) for keep in kept)
    total = torch.zeros(())
    for i, keep in enumerate(kept):
        if not keep.any():
            continue
        token_loss = -logps[i]
        if not cfg.is_supervised:
            token_loss = naive_policy_loss(cfg, logps[i], olds[i], advantages[i], masks[i]) * weights[i]
            token_loss = token_loss - cfg.algo.entropy_coef * entropies[i]
            token_loss = token_loss + cfg.algo.kl_loss_coef * naive_kl(cfg, logps[i], olds[i], refs[i])
        divisor = num_samples * (cfg.algo.loss_constant_length or int(keep.sum()))
        total = total + token_loss[keep].sum() / (num_tokens if cfg.algo.calculate_per_token_loss else divisor)
    return total


def naive_policy_loss(cfg: RunConfig, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    algo = cfg.algo
    ratio = (logp - old).exp()
    if algo.advantage_estimator == "gspo":
        ratio = (logp - old)[mask].mean().exp()
    clipped = ratio.clamp(1 - algo.eps_clip, 1 + (algo.eps_clip_high or algo.eps_clip))
    if algo.advantage_estimator == "cispo":
        return -clipped.detach() * advantage * logp
    return torch.maximum(-ratio * advantage, -clipped * advantage)


def naive_kl(cfg: RunConfig, logp: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """k3."""
    kl = (ref - logp).exp() - (ref - logp) - 1
    return kl * (logp - old).exp() if cfg.algo.use_unbiased_kl else kl


def naive_advantages(
    cfg: RunConfig,
    scores: Sequence[float],
    masks: Sequence[Tensor],
    olds: Sequence[Tensor],
    refs: Sequence[Tensor],
    teachers: Sequence[Tensor],
) -> list[Tensor]:
    """KL as reward is k1."""
    rows = []
    for score, mask, old, ref, teacher in zip(scores, masks, olds, refs, teachers, strict=True):
        row, running = torch.zeros(len(mask)), 0.0
        for number, place in enumerate(reversed(mask.nonzero().flatten().tolist())):
            penalty = cfg.algo.kl_coef * (old[place] - ref[place]).item()
            running = (score if number == 0 else 0.0) - penalty + cfg.algo.gamma * running
            row[place] = running
            if cfg.distill.use_opd:
                row[place] -= cfg.distill.opd_kl_coef * (old[place] - teacher[place]).item()
        rows.append(row)
    if cfg.algo.normalize_advantages:
        values = torch.cat([row[mask] for row, mask in zip(rows, masks, strict=True)])
        rows = [(row - values.mean()) / (values.var() + 1e-8).sqrt() for row in rows]
    return rows


def naive_importance(cfg: RunConfig, sample: Sample, old: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(weight, kept) of each token."""
    mismatch = cfg.mismatch
    log_ratio = old - torch.tensor(sample.rollout_logprobs)

    def ratio(level: str) -> Tensor:
        trained = log_ratio[mask]
        joint = {"sequence": trained.sum(), "geometric": trained.sum() / max(len(trained), 1)}
        return (log_ratio if level == "token" else joint[level].expand_as(log_ratio)).exp()

    weight, keep = torch.ones_like(old), mask
    if mismatch.use_tis:
        weight = ratio(mismatch.tis_level)
        if mismatch.tis_mode == "mask":
            keep = keep & (weight >= mismatch.tis_clip_low) & (weight <= mismatch.tis_clip)
        else:
            weight = weight.clamp(mismatch.tis_clip_low, mismatch.tis_clip)
    if mismatch.use_rs:
        level = ratio(mismatch.rs_level)
        keep = keep & (level >= mismatch.rs_lower_bound) & (level <= mismatch.rs_upper_bound)
        if mismatch.rs_veto_threshold is not None and (log_ratio[mask].exp() < mismatch.rs_veto_threshold).any():
            keep = torch.zeros_like(keep)
    return weight, keep
