import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.config.schema import (
    ClusterConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
)
from rlkit.engines.base import EngineSlot, build_launch
from rlkit.engines.embedded.server import parse_args
from rlkit.engines.sglang import launch as sglang_launch_module
from rlkit.engines.sglang.launch import largest_batch
from rlkit.engines.sglang.memory import colocated_fraction, device_memory_bytes
from rlkit.types.errors import ConfigError, EngineError

SLOT = EngineSlot(
    index=1,
    host="10.0.0.5",
    port=4000,
    num_gpus=1,
    base_gpu_id=3,
    device="cuda",
    num_threads=4,
    weight_version=12,
    seed=99,
)
H200_BYTES = 150_754_820_096
CPU_SLOT = replace(SLOT, device="cpu")


@pytest.fixture
def fast_kernels(monkeypatch: pytest.MonkeyPatch):
    """As if all of SGLang's kernels were installed here."""
    monkeypatch.setattr(sglang_launch_module, "has_fast_kernels", lambda python: True)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch):
    """As if every GPU were an H200."""
    monkeypatch.setattr(sglang_launch_module, "device_memory_bytes", lambda gpu: H200_BYTES)


def make_config(*, kind: str = "auto", colocate: bool = False, dtype: str = "auto", **sglang) -> RunConfig:
    return RunConfig(
        model=ModelConfig(hf_checkpoint="/models/m", dtype=dtype),  # pyright: ignore[reportArgumentType]
        cluster=ClusterConfig(colocate=colocate),
        rollout=RolloutConfig(rollout_batch_size=32, n_samples_per_prompt=8),
        engine=EngineConfig(rollout_engine=kind, sglang=sglang),  # pyright: ignore[reportArgumentType]
    )


def options(argv: list[str]) -> dict[str, str | None]:
    """Flags of a command line: `--a b`, `--a=b` and bare ones."""
    found: dict[str, str | None] = {}
    for word, following in zip(argv, [*argv[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            assert name not in found, f"{name} twice"
            found[name] = value if equals else None if following.startswith("--") else following
    return found


def test_auto_is_sglang_on_cuda_and_embedded_on_a_cpu(fast_kernels):
    assert "sglang.launch_server" in build_launch(make_config(), SLOT).argv
    assert "rlkit.engines.embedded.server" in build_launch(make_config(), CPU_SLOT).argv


def test_sglang_gets_everything_that_rlkit_relies_on(fast_kernels):
    spec = build_launch(make_config(kind="sglang", colocate=True), replace(SLOT, num_gpus=4))
    assert options(spec.argv[2:]) == {
        "--model-path": "/models/m",
        "--host": "10.0.0.5",
        "--port": "4000",
        "--dtype": "bfloat16",
        "--weight-version": "12",
        "--random-seed": "99",
        "--tp-size": "4",
        "--base-gpu-id": "3",
        "--log-level": "warning",
        "--skip-server-warmup": None,
        "--enable-memory-saver": None,
        "--cuda-graph-max-bs-decode": "32",  # 256 samples over eight engines
        "--mem-fraction-static": "0.87",
    }
    assert spec.env["PYTORCH_CUDA_ALLOC_CONF"] is None and spec.env["PYTORCH_ALLOC_CONF"] is None
    assert spec.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert "NCCL_NVLS_ENABLE" not in spec.env  # whatever is set stays


def test_the_memory_saver_is_for_sharing_gpus_only(fast_kernels):
    assert "--enable-memory-saver" not in build_launch(make_config(kind="sglang"), SLOT).argv


def test_a_split_engine_takes_what_sglang_thinks_right(fast_kernels):
    assert "--mem-fraction-static" not in build_launch(make_config(kind="sglang"), SLOT).argv


@pytest.mark.parametrize("gib, fraction", [(140, 0.87), (80, 0.85), (40, 0.8), (24, 0.73), (6, 0.3)])
def test_shared_memory_leaves_room_for_a_sleeping_trainer_and_two_buckets(gib, fraction):
    found = colocated_fraction(gib * 1024**3, bucket_bytes=512 * 1024**2)
    assert found == pytest.approx(fraction)
    assert gib < 24 or gib * (1 - found) >= 0.1 * gib + 2 + 1 + 1 - 1e-6


def test_the_driver_is_asked_for_the_memory(monkeypatch: pytest.MonkeyPatch):
    def no_driver(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    with pytest.raises(EngineError, match=r"GPU 3 \(libcuda.so.1: .*pass --sglang-mem-fraction-static"):
        device_memory_bytes(3)


@pytest.mark.parametrize(
    "changes, largest",
    [
        ({}, 256),
        ({"engine": EngineConfig(sglang_server_concurrency=64)}, 64),
        ({"cluster": ClusterConfig(rollout_num_gpus=3)}, 86),
        ({"evaluation": EvalConfig(eval_interval=5)}, 512),
    ],
    ids=["all samples on one engine", "concurrency is lower", "dealt out over three", "evaluation"],
)
def test_graphs_are_captured_for_what_can_run_at_a_time(changes, largest):
    assert largest_batch(replace(make_config(), **changes)) == largest


def test_the_user_decides_about_graphs(fast_kernels):
    found = options(build_launch(make_config(kind="sglang", cuda_graph_max_bs_decode=32), SLOT).argv[2:])
    assert found["--cuda-graph-max-bs-decode"] == "32"
    assert "--cuda-graph-max-bs-decode" not in build_launch(make_config(disable_cuda_graph=True), SLOT).argv


def test_a_restarted_engine_gets_the_cache_of_its_first_start(fast_kernels):
    found = options(build_launch(make_config(colocate=True), replace(SLOT, max_total_tokens=81920)).argv[2:])
    assert found["--max-total-tokens"] == "81920"


def test_requests_that_survive_an_update_must_not_find_old_prefixes(fast_kernels):
    cfg = replace(make_config(), sync=SyncConfig(pause_generation_mode="retract"))
    assert "--disable-radix-cache" in build_launch(cfg, SLOT).argv
    assert "--disable-radix-cache" not in build_launch(make_config(), SLOT).argv


def test_an_engine_over_two_nodes_meets_on_the_first(fast_kernels):
    slot = replace(SLOT, num_gpus=16, num_nodes=2, node_rank=1, dist_init_addr="10.0.0.4:5000")
    found = options(build_launch(make_config(), slot).argv[2:])
    assert {name: found[f"--{name}"] for name in ("tp-size", "nnodes", "node-rank", "dist-init-addr")} == {
        "tp-size": "16",
        "nnodes": "2",
        "node-rank": "1",
        "dist-init-addr": "10.0.0.4:5000",
    }
    assert "--nnodes" not in build_launch(make_config(), SLOT).argv


def test_what_the_user_passes_replaces_a_default(fast_kernels):
    spec = build_launch(make_config(kind="sglang", log_level="info", page_size=16, mem_fraction_static=0.5), SLOT)
    found = options(spec.argv[2:])
    assert (found["--log-level"], found["--page-size"], found["--mem-fraction-static"]) == ("info", "16", "0.5")


def test_slow_but_present_kernels_where_the_fast_ones_are_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sglang_launch_module, "has_fast_kernels", lambda python: False)
    found = options(build_launch(make_config(kind="sglang"), SLOT).argv[2:])
    assert (found["--attention-backend"], found["--sampling-backend"]) == ("triton", "pytorch")
    chosen = options(build_launch(make_config(kind="sglang", attention_backend="flashinfer"), SLOT).argv[2:])
    assert chosen["--attention-backend"] == "flashinfer" and "--sampling-backend" not in chosen


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_kernel_probe_looks_into_the_environment_of_that_python(tmp_path: Path, is_complete: bool):
    for name in ("sgl_kernel", "flashinfer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the probe must not import')")
    if is_complete:
        (tmp_path / "sgl_kernel" / "flash_ops.abi3.so").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert sglang_launch_module.has_fast_kernels(str(python)) is is_complete


def test_pipeline_stages_share_the_gpus_of_an_engine(fast_kernels):
    slot = replace(SLOT, num_gpus=4)
    assert options(build_launch(make_config(kind="sglang", pp_size=2), slot).argv[2:])["--tp-size"] == "2"
    with pytest.raises(ConfigError, match=r"4 does not divide by --sglang-pp-size 3"):
        build_launch(make_config(kind="sglang", pp_size=3), slot)


def test_another_python_may_run_sglang(monkeypatch: pytest.MonkeyPatch, fast_kernels):
    monkeypatch.setenv("RLKIT_SGLANG_PYTHON", "/venvs/sglang/bin/python")
    spec = build_launch(make_config(kind="sglang"), SLOT)
    assert spec.argv[0] == "/venvs/sglang/bin/python"
    assert spec.env["PYTHONPATH"] is None


def test_sglang_on_a_cpu():
    spec = build_launch(make_config(kind="sglang"), CPU_SLOT)
    found = options(spec.argv[2:])
    assert (found["--device"], found["--attention-backend"], found["--dtype"]) == ("cpu", "torch_native", "float32")
    assert "--base-gpu-id" not in found
    assert spec.env["SGLANG_USE_CPU_ENGINE"] == "1" and spec.env["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("slot", [SLOT, CPU_SLOT], ids=["cuda", "cpu"])
def test_the_embedded_server_understands_its_command(slot: EngineSlot):
    spec = build_launch(make_config(kind="embedded"), slot)
    args = parse_args(spec.argv[3:])
    assert (args.model_path, args.host, args.port) == ("/models/m", "10.0.0.5", 4000)
    assert (args.weight_version, args.seed, args.num_threads, args.max_running_requests) == ("12", 99, 4, 64)
    expected = ("cpu", "float32") if slot.device == "cpu" else ("cuda:3", "bfloat16")
    assert (args.device, args.dtype) == expected


def test_the_embedded_engine_has_one_rank():
    with pytest.raises(ConfigError, match="--rollout-num-gpus-per-engine is 2"):
        build_launch(make_config(kind="embedded"), replace(SLOT, num_gpus=2))


def test_the_server_says_what_is_wrong_with_its_flags(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_args(["--model-path", "x", "--max-running-requests", "0"])
    assert "must be at least 1" in capsys.readouterr().err


def test_the_install_script_pins_the_version_of_the_flag_table():
    from rlkit.config.sglang_flags import sglang_table

    script = Path(__file__).parents[2] / "scripts" / "install_sglang_cpu.sh"
    assert f"version={sglang_table().version}\n" in script.read_text()
    assert os.access(script, os.R_OK)
