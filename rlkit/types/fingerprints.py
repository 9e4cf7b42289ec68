"""Fingerprints of tensors: 64 bits each, the same for any number of ranks and any device.

A rank sums a mixed value of each of its elements and the element's index in the whole tensor; sums of ranks add up
modulo 2**64. Computed in `backends/*/fingerprint.py`, kept in a checkpoint's manifest.
"""

import hashlib
from collections.abc import Mapping, Sequence

WORD = 1 << 64
WEIGHTS = "model."
"""Names of weights begin with this, those of optimizer state do not."""
CRITIC, REFERENCE = "critic.", "reference."
"""Names of what other modules of a rank keep begin with these; what follows is named as the policy's."""


def merged(parts: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """Fingerprint by tensor name, 16 hex digits, from the sums of all ranks."""
    totals: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = (totals.get(name, 0) + value) % WORD
    return {name: f"{value:016x}" for name, value in totals.items()}


def weights_digest(tensors: Mapping[str, str]) -> str:
    """One digest of all weights, without the optimizer's state."""
    lines = "".join(f"{name} {value}\n" for name, value in sorted(tensors.items()) if name.startswith(WEIGHTS))
    return hashlib.sha256(lines.encode()).hexdigest()


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Names of tensors that are not the same in both; a tensor that only `found` has does not count."""
    return sorted(name for name, value in expected.items() if found.get(name) != value)
