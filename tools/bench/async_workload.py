"""What the asynchronous benchmark generates: responses whose lengths are log-normal, one limit a request."""

import math
import random
from dataclasses import replace

from rlkit.rollout.turns import Turns
from rlkit.types.generation import SamplingParams
from rlkit.types.samples import Sample

MEDIAN = 40
SIGMA = 0.8
"""Of the logarithm: one response in a hundred is more than six times as long as the median."""
SHORTEST = 4


def response_length(seed: int, longest: int) -> int:
    """Tokens of the response with this seed: the same in every mode and run."""
    length = MEDIAN * math.exp(SIGMA * random.Random(seed).gauss(0.0, 1.0))
    return max(SHORTEST, min(longest, round(length)))


async def generate(turns: Turns, sample: Sample, sampling: SamplingParams) -> None:
    """As `--custom-generate-function-path` calls it."""
    length = response_length(sample.seed, sampling.max_new_tokens)
    await turns.generate(sample, replace(sampling, max_new_tokens=length))


def reward(response: str, label: object, metadata: dict[str, object]) -> float:
    """As `--custom-rm-path` calls it: next to free, and different within a group."""
    return float(len(response) % 7) / 7.0
