"""Adapters, float16, offload and ways of saving on a GPU, against the CPU or against doing without."""

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
    tiny_qwen3,
    train_step,
)
from test_fsdp_layouts import differing, whole_state

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.fingerprint import file_fingerprints
from rlkit.backends.fsdp.lora import is_adapter
from rlkit.backends.fsdp.model import named_shards
from rlkit.types.fingerprints import merged

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "adapters": {"lora_rank": 4},
    "adapters, compiled": {"lora_rank": 4, "torch_compile": "on"},
    "adapters, bfloat16": {"lora_rank": 4, "dtype": "bfloat16"},
    "float16": {"dtype": "auto", "fp16": True},
    "offloaded": {"fsdp_cpu_offload": True},
    "offloaded adapters": {"fsdp_cpu_offload": True, "lora_rank": 4, "dtype": "bfloat16"},
    "one file": {"fsdp_full_params": True},
    "one file, in place": {"fsdp_full_params": True, "fsdp_state_dict_cpu_offload": False},
    "in place": {"fsdp_state_dict_cpu_offload": False},
    "frozen": {"freeze_params_name_list": ("embed", "norm")},
}


def started(cfg: Any, device: str, resume_from: Path | None = None) -> FsdpBackend:
    backend = FsdpBackend()
    backend.init(cfg, rank_info(device=device), resume_from=resume_from)
    return backend


@pytest.fixture(scope="module")
def half_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint_dir(spread_out(tiny_qwen3()).to(torch.bfloat16), tmp_path_factory.mktemp("half") / "m")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_gpu_trains_sleeps_saves_and_resumes(half_checkpoint: Path, tmp_path: Path, name: str):
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.1, "attn_implementation": "sdpa", **SETTINGS[name]}
    cfg = make_config(half_checkpoint, **changes)
    backend = started(cfg, "cuda")
    metrics = train_step(backend, cfg, 0)
    weights = all_weights(backend)
    backend.sleep()
    assert not differing(all_weights(backend), weights), "asleep"
    backend.wake_up()
    assert not differing(all_weights(backend), weights), "awake again"
    backend.save(0, tmp_path / "saved", hf_directory=tmp_path / "hf")
    assert file_fingerprints(tmp_path / "saved") == merged([backend.fingerprint()])
    further = train_step(backend, cfg, 1)
    again = started(cfg, "cuda", tmp_path / "saved")
    resumed = train_step(again, cfg, 1)
    assert resumed["train/grad_norm"] == pytest.approx(further["train/grad_norm"], rel=1e-4)
    state, other = whole_state(backend), whole_state(again)
    assert all(torch.allclose(other[key].cpu(), value.cpu(), atol=1e-3) for key, value in state.items())
    exact = make_config(half_checkpoint, **{**changes, "dtype": "float32", "fp16": False, "torch_compile": "off"})
    on_cpu = train_step(started(exact, "cpu"), exact, 0)
    rel = 0.15 if cfg.dtype_name in ("bfloat16", "float16") else 1e-3
    for metric in ("grad_norm", "entropy"):
        assert metrics[f"train/{metric}"] == pytest.approx(on_cpu[f"train/{metric}"], rel=rel), metric


def test_offloaded_state_is_in_host_memory(half_checkpoint: Path):
    cfg = make_config(half_checkpoint, fsdp_cpu_offload=True)
    backend = started(cfg, "cuda")
    train_step(backend, cfg, 0)
    parts = parts_of(backend)
    assert all(shard.to_local().is_cpu for _, shard in named_shards(parts.policy))
    assert all(tensor.is_cpu for tensor in parts.optimizer.state_tensors())


def test_frozen_base_takes_half_the_memory(half_checkpoint: Path):
    cfg = make_config(half_checkpoint, lora_rank=4, dtype="bfloat16")
    dtypes = {is_adapter(key): shard.dtype for key, shard in named_shards(parts_of(started(cfg, "cuda")).policy)}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
