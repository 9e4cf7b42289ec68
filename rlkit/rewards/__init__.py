"""Graders: `grade` for one response from anywhere; a run grades through `rewards.pool.GraderPool`."""

import functools
import os
from collections.abc import Mapping

from rlkit.rewards.algebra import AlgebraService
from rlkit.rewards.grading import AlgebraNeeded, assess
from rlkit.rewards.watch import MarkerWatch
from rlkit.types.errors import RewardError

__all__ = ["RewardError", "grade"]


def grade(rm_type: str, response: object, label: object, metadata: dict[str, object] | None = None) -> float:
    """Reward of one response by a built-in grader, between 0.0 and 1.0; `docs/rewards.md` says what each looks at.

    `metadata["rm_type"]`, if present, takes the place of `rm_type`. A response or label that makes no sense scores 0.0;
    only an unknown grader (the message names the nearest), one that only runs have (`remote_rm`, `code`), a row of
    `ifbench` that cannot be checked, or a missing math-verify raises, RewardError. Deterministic.
    May be called from any thread and works for ten seconds at most, nearly always for microseconds: computer algebra
    runs in processes of its own that are started when first needed and killed at a time limit. While other threads keep
    them all busy a call waits its turn, which changes no reward; after two minutes of that it raises RewardError.
    """
    verdict = assess(rm_type, response, label, metadata if isinstance(metadata, Mapping) else {}, _watch())
    if isinstance(verdict, AlgebraNeeded):
        return float(_algebra().any_equal(verdict.pairs))
    return verdict


@functools.cache
def _watch() -> MarkerWatch:
    return MarkerWatch()


@functools.cache
def _algebra() -> AlgebraService:
    return AlgebraService()  # starts no process yet


def _start_afresh() -> None:
    """Objects of this process; a fork must not use its parent's processes and locks."""
    for shared in (_watch, _algebra):
        shared.cache_clear()
        shared()


_start_afresh()  # before there are threads that could make two of each
os.register_at_fork(after_in_child=_start_afresh)
