import pytest
import torch
from managed_rollouts import bug_case

from rlkit.algo.batching import pack
from rlkit.rollout.collect import Collected
from rlkit.rollout.training_batch import check_trainable, groups_by_rank, untrained_reason
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
        shards.append([Update(micro_batches=packed, num_loss_tokens=1, num_samples=6)])
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
