import pytest
import torch
from managed_rollouts import bug_case

from rlkit.algo.batching import pack
from rlkit.config.schema import AlgoConfig, RolloutConfig, RunConfig
from rlkit.rollout.collect import Collected
from rlkit.rollout.training_batch import (
    build_shards,
    check_trainable,
    flatten,
    groups_by_rank,
    shaping_metrics,
    untrained_reason,
)
from rlkit.types.batches import Update
from rlkit.types.errors import EngineError
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus


def one_sample(group_id: int, length: int, *, reward: float | None = 1.0, **changes: object) -> Sample:
    fields = {
        "tokens": [3] * (2 + length),
        "loss_mask": [1] * length,
        "rollout_logprobs": [-0.5] * length,
        "status": SampleStatus.COMPLETED,
        "reward": reward,
    }
    # type: ignore[arg-type]
    return Sample(**{"group_id": group_id, "index": 0, "seed": 0, "prompt_length": 2, **fields, **changes})


def group_of(*samples: Sample) -> SampleGroup:
    prompt = Prompt(position=0, epoch=0, token_ids=[3, 3], text="p")
    return SampleGroup(group_id=samples[0].group_id, prompt=prompt, samples=list(samples))


def test_pk07_what_a_rank_holds_is_found_by_sample_id():
    case = bug_case("pk-07")
    rewards, lengths = case["input"]["rewards"], case["input"]["response_lengths"]
    partitions = case["input"]["partitions"]
    samples = [one_sample(i, lengths[i], reward=float(rewards[i])) for i in range(len(rewards))]
    groups = [group_of(sample) for sample in samples]
    orders = [[[0, 1], [2]], case["input"]["micro_batches_rank1"]]
    shards = []
    for partition, order in zip(partitions, orders, strict=True):
        micro = [[partition[i] for i in members] for members in order]
        packed = [
            pack(
                [samples[i] for i in members],
                sample_ids=members,
                advantages=[0.0] * len(members),
                token_weights=[1.0] * len(members),
                with_rollout_logprobs=True,
            )
            for members in micro
        ]
        shards.append([Update(micro_batches=packed, num_loss_tokens=1, num_samples=6, num_rollouts=6)])
    assert groups_by_rank(groups, shards) == [sorted(partition) for partition in partitions]

    per_rank = []
    for updates in shards:
        ids = torch.cat([batch.sample_ids_S for update in updates for batch in update.micro_batches]).tolist()
        right = [samples[i].response_length for i in ids if samples[i].reward == 1.0]
        per_rank.append(sum(right) / len(right))
    assert per_rank == case["expected"]["metric_per_rank"]


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (one_sample(0, 4), None),
        (one_sample(0, 4, status=SampleStatus.TRUNCATED), None),
        (one_sample(0, 4, reward=None), "unscored"),
        (one_sample(0, 4, status=SampleStatus.ABORTED), "aborted"),
        (one_sample(0, 0, reward=None, status=SampleStatus.FAILED), "failed"),
        (one_sample(0, 0, reward=None, status=SampleStatus.TRUNCATED), "no_room"),
        (one_sample(0, 4, loss_mask=[0] * 4), "masked"),
    ],
    ids=["trains", "truncated-trains", "unscored", "aborted", "failed", "no-room", "masked"],
)
def test_untrained_reason(sample: Sample, reason: str | None):
    assert untrained_reason(sample, require_reward=True) == reason


def test_one_trainable_sample_is_enough():
    groups = [group_of(one_sample(0, 4, reward=None)), group_of(one_sample(1, 4))]
    check_trainable(groups, Collected(), step=0, require_reward=True)


def test_the_message_counts_every_reason():
    groups = [
        group_of(one_sample(0, 4, status=SampleStatus.ABORTED)),
        group_of(one_sample(1, 0, reward=None, status=SampleStatus.FAILED)),
        group_of(one_sample(2, 4, status=SampleStatus.ABORTED)),
    ]
    with pytest.raises(EngineError, match=r"step 4: none of 3 samples .*2 aborted, 1 failed.*connection refused"):
        check_trainable(groups, Collected(engine_error="connection refused"), step=4, require_reward=True)


def rollout_config(**changes: object) -> RunConfig:
    algo = AlgoConfig(**changes)  # pyright: ignore[reportArgumentType]
    rollout = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_response_len=8)
    return RunConfig(algo=algo, rollout=rollout)


def test_overlong_answers_are_punished_before_they_are_compared():
    """Rewards 1 and 1: only the length tells them apart. 8 of at most 8 tokens, the last 4 of them punished."""
    cfg = rollout_config(overlong_buffer_len=4, overlong_penalty_factor=0.5, disable_grpo_std_normalization=True)
    groups = [group_of(one_sample(0, 8), one_sample(0, 4, index=1)), group_of(one_sample(1, 8, reward=None))]
    (batch,) = build_shards(cfg, groups, dp=1)[0][0].micro_batches
    assert dict(zip(batch.sample_ids_S.tolist(), batch.advantages_S.tolist(), strict=True)) == {0: -0.25, 1: 0.25}
    assert shaping_metrics(cfg, groups) == {"rollout/overlong_penalty": -0.25}
    assert [sample.reward for sample in flatten(groups)] == [1.0, 1.0, None], "reported rewards are the grader's"
    assert shaping_metrics(rollout_config(), groups) == {}


def test_a_constant_length_reaches_the_weights():
    groups = [group_of(one_sample(0, 2), one_sample(0, 4, index=1, reward=0.0))]
    (batch,) = build_shards(rollout_config(loss_constant_length=10), groups, dp=1)[0][0].micro_batches
    assert batch.loss_weight_T[batch.loss_mask_T].tolist() == pytest.approx([1 / 20] * 6)


def test_samples_of_one_rollout_share_its_advantage():
    cfg = rollout_config(advantage_estimator="rloo")
    groups = [group_of(one_sample(0, 2), one_sample(0, 3), one_sample(0, 4, index=1, reward=0.0))]
    (batch,) = build_shards(cfg, groups, dp=1)[0][0].micro_batches
    found = dict(zip(batch.sample_ids_S.tolist(), batch.advantages_S.tolist(), strict=True))
    assert found == {0: 1.0, 1: 1.0, 2: -1.0}
    assert dict(zip(batch.sample_ids_S.tolist(), batch.rollouts_S.tolist(), strict=True)) == {0: 0, 1: 0, 2: 1}


def test_weights_scale_the_advantages_of_their_samples():
    groups = [group_of(one_sample(g, 3, reward=0.0, index=0), one_sample(g, 3, reward=1.0, index=1)) for g in (0, 1)]
    cfg = RunConfig(rollout=RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2))

    def advantages(**options: list[float]) -> dict[int, float]:
        batches = [b for updates in build_shards(cfg, groups, 1, **options) for u in updates for b in u.micro_batches]
        return {i: a for b in batches for i, a in zip(b.sample_ids_S.tolist(), b.advantages_S.tolist(), strict=True)}

    plain, weighed = advantages(), advantages(weights=[1.0, 0.5, 0.25, 0.0])
    assert min(map(abs, plain.values())) > 0.5
    assert weighed == pytest.approx({0: plain[0], 1: 0.5 * plain[1], 2: 0.25 * plain[2], 3: 0.0})
