"""The judge of the smoke tests finds fault with what is wrong."""

import json

import check_smoke_run
import orjson
import pytest

GOOD = {
    "time/step_s": 1.0,
    "train/grad_norm": 0.5,
    "train/train_rollout_logprob_abs_diff": 0.01,
    "sync/num_bytes": 100.0,
}


@pytest.fixture
def run_dir(tmp_path):
    rows = [{"step": step, **GOOD} for step in range(2)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(r, option=orjson.OPT_APPEND_NEWLINE) for r in rows))
    config = {"sync": {"check_weight_update_equal": {"value": True, "from": "command line"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = tmp_path / "checkpoints" / "iter_0000001"
    (checkpoint / "trainer").mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    (checkpoint / "meta.json").write_text(json.dumps({"step": 1, "weight_version": 2, "world_size": 1}))
    (checkpoint / "rollout_state.json").write_text("{}")
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / "hf" / name).touch()
    return tmp_path


def judge(run_dir, monkeypatch, capsys) -> tuple[int, str]:
    argv = ["check", "--run", str(run_dir), "--steps", "2", "--export", str(run_dir / "hf")]
    monkeypatch.setattr("sys.argv", argv)
    status = check_smoke_run.main()
    return status, capsys.readouterr().out


def test_a_good_run_passes(run_dir, monkeypatch, capsys):
    status, said = judge(run_dir, monkeypatch, capsys)
    assert status == 0 and said.startswith("PASS: 2 steps")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train/grad_norm": 0.0}, "so no weight moved"),
        ({"train/train_rollout_logprob_abs_diff": 0.5}, "differ by 0.5 in log-probs"),
        ({"sync/num_bytes": 0.0}, "no weights were sent"),
        ({"step": 7}, "steps [0, 7] were reported"),
    ],
)
def test_what_a_step_lacks_is_named(run_dir, monkeypatch, capsys, change, complaint):
    rows = [{"step": 0, **GOOD}, {"step": 1, **GOOD, **change}]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(r, option=orjson.OPT_APPEND_NEWLINE) for r in rows))
    status, said = judge(run_dir, monkeypatch, capsys)
    assert status == 1 and complaint in said


@pytest.mark.parametrize("name", ["hf/model.safetensors", "checkpoints/iter_0000001/COMPLETE"])
def test_what_was_not_saved_is_named(run_dir, monkeypatch, capsys, name):
    (run_dir / name).unlink()
    if "checkpoints" in name:
        (run_dir / "checkpoints" / "iter_0000001").rename(run_dir / "checkpoints" / "other")
    status, said = judge(run_dir, monkeypatch, capsys)
    assert status == 1 and "problem: " in said and "holds no" in said


def test_an_unverified_run_is_named(run_dir, monkeypatch, capsys):
    config = {"sync": {"check_weight_update_equal": {"value": False, "from": "default"}}}
    (run_dir / "config.json").write_text(json.dumps(config))
    assert judge(run_dir, monkeypatch, capsys)[0] == 1
