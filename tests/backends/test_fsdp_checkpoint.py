import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_setup import (
    all_weights,
    make_config,
    parts_of,
    rank_info,
    save_checkpoint_dir,
    spread_out,
    start_backend,
    tiny_qwen3,
    train_step,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.checkpoint import write
from rlkit.backends.fsdp.export import export_hf
from rlkit.config.schema import LoraConfig
from rlkit.types.errors import CheckpointError


def optimizer_state(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    state = parts_of(backend).optimizer.sharded_state()
    return {name: getattr(value, "full_tensor", lambda value=value: value)().clone() for name, value in state.items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_resumed_run_equals_an_uninterrupted_one(checkpoints: dict[str, Path], tmp_path: Path, name: str):
    """Bit for bit: weights, moments, random state, and the learning rate of a schedule in mid-decay."""
    cfg = make_config(checkpoints[name], lr_decay_style="cosine", lr_warmup_iters=1, num_steps_per_rollout=2)
    first = start_backend(cfg)
    train_step(first, cfg, 0)
    torch.rand(5)  # a random state that --seed alone does not lead to
    first.save(0, tmp_path / "saved", hf_directory=None)
    drawn = torch.rand(3)
    uninterrupted = train_step(first, cfg, 1)

    second = FsdpBackend()
    report = second.init(cfg, rank_info(), resume_from=tmp_path / "saved")
    assert report.resumed_step == 0
    assert torch.equal(torch.rand(3), drawn)
    resumed = train_step(second, cfg, 1)
    for metric in ("loss", "grad_norm", "lr", "entropy", "ppo_kl"):
        assert resumed[f"train/{metric}"] == uninterrupted[f"train/{metric}"], metric
    assert_equal(all_weights(first), all_weights(second))
    assert_equal(optimizer_state(first), optimizer_state(second))


def test_an_async_save_holds_the_state_of_its_moment(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next step runs while the files are held back; until they are written nothing looks complete."""
    may_write = threading.Event()

    def held_back(*args: Any, **kwargs: Any) -> None:
        assert may_write.wait(60.0)
        write(*args, **kwargs)

    monkeypatch.setattr("rlkit.backends.fsdp.saving.write", held_back)
    cfg = make_config(checkpoints["qwen3"], async_save=True)
    first = start_backend(cfg)
    train_step(first, cfg, 0)
    weights, state = all_weights(first), optimizer_state(first)
    first.save(0, tmp_path / "saved", hf_directory=None)
    train_step(first, cfg, 1)
    assert not first.is_save_done() and not (tmp_path / "saved").exists()
    with pytest.raises(CheckpointError, match=r"trainer\.json is missing"):
        start_backend(cfg, resume_from=tmp_path / "saved")
    may_write.set()
    first.finish_save()
    assert first.is_save_done()
    second = start_backend(cfg, resume_from=tmp_path / "saved")
    assert_equal(all_weights(second), weights)
    assert_equal(optimizer_state(second), state)
    first.save(1, tmp_path / "again", hf_directory=None)
    first.finish_save()
    assert_equal(all_weights(start_backend(cfg, resume_from=tmp_path / "again")), all_weights(first))


def test_an_async_save_that_fails_is_told_by_the_next_call(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = make_config(checkpoints["qwen3"], async_save=True)
    backend = start_backend(cfg)
    (tmp_path / "file").write_text("in the way")
    backend.save(0, tmp_path / "file" / "saved", hf_directory=None)
    with pytest.raises(OSError):
        backend.finish_save()
    backend.save(1, tmp_path / "saved", hf_directory=None)
    backend.finish_save()
    assert (tmp_path / "saved" / "trainer.json").is_file()


def test_saving_is_neutral_and_can_be_repeated(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = make_config(checkpoints["qwen3"])
    results = []
    for saves in (False, True):
        backend = start_backend(cfg)
        if saves:
            backend.save(0, tmp_path / "before", hf_directory=None)
        train_step(backend, cfg, 0)
        if saves:
            backend.save(1, tmp_path / "after", hf_directory=tmp_path / "hf")
        train_step(backend, cfg, 1)
        results.append(all_weights(backend))
    assert_equal(*results)


def test_resuming_needs_no_weights_in_the_hf_folder(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = make_config(checkpoints["qwen3"])
    first = start_backend(cfg)
    train_step(first, cfg, 0)
    first.save(0, tmp_path / "saved", hf_directory=None)
    bare = tmp_path / "bare"
    shutil.copytree(checkpoints["qwen3"], bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(CheckpointError, match="neither model"):
        start_backend(make_config(bare))
    second = start_backend(make_config(bare), resume_from=tmp_path / "saved")
    second.save(1, tmp_path / "again", hf_directory=tmp_path / "hf")
    assert_equal(load_file(tmp_path / "hf" / "model.safetensors"), all_weights(first))


def test_no_load_optim_takes_the_weights_only(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = make_config(checkpoints["qwen3"], lr_warmup_iters=10)
    first = start_backend(cfg)
    train_step(first, cfg, 0)
    first.save(0, tmp_path / "saved", hf_directory=None)
    second = start_backend(
        make_config(checkpoints["qwen3"], no_load_optim=True, lr_warmup_iters=10), resume_from=tmp_path / "saved"
    )
    assert_equal(all_weights(first), all_weights(second))
    assert all(value.abs().sum() == 0 for value in optimizer_state(second).values())
    assert train_step(second, cfg, 1)["train/lr"] == pytest.approx(cfg.optimizer.lr / 10)


def test_checkpoints_that_do_not_fit_are_refused(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = make_config(checkpoints["qwen3"])
    backend = start_backend(cfg)
    backend.save(4, tmp_path / "saved", hf_directory=None)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        start_backend(make_config(checkpoints["llama"]), resume_from=tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"trainer\.json is missing"):
        start_backend(cfg, resume_from=tmp_path)
    meta = tmp_path / "saved" / "trainer.json"
    assert json.loads(meta.read_text())["step"] == 4
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(CheckpointError, match="format 99"):
        start_backend(cfg, resume_from=tmp_path / "saved")


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "llama"])
def test_the_export_loads_in_transformers_with_equal_logits(checkpoints: dict[str, Path], tmp_path: Path, name: str):
    cfg = make_config(checkpoints[name])
    backend = start_backend(cfg)
    train_step(backend, cfg)
    backend.save(0, tmp_path / "saved", hf_directory=tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_equal(dict(loaded.named_parameters()), all_weights(backend))
    original = AutoModelForCausalLM.from_pretrained(checkpoints[name])
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        logits, before = loaded(tokens).logits, original(tokens).logits
        original.load_state_dict(all_weights(backend), strict=False)
        original.tie_weights()
        assert torch.equal(original(tokens).logits, logits)
    assert (logits - before).abs().max() > 1e-3, "training must have changed something"
    again = start_backend(make_config(tmp_path / "hf"))
    assert_equal(all_weights(again), all_weights(backend))


def test_the_export_keeps_dtypes_files_and_ties(tmp_path: Path):
    """A bf16 checkpoint with one float32 tensor; only weight files are not copied."""
    source = save_checkpoint_dir(spread_out(tiny_qwen3()).to(torch.bfloat16), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_text("not to be copied")
    backend = start_backend(make_config(source))
    backend.save(0, tmp_path / "saved", hf_directory=tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert_equal(exported, tensors)
    assert {name: tensor.dtype for name, tensor in exported.items()} == {n: t.dtype for n, t in tensors.items()}
    assert "lm_head.weight" not in exported
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {path.name for path in source.iterdir()} - {"pytorch_model.bin"}
    assert (tmp_path / "hf" / "config.json").read_text() == (source / "config.json").read_text()


def test_large_models_are_exported_in_several_files(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rlkit.backends.fsdp.export.BUCKET_BYTES", 3000)
    backend = start_backend(make_config(checkpoints["qwen3-untied"]))
    parts = parts_of(backend)
    export_hf(parts.policy, parts.mesh, parts.source, tmp_path / "hf", lora=LoraConfig(), max_file_bytes=30_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "hf" / name).stat().st_size < 40_000 for name in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_equal(dict(loaded.named_parameters()), all_weights(backend))
    again = start_backend(make_config(tmp_path / "hf"))
    assert_equal(all_weights(again), all_weights(backend))


def test_the_source_is_never_overwritten(checkpoints: dict[str, Path], tmp_path: Path):
    backend = start_backend(make_config(checkpoints["qwen3"]))
    with pytest.raises(CheckpointError, match="refusing to export over"):
        backend.save(0, tmp_path / "saved", hf_directory=checkpoints["qwen3"])


def broken_copy(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_broken_hf_checkpoints_are_explained(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    source, norm = checkpoints["qwen3"], "model.norm.weight"

    def load(name: str, change) -> None:
        start_backend(make_config(broken_copy(source, tmp_path / name, change)))

    with pytest.raises(CheckpointError, match=r"lacks 1 of the \d+ tensors .*model.norm.weight"):
        load("missing", lambda tensors: tensors.pop(norm))
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \(3,\), but config.json implies \(32,\)"):
        load("shape", lambda tensors: tensors.update({norm: torch.ones(3)}))
    with pytest.raises(CheckpointError, match="stored as F8_E4M3; convert"):
        load("fp8", lambda tensors: tensors.update({norm: tensors[norm].to(torch.float8_e4m3fn)}))
    with caplog.at_level(logging.WARNING):
        load(
            "extra", lambda tensors: tensors.update({"mtp.weight": torch.ones(3), "lm_head.weight": torch.ones(37, 32)})
        )
    assert "ignoring 1 tensors unknown to the architecture: mtp.weight" in caplog.text
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        start_backend(make_config(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    shutil.copy(source / "config.json", tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        start_backend(make_config(tmp_path / "empty"))
