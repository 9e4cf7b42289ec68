"""What a run tells its user unasked: settings that differ from those it is continued with. Called by `session.py`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
