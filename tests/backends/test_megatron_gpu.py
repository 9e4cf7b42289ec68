"""The Megatron backend on one CUDA GPU: bfloat16, sleep and wake, export while asleep."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (pip install rlkit[megatron])")

import torch
from fsdp_setup import MIXED_LENGTHS, all_weights, make_samples, make_updates, save_checkpoint_dir
from megatron.core import parallel_state
from megatron_setup import SIZES, megatron_config, rank_of, tiny_deepseek, tiny_qwen3_moe
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlkit.backends.base import Backend
from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.megatron.backend import MegatronBackend
from rlkit.config.schema import RunConfig
from rlkit.types.ranks import MetricSet

pytestmark = pytest.mark.gpu


def small_qwen3() -> Qwen3ForCausalLM:
    """25 million parameters: enough for their memory to show."""
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=64, tie_word_embeddings=True))


MODELS = {"qwen3": small_qwen3, "qwen3-moe": tiny_qwen3_moe, "deepseek": tiny_deepseek}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_checkpoint_dir(make().to(torch.bfloat16), root / name) for name, make in MODELS.items()}


@pytest.fixture(autouse=True)
def leave_megatron_groups():
    yield
    parallel_state.destroy_model_parallel()


def start(kind: type[FsdpBackend] | type[MegatronBackend], cfg: RunConfig) -> Backend:
    backend = kind()
    backend.init(cfg, replace(rank_of(cfg, 0, 1, 0), device="cuda"), resume_from=None)
    return backend


def step(backend: Backend, cfg: RunConfig, number: int = 0) -> MetricSet:
    return backend.train(number, make_updates(make_samples(MIXED_LENGTHS, seed=number), cfg)[0])


def test_bf16_steps_follow_fsdp(paths):
    cfg = megatron_config(paths["qwen3"], {}, dtype="bfloat16", lr=1e-4, torch_compile="off")
    ours, theirs = start(MegatronBackend, cfg), start(FsdpBackend, cfg)
    for number in range(3):
        found, wanted = step(ours, cfg, number), step(theirs, cfg, number)
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.01)
        assert found["train/loss"] == pytest.approx(wanted["train/loss"], abs=5e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_sleep_frees_the_gpu_and_gives_everything_back(name, offload, paths):
    cfg = megatron_config(paths[name], {"optimizer_cpu_offload": offload}, dtype="bfloat16", lr=1e-4)
    backend = start(MegatronBackend, cfg)
    step(backend, cfg)
    awake, weights, marks = torch.cuda.memory_allocated(), all_weights(backend), backend.fingerprint()
    backend.sleep()
    asleep = all_weights(backend)
    assert all(torch.equal(asleep[key], value) for key, value in weights.items())
    del asleep, weights
    if name == "qwen3":
        assert torch.cuda.memory_allocated() < awake / 4
    backend.wake_up()
    assert backend.fingerprint() == marks
    assert torch.isfinite(torch.tensor(step(backend, cfg, 1)["train/grad_norm"]))


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek"])
def test_experts_in_bf16_follow_float32(name, paths):
    norms = {}
    for dtype in ("bfloat16", "float32"):
        cfg = megatron_config(paths[name], {}, dtype=dtype, attn_implementation="sdpa")
        norms[dtype] = step(start(MegatronBackend, cfg), cfg)["train/grad_norm"]
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.1)


def test_recomputation_changes_nothing(paths):
    cfg = megatron_config(paths["qwen3"], {}, dtype="bfloat16", lr=1e-4)
    recomputing = megatron_config(paths["qwen3"], {"recompute_granularity": "full"}, dtype="bfloat16", lr=1e-4)
    found, wanted = step(start(MegatronBackend, recomputing), recomputing), step(start(MegatronBackend, cfg), cfg)
    assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-3)
