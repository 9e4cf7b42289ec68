"""Two run folders side by side: settings, metrics, and the first step at which they part."""

import json
import math
from pathlib import Path

import pytest

from rlkit.cli.main import main
from rlkit.observability.report.comparison import compare
from rlkit.observability.report.comparison_page import verdict
from rlkit.observability.report.record import read_run


def write_run(path: Path, *, lr: float, rewards: list[float], losses: list[float], seconds: float = 1.0) -> Path:
    path.mkdir()
    settings = {
        "optimizer": {"lr": {"value": lr, "from": "command line"}},
        "logging": {"output_dir": {"value": str(path), "from": "command line"}},
    }
    (path / "config.json").write_text(json.dumps(settings))
    rows = [
        {"step": k, "rollout/reward": reward, "train/loss": None if math.isnan(loss) else loss, "time/step_s": seconds}
        for k, (reward, loss) in enumerate(zip(rewards, losses, strict=True))
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_first_step_that_differs_is_named_with_both_values(tmp_path: Path):
    first = write_run(tmp_path / "a", lr=1e-6, rewards=[0.1, 0.2, 0.3, 0.4], losses=[0.5, 0.4, 0.3, 0.2])
    second = write_run(tmp_path / "b", lr=2e-6, rewards=[0.1, 0.2, 0.35], losses=[0.5, 0.4, 0.3], seconds=9.0)
    result = compare(read_run(first), read_run(second))
    assert [(item.name, item.first, item.second) for item in result.settings] == [("lr", 1e-6, 2e-6)]
    assert result.steps == [0, 1, 2] and result.diverges_at == 2
    assert verdict(result) == "the runs part at step 2: rollout/reward 0.3 and 0.35"


def test_times_do_not_part_runs_and_equal_ones_are_called_so(tmp_path: Path):
    nan = math.nan
    first = write_run(tmp_path / "a", lr=1e-6, rewards=[0.1, 0.2], losses=[0.5, nan], seconds=1.0)
    second = write_run(tmp_path / "b", lr=1e-6, rewards=[0.1, 0.2], losses=[0.5, nan], seconds=2.0)
    result = compare(read_run(first), read_run(second))
    assert result.settings == [] and result.diverges_at is None
    assert verdict(result) == "the runs are the same at all 2 common steps"


def test_the_command_prints_a_table_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = write_run(tmp_path / "a", lr=1e-6, rewards=[0.1, 0.2], losses=[0.5, 0.4])
    second = write_run(tmp_path / "b", lr=2e-6, rewards=[0.1, 0.3], losses=[0.5, 0.4])
    page = tmp_path / "c.html"
    assert main(["compare", str(first), str(second), "--html", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [["setting", "a", "b"], ["--lr", "1e-06", "2e-06"]]
    assert ["rollout/reward", "0.2", "0.3", "0.15", "0.2", "1"] in [line.split() for line in lines]
    text = page.read_text()
    assert (
        "part at step 1" in text
        and text.count("<polyline") >= 4
        and "<script" not in text
        and "http:" not in text
        and "https:" not in text
    )
    assert main(["compare", str(first), str(tmp_path / "nowhere")]) == 2


def test_runs_without_common_steps(tmp_path: Path):
    first = write_run(tmp_path / "a", lr=1e-6, rewards=[0.1], losses=[0.5])
    second = write_run(tmp_path / "b", lr=1e-6, rewards=[], losses=[])
    assert verdict(compare(read_run(first), read_run(second))) == "the runs have no step in common"
