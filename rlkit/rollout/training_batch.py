"""From a collected rollout to what ranks train on: advantages, shards, and why samples are left out.

Pure; called by `manager.py`.
"""

from collections import Counter
from collections.abc import Sequence

from rlkit.algo.advantages import estimate_advantages
from rlkit.algo.batching import build_updates, is_trained_on, rollout_of
from rlkit.algo.overlong import overlong_penalty
from rlkit.config.schema import RunConfig
from rlkit.rollout.collect import Collected
from rlkit.types.batches import Update
from rlkit.types.errors import DataError, EngineError, RewardError
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Sample, SampleGroup, SampleStatus

_EXCERPT = 300
"""Characters of a response, label or error that a message quotes."""


def build_shards(
    cfg: RunConfig, groups: Sequence[SampleGroup], dp: int, *, weights: Sequence[float] | None = None
) -> list[list[Update]]:
    """[rank][optimizer step]. SFT weighs all samples alike, DPO tells the chosen (1) from the rejected (-1); otherwise
    each counts by its advantage in its group, times its weight, if there are `weights`.
    """
    samples = flatten(groups)
    if cfg.is_dpo:
        advantages = [1.0 if sample.index == 0 else -1.0 for sample in samples]  # the chosen one comes first
    elif cfg.is_supervised:
        advantages = [1.0] * len(samples)
    else:
        advantages = estimate_advantages(
            [shaped_reward(cfg, sample) for sample in samples],
            [sample.group_id for sample in samples],
            estimator=cfg.algo.advantage_estimator,
            divide_by_std=not cfg.algo.disable_grpo_std_normalization,
            rollouts=[rollout_of(sample) for sample in samples],
        )
    if weights is not None:
        advantages = [advantage * weight for advantage, weight in zip(advantages, weights, strict=True)]
    return build_updates(
        samples,
        advantages,
        dp=dp,
        batch_size=cfg.batch_size,
        max_tokens=cfg.train.max_tokens_per_gpu,
        cp=cfg.train.context_parallel_size,
        per_token_loss=cfg.algo.calculate_per_token_loss,
        constant_length=cfg.algo.loss_constant_length,
        with_rollout_logprobs=not cfg.is_supervised,
        require_reward=not cfg.is_supervised,
        keep_groups=cfg.is_dpo,
    )


def shaped_reward(cfg: RunConfig, sample: Sample) -> float | None:
    """The reward that is trained on: the grader's, less the punishment for an overlong response. None: not scored."""
    if sample.reward is None or not sample.status.is_trainable:
        return None
    return sample.reward + _overlong_penalty(cfg, sample)


def shaping_metrics(cfg: RunConfig, groups: Sequence[SampleGroup]) -> MetricSet:
    """What shaping adds to the reported rewards, as a mean over scored samples; empty where nothing is shaped."""
    if cfg.is_supervised or cfg.algo.overlong_buffer_len is None:
        return {}
    penalties = [_overlong_penalty(cfg, s) for s in flatten(groups) if shaped_reward(cfg, s) is not None]
    return {"rollout/overlong_penalty": sum(penalties) / len(penalties)} if penalties else {}


def _overlong_penalty(cfg: RunConfig, sample: Sample) -> float:
    buffer = cfg.algo.overlong_buffer_len
    if buffer is None:
        return 0.0
    return overlong_penalty(
        sample.response_length,
        max_length=cfg.rollout.rollout_max_response_len,
        buffer_length=buffer,
        factor=cfg.algo.overlong_penalty_factor,
    )


def flatten(groups: Sequence[SampleGroup]) -> list[Sample]:
    """All samples in order; `PackedBatch.sample_ids_S` are positions in this list."""
    return [sample for group in groups for sample in group.samples]


def groups_by_rank(groups: Sequence[SampleGroup], shards: Sequence[Sequence[Update]]) -> list[list[int]]:
    """[rank] -> ids of the groups that have a sample there, ascending.

    Samples are found by their ids, never by their place in a shard: planning reorders them.
    """
    samples = flatten(groups)
    return [
        sorted(
            {
                samples[i].group_id
                for update in updates
                for batch in update.micro_batches
                for i in batch.sample_ids_S.tolist()
            }
        )
        for updates in shards
    ]


def num_planned_samples(shards: Sequence[Sequence[Update]]) -> int:
    """Distinct samples over all ranks and optimizer steps; padding is not one."""
    return len(
        {
            sample
            for updates in shards
            for update in updates
            for batch in update.micro_batches
            for sample in batch.sample_ids_S.tolist()
            if sample >= 0
        }
    )


def untrained_reason(sample: Sample, *, require_reward: bool) -> str | None:
    """Why a sample takes no part in the loss; None when it does."""
    if is_trained_on(sample, require_reward=require_reward):
        return None
    if not sample.status.is_trainable:
        return str(sample.status)
    if sample.response_length == 0:
        return "no_room"
    if require_reward and sample.reward is None:
        return "unscored"
    return "masked"


def check_trainable(groups: Sequence[SampleGroup], collected: Collected, *, step: int, require_reward: bool) -> None:
    """An error with evidence and remedy if not one sample can be trained on."""
    samples = flatten(groups)
    reasons = Counter(untrained_reason(sample, require_reward=require_reward) for sample in samples)
    if reasons[None]:
        return
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    start = f"step {step}: none of {len(samples)} samples can be trained on ({told or 'no samples'})"
    if reasons["unscored"]:
        example = next(s for s in samples if untrained_reason(s, require_reward=require_reward) == "unscored")
        raise RewardError(
            f"{start}. The grader said: {_excerpt(collected.grade_error)}. "
            f"Example response: {_excerpt(example.response)!r} (label {_excerpt(example.label)!r}). "
            "Check --rm-type or --custom-rm-path, --reward-key and --label-key"
        )
    if reasons[SampleStatus.FAILED] or reasons[SampleStatus.ABORTED]:
        raise EngineError(
            f"{start}. The last engine error: {_excerpt(collected.engine_error)}. "
            "The engines' own words are in logs/ of the run folder"
        )
    if reasons["no_room"]:
        longest = max(sample.prompt_length for sample in samples)
        raise DataError(
            f"{start}: prompts of up to {longest} tokens leave no room for a response. "
            "Raise --rollout-max-context-len if the model allows it, or leave them out with --rollout-max-prompt-len"
        )
    raise DataError(
        f"{start}: every response token is masked, or there is none. Check the label column and the loss mask"
    )


def _excerpt(value: object) -> str:
    """Both ends of a long text: a traceback says where at its beginning and what at its end."""
    text = str(value)
    return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT // 3]} ... {text[-_EXCERPT * 2 // 3 :]}"
