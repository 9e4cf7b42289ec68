"""The command that starts stock SGLang, with everything that rlkit relies on set. Called by `engines/base.py`.

SGLang runs in a process of its own and is imported nowhere in rlkit. `RLKIT_SGLANG_PYTHON` names the Python that runs
it when it lives in another environment; unset, it is the Python that runs rlkit.
"""

import os
import subprocess
import sys

from rlkit.config.schema import RunConfig
from rlkit.config.sglang_flags import to_command_line
from rlkit.engines.access import module_command
from rlkit.engines.base import EngineSlot, LaunchSpec, engine_dtype
from rlkit.engines.sglang.memory import colocated_fraction, device_memory_bytes
from rlkit.types.errors import ConfigError

PYTHON_VARIABLE = "RLKIT_SGLANG_PYTHON"

GRAPH_FLAGS = frozenset(
    {"cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "cuda_graph_config", "disable_decode_cuda_graph"}
    | {"disable_cuda_graph", "cuda_graph_max_bs", "cuda_graph_bs"}
)
"""Flags of SGLang by which the user decides about captured batch sizes."""

CPU_MAX_TOTAL_TOKENS = 16384
"""Cache tokens on a CPU, where SGLang cannot measure what is free."""

# Looks for the kernels without importing them: FlashAttention-3 is left out of small builds of sglang-kernel.
KERNEL_PROBE = """
import importlib.util, pathlib
kernels = importlib.util.find_spec("sgl_kernel")
folders = [pathlib.Path(p) for p in kernels.submodule_search_locations] if kernels else []
has_attention = any(next(folder.glob("flash_ops*"), None) for folder in folders)
print(has_attention and importlib.util.find_spec("flashinfer") is not None)
"""
PROBE_TIMEOUT_S = 60.0


def sglang_launch(cfg: RunConfig, slot: EngineSlot) -> LaunchSpec:
    """One server. What the user passed by `--sglang-*` comes last; it cannot name what rlkit sets itself."""
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    passed = cfg.engine.sglang
    is_cuda = slot.device == "cuda"
    options: dict[str, object] = {
        "model-path": cfg.model.hf_checkpoint,
        "host": slot.host,
        "port": slot.port,
        "dtype": engine_dtype(cfg, slot),
        "weight-version": slot.weight_version,
        "random-seed": slot.seed,
        "tp-size": _tensor_parallel_size(cfg, slot),
        "log-level": "warning",
    }
    switches = ["skip-server-warmup"]  # its made-up requests would run on weights that no trainer has sent yet
    if cfg.cluster.colocate and is_cuda:  # there is nothing to save on a CPU: sleep then only empties the cache
        switches.append("enable-memory-saver")
    if cfg.sync.pause_generation_mode == "retract":
        switches.append("disable-radix-cache")  # prefixes computed by old weights would survive an update
    if cfg.model.trust_remote_code:
        switches.append("trust-remote-code")
    if slot.num_nodes > 1:
        assert slot.dist_init_addr is not None, "processes of one engine need a place to meet"
        options |= {"nnodes": slot.num_nodes, "node-rank": slot.node_rank, "dist-init-addr": slot.dist_init_addr}
    if is_cuda:
        options |= _cuda_options(cfg, slot, python)
    else:
        options |= {"device": "cpu", "attention-backend": "torch_native", "max-total-tokens": CPU_MAX_TOTAL_TOKENS}
        options |= {"mem-fraction-static": 0.2}
        switches.append("disable-overlap-schedule")
    argv = module_command("sglang.launch_server", python=python)
    for name, value in options.items():
        if name.replace("-", "_") not in passed:
            argv += [f"--{name}", str(value)]
    argv += [f"--{name}" for name in switches if name.replace("-", "_") not in passed]
    return LaunchSpec(argv=argv + to_command_line(passed), env=_environment(slot))


def _cuda_options(cfg: RunConfig, slot: EngineSlot, python: str) -> dict[str, object]:
    passed = cfg.engine.sglang
    options: dict[str, object] = {"base-gpu-id": slot.base_gpu_id}
    if {"attention_backend", "sampling_backend"}.isdisjoint(passed) and not has_fast_kernels(python):
        options |= {"attention-backend": "triton", "sampling-backend": "pytorch"}
    if GRAPH_FLAGS.isdisjoint(passed):
        options["cuda-graph-max-bs-decode"] = largest_batch(cfg)
    if slot.max_total_tokens is not None:
        options["max-total-tokens"] = slot.max_total_tokens
    if cfg.cluster.colocate and "mem_fraction_static" not in passed:
        total_bytes = device_memory_bytes(slot.base_gpu_id)
        options["mem-fraction-static"] = colocated_fraction(
            total_bytes, bucket_bytes=cfg.sync.update_weight_buffer_size
        )
    return options


def largest_batch(cfg: RunConfig) -> int:
    """Most sequences that one engine decodes at a time: a larger batch than was captured runs without CUDA graphs, and
    each captured size costs time and memory at the start.

    A rollout never has more in flight than its samples (with over-sampling: than it begins with), dealt out
    round-robin; evaluation goes up to `--sglang-server-concurrency`.
    """
    concurrency = cfg.engine.sglang_server_concurrency
    if cfg.evaluation.eval_interval is not None:
        return concurrency
    num_samples = cfg.over_sampling_batch_size * cfg.rollout.n_samples_per_prompt
    share = -(-num_samples // max(1, cfg.cluster.num_engines))
    return max(1, min(concurrency, share))


def _environment(slot: EngineSlot) -> dict[str, str | None]:
    env: dict[str, str | None] = {
        # Either form of expandable_segments switches SGLang's memory saver off, with no more than a warning.
        "PYTORCH_CUDA_ALLOC_CONF": None,
        "PYTORCH_ALLOC_CONF": None,
        # Health checks would run a forward, also on a sleeping engine.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if os.environ.get(PYTHON_VARIABLE):
        env["PYTHONPATH"] = None  # packages of this environment do not belong into the other one
    if slot.device == "cpu":
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(slot.num_threads)}
    return env


def _tensor_parallel_size(cfg: RunConfig, slot: EngineSlot) -> int:
    """GPUs of the engine over its pipeline stages. ConfigError when that is not a whole number."""
    num_stages = cfg.engine.sglang.get("pp_size", 1)
    if slot.num_gpus % num_stages:
        raise ConfigError(
            f"--rollout-num-gpus-per-engine {slot.num_gpus} does not divide by --sglang-pp-size {num_stages}; "
            f"use a multiple of {num_stages}"
        )
    return slot.num_gpus // num_stages


def has_fast_kernels(python: str) -> bool:
    """Whether the environment of `python` has SGLang's FlashAttention-3 kernels and flashinfer."""
    found = subprocess.run(
        [python, "-c", KERNEL_PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    return found.stdout.strip() == "True"
