"""Settings that changed are said aloud."""

import json
from pathlib import Path

from rlkit.orchestration.run_notes import changed_settings


def entry(value: object) -> dict[str, object]:
    return {"value": value, "from": "default"}


def test_changed_settings_are_told_and_expected_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    new = {
        "optimizer": {"lr": entry(2e-6)},
        "algo": {"advantage_estimator": entry("grpo"), "eps_clip_c": entry(None)},
        "rollout": {"num_rollout": entry(20), "rollout_stop": entry(("a", "b"))},
    }
    assert changed_settings(path, new) == []
    old = json.loads(json.dumps(new))
    path.write_text(json.dumps(old))
    assert changed_settings(path, new) == []
    old["optimizer"]["lr"]["value"] = 1e-6
    old["algo"]["advantage_estimator"]["value"] = "gspo"
    old["algo"]["eps_clip_c"]["value"] = 3.0
    old["rollout"]["num_rollout"]["value"] = 10
    path.write_text(json.dumps(old))
    assert changed_settings(path, new) == [
        "--lr 1e-06 -> 2e-06",
        '--advantage-estimator "gspo" -> "grpo"',
        "--eps-clip-c 3.0 -> unset",
    ]
