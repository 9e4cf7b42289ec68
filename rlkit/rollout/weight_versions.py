"""The rule that every trained response comes from known weights, none newer than the trainer's. Called by `manager.py`
before a rollout is packed.

An engine that comes back with an old or unset version, or a counter that went backwards, would make the most off-policy
samples look the freshest; here it is an error that names the sample and the engine.
"""

import asyncio
from collections.abc import Sequence

from rlkit.engines.client import EngineClient
from rlkit.types.errors import EngineError, SyncError
from rlkit.types.samples import Sample, SampleGroup

MAX_NAMED = 3


async def check_weight_versions(
    groups: Sequence[SampleGroup], engines: Sequence[EngineClient], *, trainer_version: int
) -> None:
    """SyncError if a sample that may be trained on has no version, a negative one, one that is newer than the trainer's
    (negative staleness), or versions that go backwards within the response.
    """
    found = [
        (sample, problem)
        for group in groups
        for sample in group.samples
        if (problem := version_problem(sample, trainer_version)) is not None
    ]
    if not found:
        return
    told = "; ".join(f"sample {s.index} of group {s.group_id} {problem}" for s, problem in found[:MAX_NAMED])
    raise SyncError(
        f"{len(found)} samples have impossible weight versions; the trainer is at v{trainer_version}: {told}. "
        f"The engines say: {await _engine_versions(engines)}. Their logs are in logs/ of the run folder; a resume from "
        "the last checkpoint gives every engine the trainer's weights again"
    )


def version_problem(sample: Sample, trainer_version: int) -> str | None:
    """What is wrong with the versions of one sample; None when nothing is, or when no token of it can be trained."""
    versions = sample.weight_versions
    if not sample.status.is_trainable or sample.response_length == 0:
        return None
    if not versions:
        return "says no version"
    if min(versions) < 0:
        return f"says an unknown version: {versions}"
    if max(versions) > trainer_version:
        return f"comes from v{max(versions)}, staleness {trainer_version - max(versions)}"
    if versions != sorted(versions):
        return f"goes backwards: {versions}"
    return None


async def _engine_versions(engines: Sequence[EngineClient]) -> str:
    answers = await asyncio.gather(*(engine.model_info() for engine in engines), return_exceptions=True)
    told = []
    for index, (engine, answer) in enumerate(zip(engines, answers, strict=True)):
        if isinstance(answer, EngineError):
            told.append(f"engine {index} ({engine.url}) does not answer")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            told.append(f"engine {index} ({engine.url}) v{answer.weight_version}")
    return ", ".join(told)
