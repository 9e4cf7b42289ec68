"""How far trainer and engine are apart, token by token: made by a training rank, chosen from by the rollout manager."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

LARGEST = 6e4
"""What half precision can hold; a larger difference counts as this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGaps:
    """Of one rank and one rollout."""

    sample_ids: list[int]
    """Positions in the rollout."""
    ends: list[int]
    """Where each sample's values end in `values`."""
    values: np.ndarray
    """float16: trainer's log-prob minus the engine's, for every token of the samples; 0 where it is not trained on."""

    def by_sample(self) -> Iterator[tuple[int, np.ndarray]]:
        """(position in the rollout, its values from the first token of the prompt on)."""
        start = 0
        for sample, end in zip(self.sample_ids, self.ends, strict=True):
            yield sample, self.values[start:end]
            start = end


NO_GAPS = TokenGaps(sample_ids=[], ends=[], values=np.zeros(0, dtype=np.float16))


def gaps_by_sample(ranks: Sequence[TokenGaps]) -> dict[int, np.ndarray]:
    """Of all ranks. Ranks that share their samples say the same."""
    return {sample: values for rank in ranks for sample, values in rank.by_sample() if sample >= 0}
