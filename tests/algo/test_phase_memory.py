"""Estimates of every phase: against peaks that were measured on one H200, and against what must follow."""

from collections.abc import Callable
from typing import Any

import pytest

from rlkit.algo.memory_plan import GIB, ModelShape, model_shape
from rlkit.algo.phase_memory import Hardware, MemoryPlan, adapter_params, plan_memory
from rlkit.config.load import load_config

QWEN3_06B = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
H200 = Hardware(device="cuda", gpu_bytes=int(140.4 * GIB), host_bytes=128 * GIB, static_share=0.7)
SHARED = "GPU of trainer and engine"


def shape(vocab: int) -> ModelShape:
    hidden, layers, queries, keys, wide = 1024, 28, 2048, 1024, 3072
    block = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * wide + 2 * hidden + 256
    found = model_shape({**QWEN3_06B, "vocab_size": vocab}, vocab * hidden + layers * block + hidden)
    assert found is not None
    return found


def plan(*argv: str, vocab: int = 49_152, hardware: Hardware = H200, **options: Any) -> MemoryPlan:
    words = "--hf-checkpoint m --prompt-data p --label-key label --rm-type math --num-rollout 1"
    sizes = "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024"
    one = "--actor-num-gpus-per-node 1 --num-gpus-per-node 1 --max-tokens-per-gpu 16384"
    cfg = load_config([*words.split(), *sizes.split(), *one.split(), *argv]).config
    return plan_memory(cfg, shape(vocab), hardware, **options)


def peak(found: MemoryPlan, place: str, phase: str) -> float:
    return next(peak.num_bytes for peak in found.places[place] if peak.phase == phase) / GIB


@pytest.mark.parametrize(
    ("vocab", "trainer_gib", "generating_gib", "training_gib"),
    [(49_152, 29.4, 100.7, 35.2), (151_936, 31.4, 101.2, 36.7)],
)
def test_colocated_step_as_measured_on_one_h200(
    vocab: int, trainer_gib: float, generating_gib: float, training_gib: float
):
    """docs/performance.md, 2026-12-01: of the trainer's allocator, and of the whole GPU generating and training. Packs
    of 14 samples of 92 + 1,024 tokens.
    """
    found = plan("--colocate", vocab=vocab, num_tokens=14 * 1116)
    assert found.num_checkpointed == 0
    assert found.trainer_bytes / GIB == pytest.approx(trainer_gib, rel=0.1)
    assert peak(found, SHARED, "generate") == pytest.approx(generating_gib, rel=0.1)
    assert peak(found, SHARED, "train") == pytest.approx(training_gib, rel=0.1)


@pytest.mark.parametrize(
    ("flag", "measured_gib"), [("--no-gradient-checkpointing", 28.4), ("--gradient-checkpointing", 10.8)]
)
def test_trainer_alone_as_measured_on_one_h200(flag: str, measured_gib: float):
    assert plan("--colocate", flag, num_tokens=14 * 1116).trainer_bytes / GIB == pytest.approx(measured_gib, rel=0.1)


def test_phases_of_every_place():
    shared = plan("--colocate")
    assert list(shared.places) == [SHARED, "host"]
    assert [peak.phase for peak in shared.places[SHARED]] == ["generate", "log-prob", "train", "save", "sync"]
    split = plan("--rollout-num-gpus", "1", "--num-gpus-per-node", "2")
    assert list(split.places) == ["GPU of the trainer", "GPU of an engine", "host"]
    assert [peak.phase for peak in split.places["GPU of an engine"]] == ["generate", "sync"]
    assert "engine asleep" not in split.worst("GPU of the trainer").parts


def test_more_ranks_hold_less_each():
    def states(*argv: str) -> float:
        found = plan("--colocate", "--num-gpus-per-node", "8", *argv)
        return found.worst(SHARED).parts.get("weights and moments", 0) or next(
            peak.parts["weights and moments"] for peak in found.places[SHARED] if peak.phase == "train"
        )

    one, eight = states("--actor-num-gpus-per-node", "1"), states("--actor-num-gpus-per-node", "8")
    assert eight == pytest.approx(one / 8, rel=1e-6)
    halves = states("--actor-num-gpus-per-node", "8", "--fsdp-replicate-size", "4")
    assert halves == pytest.approx(one / 2, rel=1e-6)


BIGGER: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
    "longer packs": (
        lambda: peak(plan("--colocate"), SHARED, "train"),
        lambda: peak(plan("--colocate", "--max-tokens-per-gpu", "32768"), SHARED, "train"),
    ),
    "a sample longer than the pack": (
        lambda: peak(plan("--colocate"), SHARED, "train"),
        lambda: peak(plan("--colocate", "--rollout-max-context-len", "40000"), SHARED, "train"),
    ),
    "a reference model": (
        lambda: peak(plan("--colocate"), SHARED, "log-prob"),
        lambda: peak(plan("--colocate", frozen_params=600_000_000), SHARED, "log-prob"),
    ),
    "a critic": (
        lambda: peak(plan("--colocate"), SHARED, "train"),
        lambda: peak(plan("--colocate", "--advantage-estimator", "ppo"), SHARED, "train"),
    ),
    "a critic that rests on the host": (
        lambda: peak(plan("--colocate"), "host", "generate"),
        lambda: peak(plan("--colocate", "--advantage-estimator", "ppo"), "host", "generate"),
    ),
    "larger buckets": (
        lambda: peak(plan("--colocate", "--update-weight-buffer-size", "67108864"), SHARED, "sync"),
        lambda: peak(plan("--colocate"), SHARED, "sync"),
    ),
    "an asynchronous save, on the host": (
        lambda: peak(plan("--colocate"), "host", "save"),
        lambda: peak(plan("--colocate", "--async-save"), "host", "save"),
    ),
    "all weights instead of adapters": (
        lambda: peak(plan("--colocate", "--lora-rank", "8"), SHARED, "train"),
        lambda: peak(plan("--colocate"), SHARED, "train"),
    ),
    "moments on the GPU": (
        lambda: peak(plan("--rollout-num-gpus", "1", "--fsdp-cpu-offload"), "GPU of the trainer", "save"),
        lambda: peak(plan("--rollout-num-gpus", "1"), "GPU of the trainer", "save"),
    ),
}


@pytest.mark.parametrize("name", BIGGER)
def test_what_takes_more_is_estimated_higher(name: str):
    less, more = BIGGER[name]
    assert less() < more()


def test_on_a_cpu_everything_is_host_memory():
    cpu = Hardware(device="cpu", gpu_bytes=None, host_bytes=24 * GIB, static_share=None)
    found = plan("--colocate", "--device", "cpu", hardware=cpu)
    assert list(found.places) == ["host"]
    assert peak(found, "host", "train") > peak(found, "host", "save")
    assert "activations" in found.worst("host").parts


def test_an_embedding_larger_than_a_bucket_is_a_bucket():
    small = ("--colocate", "--update-weight-buffer-size", "1048576")
    buckets = [next(p for p in plan(*small, vocab=v).places[SHARED] if p.phase == "sync") for v in (49_152, 151_936)]
    assert [peak.parts["buckets"] for peak in buckets] == [4 * 2 * vocab * 1024 for vocab in (49_152, 151_936)]


def test_adapters_of_a_block():
    """Rank 2 on q, k, v, o and the three matrices of the MLP, one block, counted by hand."""
    block = ModelShape(num_params=0, num_layers=1, hidden=8, queries=8, keys=4, intermediate=16, vocab=10)
    assert adapter_params(2, block) == 2 * ((8 + 8) * 2 + (8 + 4) * 2 + (8 + 16) * 3)
