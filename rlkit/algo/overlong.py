"""DAPO's soft punishment of overlong answers. Called by `rollout/`.

Yu et al. 2025 (arXiv:2503.14476, eq. 13).
"""


def overlong_penalty(length: int, *, max_length: int, buffer_length: int, factor: float = 1.0) -> float:
    """What a response of `length` tokens adds to its reward: 0 up to `max_length - buffer_length`, then falling
    linearly to -`factor` at `max_length`, where it stays.
    """
    assert 0 < buffer_length <= max_length
    excess = length - (max_length - buffer_length)
    return -factor * min(max(excess / buffer_length, 0.0), 1.0)
