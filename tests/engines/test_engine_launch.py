import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.config.schema import ClusterConfig, EngineConfig, ModelConfig, RunConfig
from rlkit.engines.base import EngineSlot, build_launch
from rlkit.engines.embedded.server import parse_args
from rlkit.engines.sglang import launch as sglang_launch_module
from rlkit.types.errors import ConfigError

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
CPU_SLOT = replace(SLOT, device="cpu")


@pytest.fixture
def fast_kernels(monkeypatch: pytest.MonkeyPatch):
    """As if all of SGLang's kernels were installed here."""
    monkeypatch.setattr(sglang_launch_module, "has_fast_kernels", lambda python: True)


def make_config(*, kind: str = "auto", colocate: bool = False, dtype: str = "auto", **sglang) -> RunConfig:
    return RunConfig(
        model=ModelConfig(hf_checkpoint="/models/m", dtype=dtype),  # pyright: ignore[reportArgumentType]
        cluster=ClusterConfig(colocate=colocate),
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
    }
    assert spec.env["PYTORCH_CUDA_ALLOC_CONF"] is None and spec.env["PYTORCH_ALLOC_CONF"] is None
    assert spec.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert "NCCL_NVLS_ENABLE" not in spec.env  # whatever is set stays


def test_the_memory_saver_is_for_sharing_gpus_only(fast_kernels):
    assert "--enable-memory-saver" not in build_launch(make_config(kind="sglang"), SLOT).argv


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
