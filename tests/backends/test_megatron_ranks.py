"""The Megatron backend on two ranks, in every way that two ranks can share a model, is the FSDP backend on one. The two
ranks live in one spawned pair of processes, which answers all questions at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (pip install rlkit[megatron])")

import torch
import torch.multiprocessing as mp
from fsdp_setup import MIXED_LENGTHS, all_weights, free_port, make_samples, make_updates, naive_step, start_backend
from megatron.core import parallel_state
from megatron_setup import hf_tensors, megatron_config, rank_of, save_models

from rlkit.backends.base import Backend
from rlkit.backends.fsdp.fingerprint import file_fingerprints
from rlkit.backends.megatron.backend import MegatronBackend
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import all_gather_objects, barrier
from rlkit.types.fingerprints import merged
from rlkit.types.ranks import MetricSet

NUM_RANKS = 2
NUM_STEPS = 2

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "full"},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {"recompute_granularity": "selective"},
    "expert": {"expert_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "virtual": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
}
SETTINGS: dict[str, dict[str, object]] = {
    "grpo": {"entropy_coef": 0.05, "max_tokens_per_gpu": 38, "num_steps_per_rollout": 2},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.1, "calculate_per_token_loss": True, "clip_grad": 0.5},
    "whitened": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.05},
    "sft": {"loss_type": "sft_loss"},
    "experts": {"entropy_coef": 0.05, "max_tokens_per_gpu": 38},
}
CASES = [
    ("tensor", "qwen3", "grpo"),
    ("tensor", "qwen2", "kl"),
    ("sequence", "qwen3", "grpo"),
    ("sequence", "llama3", "sft"),
    ("sequence", "qwen3-moe", "experts"),
    ("sequence", "deepseek", "experts"),
    ("pipeline", "qwen3", "grpo"),
    ("pipeline", "qwen2", "whitened"),
    ("pipeline", "qwen3-untied", "kl"),
    ("pipeline", "qwen3-moe", "experts"),
    ("data", "qwen3", "grpo"),
    ("data", "qwen2", "whitened"),
    ("data", "qwen3-moe", "experts"),
    ("expert", "qwen3-moe", "experts"),
    ("expert", "deepseek", "experts"),
    ("context", "qwen3", "grpo"),
    ("context", "deepseek", "experts"),
    ("virtual", "qwen3-deep", "grpo"),
]
"""(layout, model, setting)."""
DENSE = [case for case in CASES if case[2] != "experts"]
"""transformers fuses the experts of a layer into one parameter, so the FSDP backend cannot read per-expert checkpoints:
models with experts are compared with a plain transformers model."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case came to on rank 0."""

    before: dict[str, torch.Tensor]
    metrics: list[MetricSet]
    weights: list[dict[str, torch.Tensor]]
    """After each step."""
    live: dict[str, str]
    """Fingerprints as the ranks held them when the state was saved."""


def train(backend: Backend, cfg: RunConfig, *, data_rank: int = 0, data_size: int = 1) -> tuple[list[Any], list[Any]]:
    metrics, weights = [], []
    for step in range(NUM_STEPS):
        shards = make_updates(make_samples(MIXED_LENGTHS, seed=step), cfg, dp=data_size)
        metrics.append(backend.train(step, shards[data_rank]))
        weights.append(all_weights(backend, 4000))
    return metrics, weights


def layout_config(path: Path, layout: str, setting: str) -> RunConfig:
    sizes = dict(LAYOUTS[layout])
    context = sizes.pop("context_parallel_size", 1)
    return megatron_config(path, sizes, context_parallel_size=context, **SETTINGS[setting])


def run_case(case: tuple[str, str, str], rank: int, port: int, root: Path, paths: dict[str, Path]) -> Outcome:
    layout, model, setting = case
    cfg = layout_config(paths[model], layout, setting)
    backend = MegatronBackend()
    backend.init(cfg, rank_of(cfg, rank, NUM_RANKS, port), resume_from=None)
    before = all_weights(backend, 3000)
    data_size = NUM_RANKS // (cfg.megatron.model_ranks * cfg.train.context_parallel_size)
    metrics, weights = train(backend, cfg, data_rank=rank % data_size, data_size=data_size)
    folder = root / "-".join(case)
    backend.save(1, folder / "state", hf_directory=folder / "hf")
    live = merged(all_gather_objects(backend.fingerprint()))
    backend.sleep()
    asleep = all_weights(backend, 4000)
    assert all(torch.equal(asleep[name], value) for name, value in weights[-1].items())
    backend.wake_up()
    return Outcome(before=before, metrics=metrics, weights=weights, live=live)


def rank_main(rank: int, port: int, root: Path, paths: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    outcomes: dict[tuple[str, str, str], Outcome] = {}
    for number, case in enumerate(CASES):
        if number > 0 and case[0] != CASES[number - 1][0]:
            barrier()
            parallel_state.destroy_model_parallel()
        outcomes[case] = run_case(case, rank, port, root, paths)
    barrier()
    if rank == 0:
        torch.save(outcomes, root / "outcomes.pt")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def outcomes(root: Path, paths: dict[str, Path]) -> dict[tuple[str, str, str], Outcome]:
    mp.spawn(rank_main, args=(free_port(), root, paths), nprocs=NUM_RANKS)
    return torch.load(root / "outcomes.pt", weights_only=False)


@pytest.fixture(scope="module")
def wanted(paths: dict[str, Path]) -> dict[tuple[str, str], tuple[list[MetricSet], list[dict[str, torch.Tensor]]]]:
    """(model, setting) -> the FSDP backend's metrics and weights, on one rank."""
    found = {}
    for model, setting in sorted({case[1:] for case in DENSE}):
        cfg = megatron_config(paths[model], {}, **SETTINGS[setting])
        found[model, setting] = train(start_backend(cfg), cfg)
    return found


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_weights_pass_through_bit_for_bit(case, outcomes, paths):
    stored = hf_tensors(paths[case[1]])
    sent = outcomes[case].before
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], value) for name, value in stored.items())


def assert_within_adam_noise(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Adam's first steps are as large for a gradient of rounding errors as for any other: of such elements there are
    few, and they are off by no more than the learning rate of 1e-2 a step.
    """
    gap = (found - wanted).abs()
    assert gap.max() < 4e-2, name
    assert (gap > 4e-4).sum() <= 1 + 0.005 * gap.numel(), name


@pytest.mark.parametrize("case", DENSE, ids="-".join)
def test_two_ranks_train_as_fsdp_does(case, outcomes, wanted):
    metrics, weights = wanted[case[1:]]
    for step in range(NUM_STEPS):
        found = outcomes[case].metrics[step]
        assert found.keys() == metrics[step].keys() | {"memory/train_peak_gib"}
        for name in [key for key in metrics[step] if key.startswith("train/")]:
            # the second step starts from weights with Adam's noise in them
            assert found[name] == pytest.approx(metrics[step][name], rel=(1e-4, 5e-3)[step], abs=1e-4), name
        for name, value in weights[step].items():
            assert_within_adam_noise(outcomes[case].weights[step][name], value, name)


@pytest.mark.parametrize("case", [case for case in CASES if case not in DENSE], ids="-".join)
def test_experts_train_as_a_plain_model_does(case, outcomes, paths):
    cfg = megatron_config(paths[case[1]], {}, **SETTINGS["experts"])
    naive = naive_step(paths[case[1]], cfg, make_samples(MIXED_LENGTHS, seed=0), padded=False)
    first = outcomes[case].metrics[0]
    assert first["train/loss"] == pytest.approx(naive.loss, rel=1e-4, abs=1e-4)
    assert first["train/grad_norm"] == pytest.approx(naive.grad_norm, rel=1e-4)
    wanted = unfused(naive.weights)
    weights = outcomes[case].weights[0]
    assert wanted.keys() <= weights.keys()
    for name, value in wanted.items():
        assert_within_adam_noise(weights[name], value, name)


def unfused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each expert's matrices by their names in a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        prefix, is_fused, part = name.partition(".experts.")
        if not is_fused:
            found[name] = value
            continue
        for expert, matrix in enumerate(value):
            halves = (
                {"gate": matrix.chunk(2)[0], "up": matrix.chunk(2)[1]} if part == "gate_up_proj" else {"down": matrix}
            )
            found |= {f"{prefix}.experts.{expert}.{kind}_proj.weight": half for kind, half in halves.items()}
    return found


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_what_is_saved_is_what_the_ranks_hold(case, outcomes, root):
    assert file_fingerprints(root / "-".join(case) / "state") == outcomes[case].live


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_export_holds_the_trained_weights(case, outcomes, root):
    exported = hf_tensors(root / "-".join(case) / "hf")
    assert exported.keys() == outcomes[case].weights[-1].keys()
    assert all(torch.equal(exported[name], value) for name, value in outcomes[case].weights[-1].items())


@pytest.mark.parametrize("case", [case for case in CASES if case[2] == "grpo"], ids="-".join)
@pytest.mark.parametrize("by", ["fsdp", "megatron"])
def test_any_backend_on_one_rank_continues(case, by, outcomes, root, paths):
    cfg = megatron_config(paths[case[1]], {}, **SETTINGS["grpo"])
    state = root / "-".join(case) / "state"
    if by == "fsdp":
        backend = start_backend(cfg, resume_from=state)
    else:
        parallel_state.destroy_model_parallel()
        backend = MegatronBackend()
        backend.init(cfg, rank_of(cfg, 0, 1, 0), resume_from=state)
    assert merged([backend.fingerprint()]) == outcomes[case].live
    weights = all_weights(backend)
    assert all(torch.equal(weights[name], value) for name, value in outcomes[case].weights[-1].items())
