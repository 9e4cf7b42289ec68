"""Provoked faults, each of which the doctor has to find and to answer with a remedy; and a healthy machine."""

import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli import doctor_machine, doctor_processes, main
from rlkit.cli.doctor import Outcome, Status, flag_outcome, read_flags
from rlkit.cli.doctor_engine import engine_contract
from rlkit.cli.doctor_machine import disk_space, file_limits, memory, network, shared_memory, versions
from rlkit.cli.doctor_model import chat_template, loaded_tokenizer, model_files, tokenizer
from rlkit.cli.doctor_processes import collectives, gpus
from rlkit.cli.machine import CudaDevice
from rlkit.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small complete checkpoint."""
    folder = tmp_path_factory.mktemp("doctor") / "tiny"
    tool = ROOT / "tools" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(tool), "--output", str(folder), "--untrained"], check=True, capture_output=True)
    return folder


@pytest.fixture
def model(healthy: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    loaded_tokenizer.cache_clear()
    return Path(shutil.copytree(healthy, tmp_path / "model"))


def config(*argv: str) -> RunConfig:
    cfg, problems = read_flags(argv)
    assert problems == []
    return cfg


def of(model: Path, *argv: str) -> RunConfig:
    return config("--hf-checkpoint", str(model), "--device", "cpu", *argv)


def found_fault(outcome: Outcome, said: str, remedy: str) -> None:
    assert outcome.status is Status.FAILED, outcome
    assert said in outcome.found, outcome.found
    assert remedy in outcome.remedy, outcome.remedy


# ---- the machine -------------------------------------------------------------------------------------------------


def test_fault_a_required_package_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch):
    real = doctor_machine.installed_version
    old = {"transformers": "4.40.0", "sglang-router": None}
    monkeypatch.setattr(doctor_machine, "installed_version", lambda name: old.get(name, real(name)))
    outcome = versions(config())
    found_fault(outcome, "transformers 4.40.0 is outside of ==5.12.1", "pip install")
    assert "sglang-router is not installed" in outcome.found


def test_versions_outside_of_the_tested_ones_are_a_warning(monkeypatch: pytest.MonkeyPatch):
    real = doctor_machine.installed_version
    monkeypatch.setattr(doctor_machine, "installed_version", lambda name: "2.12.1" if name == "torch" else real(name))
    outcome = versions(config())
    assert outcome.status is Status.WARNING and "torch 2.12.1 (tested: 2.11, 2.13)" in outcome.found


def test_fault_little_shared_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    found_fault(shared_memory(config()), "0.1 GiB free in /dev/shm", "--shm-size=16g")


def test_fault_no_port_can_be_reached(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    found_fault(network(config()), "no port of 127.0.0.1 can be bound and reached", "ip link set lo up")


def test_fault_the_host_does_not_know_itself(monkeypatch: pytest.MonkeyPatch):
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    found_fault(network(config()), "has no address", "/etc/hosts")


def test_a_proxy_that_catches_the_loopback_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    outcome = network(config())
    assert outcome.status is Status.WARNING and "no_proxy=127.0.0.1" in outcome.remedy


def test_fault_a_full_disk(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 << 30, 100 << 30, 10 << 20))
    found_fault(disk_space(of(model)), "0.0 GiB free", "make room")


def test_fault_too_few_open_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    found_fault(file_limits(config()), "256 open files", "ulimit -n")


def test_fault_a_model_that_the_machine_cannot_hold(model: Path):
    cfg = of(model, "--host-memory-gib", "1")
    found_fault(memory(cfg), "GiB of 1.0 on a host", "--dry-run")


def test_fault_torch_does_not_see_the_gpus(monkeypatch: pytest.MonkeyPatch):
    device = CudaDevice(index=0, name="H200", num_bytes=140 << 30)
    monkeypatch.setattr(doctor_processes, "cuda_devices", lambda: [device])
    monkeypatch.setattr(doctor_processes, "driver_version", lambda: "12.4")
    told = json.dumps({"seen": 0, "built": "13.0", "torch": "2.11"})
    monkeypatch.setattr(
        doctor_processes, "run_python", lambda program: subprocess.CompletedProcess([], 0, stdout=told, stderr="")
    )
    found_fault(gpus(config()), "driver (CUDA 12.4) shows 1 GPUs, torch 2.11 (CUDA 13.0) uses 0", "newer driver")


def test_fault_a_gpu_is_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_processes, "cuda_devices", list)
    found_fault(gpus(config("--device", "cuda")), "the driver shows no GPU", "--gpus all")


def test_fault_ranks_do_not_find_each_other(monkeypatch: pytest.MonkeyPatch):
    broken = doctor_processes.COLLECTIVE_PROBE.replace("dist.all_reduce(value)", "raise RuntimeError('no route')")
    monkeypatch.setattr(doctor_processes, "COLLECTIVE_PROBE", broken)
    found_fault(collectives(config("--device", "cpu")), "RuntimeError: no route", "GLOO_SOCKET_IFNAME")


# ---- the model ---------------------------------------------------------------------------------------------------


def cut_weights(model: Path) -> None:
    path = next(model.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1000)


def lose_a_shard(model: Path) -> None:
    index = {"weight_map": {"a": next(model.glob("*.safetensors")).name, "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def scribble(model: Path) -> None:
    next(model.glob("*.safetensors")).write_bytes(struct.pack("<Q", 10) + b"<!doctype>")


def bring_code(model: Path) -> None:
    change_config(model, auto_map={"AutoModelForCausalLM": "modeling_x.X"})


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def point_elsewhere(model: Path) -> None:
    next(model.glob("*.safetensors")).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n")


BROKEN_FILES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a download that was cut off": (cut_weights, "was cut off", "download these files again"),
    "a Git LFS pointer": (point_elsewhere, "is a Git LFS pointer", "download these files again"),
    "a shard that is missing": (
        lose_a_shard,
        "model-00002-of-00002.safetensors is named by",
        "download these files again",
    ),
    "an error page instead of weights": (scribble, "is no safetensors file", "download these files again"),
    "code that nobody asked for": (bring_code, "brings Python code of its own", "--trust-remote-code"),
    "no config.json": (lambda model: (model / "config.json").unlink(), "config.json", "download the checkpoint again"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_fault_in_the_models_files(model: Path, name: str):
    break_it, said, remedy = BROKEN_FILES[name]
    break_it(model)
    found_fault(model_files(of(model)), said, remedy)


def test_fault_a_tokenizer_that_cannot_be_read(model: Path):
    (model / "tokenizer.json").write_text("{")
    found_fault(tokenizer(of(model)), "no tokenizer could be loaded", "tokenizer.json")


def test_fault_a_tokenizer_of_another_model(model: Path):
    change_config(model, vocab_size=4)
    found_fault(tokenizer(of(model)), "the model has 4 rows", "belongs to the model")


def test_fault_no_chat_template_where_one_is_asked_for(model: Path):
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    found_fault(chat_template(of(model, "--apply-chat-template")), "there is none", "drop the flag")


def test_fault_a_chat_template_that_does_not_render(model: Path):
    (model / "chat_template.jinja").write_text("{{ raise_exception('only tools') }}")
    found_fault(chat_template(of(model)), "only tools", "chat_template.jinja")


# ---- flags and engine --------------------------------------------------------------------------------------------


def test_fault_a_misspelt_flag():
    argv = ["--rolout-batch-size", "8"]
    _, problems = read_flags(argv)
    found_fault(flag_outcome(argv, problems), "did you mean --rollout-batch-size", "--help")


def test_fault_a_run_that_does_not_fit_together(model: Path):
    argv = ["--hf-checkpoint", str(model), "--prompt-data", "nowhere.jsonl", "--rollout-batch-size", "8"]
    found_fault(flag_outcome(argv, []), "num_rollout and num_epoch are both unset", "remedy")


@pytest.mark.slow
def test_fault_an_engine_that_cannot_start(model: Path):
    change_config(model, model_type="no_such_architecture", architectures=["NoSuchModel"])
    found_fault(engine_contract(of(model)), "embedded: engine 0 ended with status", "the end of the engine's log")


def test_a_healthy_machine_is_green_in_under_a_minute(healthy: Path, capsys: pytest.CaptureFixture[str]):
    """Without Ray, whose start is a whole-loop test's business; everything else as a person calls it."""
    loaded_tokenizer.cache_clear()
    from rlkit.cli import doctor_checks

    kept = tuple(item for item in doctor_checks.CHECKS if item.name != "ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_checks, "CHECKS", kept)
        status = main.main(["doctor", "--hf-checkpoint", str(healthy), "--device", "cpu"])
    text = capsys.readouterr().out
    assert status == 0, text
    assert "FAILED" not in text
    assert "embedded: generates through the router, pauses, loads weights (v3 -> v4), resumes" in text
    assert text.count("\nok ") >= 8


@pytest.mark.loop
def test_ray_starts_here():
    outcome = doctor_processes.ray_starts(config())
    assert outcome.status is not Status.FAILED, outcome
