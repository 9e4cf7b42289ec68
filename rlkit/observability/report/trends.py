"""Small statistics of curves. Pure."""

import math
from collections.abc import Callable, Sequence


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's; 0 where one of them does not vary."""
    mean_first, mean_second = mean(first), mean(second)
    shared = math.fsum((a - mean_first) * (b - mean_second) for a, b in zip(first, second, strict=True))
    spread = math.sqrt(
        math.fsum((a - mean_first) ** 2 for a in first) * math.fsum((b - mean_second) ** 2 for b in second)
    )
    return shared / spread if spread > 0 else 0.0


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last tenth, of at least two values."""
    count = max(2, len(values) // 10)
    return mean(values[:count]), mean(values[-count:])


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def since(steps: Sequence[int], values: Sequence[float], holds: Callable[[float], bool]) -> int:
    """The first step of the last stretch over which it holds."""
    found = steps[-1]
    for step, value in zip(reversed(steps), reversed(values), strict=True):
        if not holds(value):
            break
        found = step
    return found
