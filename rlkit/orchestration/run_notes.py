"""What a run tells its user unasked: settings that differ from those it is continued with, and that nothing is learned.
Called by `session.py`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlkit.types.ranks import MetricSet

UNCHANGING_STEPS = 3
"""Steps without any difference between the samples of a prompt until it is said aloud."""

NOT_SAID = frozenset({"num_rollout", "output_dir", "load", "save", "ckpt_step", "dry_run"})
"""Settings that a continued run is expected to change."""


def changed_settings(path: Path, config_json: Mapping[str, Any]) -> list[str]:
    """`--lr 1e-06 -> 2e-06` for every setting that differs from the run folder's last `config.json`; none where there
    is no readable one.
    """
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    old, new = _values(before), _values(config_json)
    return [
        f"--{name.replace('_', '-')} {_shown(old[name])} -> {_shown(value)}"
        for name, value in new.items()
        if name in old and name not in NOT_SAID and old[name] != value
    ]


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: json.loads(json.dumps(entry["value"]))  # tuples become lists, as in the file
        for section in config.values()
        if isinstance(section, Mapping)
        for name, entry in section.items()
        if isinstance(entry, Mapping) and "value" in entry
    }


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)


class LearningWatch:
    """Says once that the rewards teach nothing: without a difference inside a group every advantage is zero."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._num_steps = 0

    def look(self, metrics: MetricSet) -> None:
        share = metrics.get("rollout/zero_variance_share")
        if share is None:
            return
        self._num_steps = self._num_steps + 1 if share == 1.0 else 0
        if self._num_steps == UNCHANGING_STEPS:
            reward = metrics.get("rollout/reward", float("nan"))
            self._say(
                f"nothing is learned: for {UNCHANGING_STEPS} steps all samples of every prompt had the same reward"
                f" (mean {reward:.3g}), so every advantage was zero. Look at the responses (--save-debug-rollout-data),"
                " the prompt's form and chat template, the grader and its labels"
            )
