"""Settings that changed, and runs that learn nothing, are said aloud."""

import json
from pathlib import Path

from rlkit.orchestration.run_notes import LearningWatch, changed_settings


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


def test_a_run_without_differences_is_told_once() -> None:
    said: list[str] = []
    watch = LearningWatch(said.append)
    for share in (1.0, 1.0, 0.9, 1.0, 1.0):
        watch.look({"rollout/zero_variance_share": share, "rollout/reward": 0.0})
    assert said == []
    for _ in range(5):
        watch.look({"rollout/zero_variance_share": 1.0, "rollout/reward": 0.0})
    assert len(said) == 1 and "same reward (mean 0)" in said[0]
    watch.look({"train/loss": 1.0})
