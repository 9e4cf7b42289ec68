"""Samples whose weights are unknown, from the future, or go backwards never reach the trainer."""

import asyncio

import pytest

from rlkit.rollout.weight_versions import check_weight_versions, version_problem
from rlkit.sync.versions import advanced
from rlkit.types.errors import SyncError
from rlkit.types.generation import ModelInfo
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus


def sample(*versions: int, status: SampleStatus = SampleStatus.COMPLETED, length: int = 2, index: int = 0) -> Sample:
    return Sample(
        group_id=7, index=index, seed=0, tokens=[1, 2, 3, *range(length)], prompt_length=3, status=status,
        weight_versions=list(versions),
    )  # fmt: skip


@pytest.mark.parametrize(
    "made, said",
    [
        (sample(4), None),
        (sample(3, 4), None),
        (sample(0), None),
        (sample(), "says no version"),
        (sample(-1), "unknown version"),
        (sample(5), "comes from v5, staleness -1"),
        (sample(3, 5), "staleness -1"),
        (sample(4, 3), "goes backwards"),
        (sample(status=SampleStatus.ABORTED), None),
        (sample(9, status=SampleStatus.FAILED), None),
        (sample(length=0), None),
    ],
)
def test_what_a_trainer_at_version_4_may_use(made, said):
    found = version_problem(made, 4)
    assert found is None if said is None else found is not None and said in found


class Engine:
    def __init__(self, url: str, version: int) -> None:
        self.url = url
        self._version = version

    async def model_info(self) -> ModelInfo:
        return ModelInfo(model_path="m", weight_version=self._version)


def test_the_error_names_sample_and_engine():
    prompt = Prompt(position=0, epoch=0, token_ids=[1, 2, 3], text="")
    group = SampleGroup(group_id=7, prompt=prompt, samples=[sample(4), sample(6, index=1)])
    engines = [Engine("http://a", 4), Engine("http://b", 6)]
    with pytest.raises(SyncError, match=r"sample 1 of group 7 comes from v6, staleness -2.*engine 1 \(http://b\) v6"):
        asyncio.run(check_weight_versions([group], engines, trainer_version=4))  # pyright: ignore[reportArgumentType]
    asyncio.run(check_weight_versions([group], engines, trainer_version=6))  # pyright: ignore[reportArgumentType]


def test_versions_only_count_up():
    assert advanced(None, 0) == 0 and advanced(None, 12) == 12 and advanced(3, 4) == 4
    for last, version in ((5, 5), (5, 4), (None, -1)):
        with pytest.raises(SyncError, match="versions only count up"):
            advanced(last, version)
