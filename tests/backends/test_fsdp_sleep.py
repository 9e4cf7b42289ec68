from pathlib import Path

import pytest
import torch
from fsdp_setup import (
    all_weights,
    make_config,
    make_samples,
    make_updates,
    parts_of,
    rank_info,
    start_backend,
    train_step,
)

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.model import local_shard, named_shards
from rlkit.backends.sleep import HostSwap
from rlkit.types.errors import TrainError


def test_tensors_come_back_bit_for_bit_under_every_view():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(10, 3, generator=generator)
    view, other = base[4:], torch.randn(7, generator=generator).to(torch.bfloat16)
    scalar, empty = torch.tensor(3.5), torch.zeros(0, 5)
    tensors = [base, view, other, scalar, empty]
    expected = [tensor.clone() for tensor in tensors]
    swap = HostSwap(torch.device("cpu"))
    assert swap.offload(tensors).num_bytes == 10 * 3 * 4 + 7 * 2 + 4
    assert swap.is_away
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(swap.host_view(tensor), value)
    swap.restore()
    assert not swap.is_away
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, value)
    view.fill_(1.0)
    assert base[4:].eq(1.0).all(), "a view must still share memory with its base"


@pytest.mark.parametrize("is_reserved", [False, True])
def test_the_host_buffer_is_reused(is_reserved: bool):
    tensors = [torch.arange(40.0), torch.arange(200.0), torch.arange(10.0)]
    swap = HostSwap(torch.device("cpu"))
    if is_reserved:
        swap.reserve(2000)
    addresses = []
    for _ in range(3):
        assert swap.offload(tensors).num_bytes == 1000
        addresses.append(swap._buffer.bytes(1000).data_ptr())
        assert swap.restore().num_bytes == 1000
    assert addresses[0] == addresses[1] == addresses[2]
    assert torch.equal(tensors[1], torch.arange(200.0))


def test_a_held_copy_shows_the_values_of_its_moment():
    tensor = torch.arange(6.0).reshape(2, 3)
    swap = HostSwap(torch.device("cpu"))
    swap.hold([tensor])
    tensor.mul_(2.0)
    assert torch.equal(swap.host_view(tensor), torch.arange(6.0).reshape(2, 3))
    swap.release()
    assert swap.host_view(tensor) is tensor
    swap.offload([tensor])
    swap.restore()
    assert torch.equal(tensor, 2.0 * torch.arange(6.0).reshape(2, 3))


def test_swapping_a_real_model_and_optimizer_is_neutral(checkpoints: dict[str, Path]):
    """The machinery of CUDA sleep, on CPU tensors: train, swap out, read weights, swap in, train."""
    cfg = make_config(checkpoints["qwen3"])
    results = []
    for swaps in (False, True):
        backend = start_backend(cfg)
        train_step(backend, cfg, 0)
        if swaps:
            parts = parts_of(backend)
            before = all_weights(backend)
            parts.swap.offload(
                [*(local_shard(shard) for _, shard in named_shards(parts.policy)), *parts.optimizer.state_tensors()]
            )
            assert all(local_shard(shard).untyped_storage().nbytes() == 0 for _, shard in named_shards(parts.policy))
            away = all_weights(backend, max_bytes=5000)
            assert away.keys() == before.keys()
            assert all(torch.equal(away[name], before[name]) for name in before)
            parts.swap.restore()
        metrics = train_step(backend, cfg, 1)
        results.append((metrics["train/loss"], metrics["train/grad_norm"], all_weights(backend)))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(tensor, results[1][2][name]) for name, tensor in results[0][2].items())


def test_sleep_and_wake_up_are_neutral(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"])
    results = []
    for sleeps in (False, True):
        backend = start_backend(cfg)
        train_step(backend, cfg, 0)
        if sleeps:
            backend.sleep()
            backend.wake_up()
        train_step(backend, cfg, 1)
        results.append(all_weights(backend))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_states_are_enforced(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = make_config(checkpoints["qwen3"])
    updates = make_updates(make_samples([(2, 3)] * 8), cfg)[0]
    new = FsdpBackend()
    for call in (lambda: new.train(0, updates), new.sleep, new.wake_up, lambda: new.weights):
        with pytest.raises(TrainError, match="the backend is new"):
            call()
    backend = start_backend(cfg)
    with pytest.raises(TrainError, match="cannot wake up: the backend is awake"):
        backend.wake_up()
    with pytest.raises(TrainError, match="init called on a backend that is awake"):
        backend.init(cfg, rank_info(), resume_from=None)
    backend.sleep()
    assert all_weights(backend)
    for call in (
        lambda: backend.train(0, updates),
        lambda: backend.save(0, tmp_path, hf_directory=None),
        backend.sleep,
    ):
        with pytest.raises(TrainError, match="the backend is asleep, it must be awake"):
            call()
    backend.wake_up()
    backend.train(0, updates)
