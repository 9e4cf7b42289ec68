"""`--optimizer-cpu-offload`: the same weights after the same steps, with masters, moments and gradients of a step in
host memory; and a checkpoint of tools/convert_hf_to_torch_dist.py as a start."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (pip install rlkit[megatron])")

import torch
from fsdp_setup import (
    MIXED_LENGTHS,
    all_weights,
    free_port,
    make_samples,
    make_updates,
    parts_of,
    save_checkpoint_dir,
    spread_out,
)
from megatron_setup import MODELS, megatron_config, rank_of

from rlkit.backends.megatron.backend import MegatronBackend
from rlkit.config.schema import RunConfig

sys.path.append(str(Path(__file__).parents[2] / "tools"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint_dir(spread_out(MODELS["deepseek"]()), tmp_path_factory.mktemp("deepseek"))


def started(cfg: RunConfig, resume_from: Path | None = None) -> MegatronBackend:
    backend = MegatronBackend()
    backend.init(cfg, rank_of(cfg, 0, 1, free_port()), resume_from=resume_from)
    return backend


def trained(backend: MegatronBackend, cfg: RunConfig, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        backend.train(step, make_updates(make_samples(MIXED_LENGTHS, seed=step), cfg)[0])
    return all_weights(backend, 4000)


def test_steps_on_the_host_are_the_same(folder, tmp_path):
    plain = megatron_config(folder, {}, num_steps_per_rollout=2)
    offloaded = replace(plain, megatron=replace(plain.megatron, optimizer_cpu_offload=True))
    expected = trained(started(plain), plain, range(3))
    backend = started(offloaded)
    before = all_weights(backend, 4000)
    trained(backend, offloaded, range(2))
    optimizer = parts_of(backend).optimizer
    masters = {segment.main.untyped_storage().data_ptr() for segment in optimizer.segments}
    weights = {p.untyped_storage().data_ptr() for _, p in parts_of(backend).policy.named_parameters()}
    assert not masters & weights, "masters share memory with the parameters"
    assert not list(optimizer.main_tensors()), "nothing of the optimizer has to sleep"
    backend.save(1, tmp_path / "state", hf_directory=None)
    found = trained(backend, offloaded, range(2, 3))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(before[name], tensor) for name, tensor in expected.items())
    # either kind continues from what the other saved
    continued = started(plain, resume_from=tmp_path / "state")
    again = trained(continued, plain, range(2, 3))
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_a_converted_checkpoint_gives_the_weights_of_its_source(folder, tmp_path):
    import convert_hf_to_torch_dist

    convert_hf_to_torch_dist.convert(folder, tmp_path / "ckpt")
    cfg = megatron_config(folder, {}, no_load_optim=True)
    expected = all_weights(started(cfg), 4000)
    found = all_weights(started(cfg, resume_from=tmp_path / "ckpt" / "iter_0000000" / "trainer"), 4000)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
