"""The same state and the same step for every layout of the ranks: checkpoints of two ranks on one and on four, whole or
in shards, hybrid sharding against plain, offload against none. Two and then four gloo processes answer all questions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from fsdp_setup import (
    MIXED_LENGTHS,
    all_weights,
    free_port,
    make_config,
    make_samples,
    make_updates,
    parts_of,
    rank_info,
    start_backend,
)

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.fingerprint import file_fingerprints
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import all_gather_objects, barrier
from rlkit.dist.groups import destroy_process_group
from rlkit.types.fingerprints import merged
from rlkit.types.ranks import MetricSet

SAVED = {"sharded": {}, "full": {"fsdp_full_params": True}, "in_place": {"fsdp_state_dict_cpu_offload": False}}
"""Ways of saving: folder name -> settings."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_copies": {"fsdp_replicate_size": 2},
    "four_copies": {"fsdp_replicate_size": 4},
    "two_copies_of_context": {"fsdp_replicate_size": 2, "context_parallel_size": 2},
    "offloaded": {"fsdp_cpu_offload": True},
    "offloaded_copies": {"fsdp_cpu_offload": True, "fsdp_replicate_size": 2},
}

State = dict[str, torch.Tensor]


def config(checkpoints: dict[str, Path], **changes: object) -> RunConfig:
    return make_config(checkpoints["llama"], num_steps_per_rollout=2, use_kl_loss=True, kl_loss_coef=0.1, **changes)


def started(cfg: RunConfig, rank: int, size: int, port: int, *, resume_from: Path | None = None) -> FsdpBackend:
    backend = FsdpBackend()
    context = cfg.train.context_parallel_size
    backend.init(cfg, rank_info(rank, size, port, context_parallel_size=context), resume_from=resume_from)
    return backend


def step_of(backend: FsdpBackend, cfg: RunConfig, rank: int, size: int, step: int) -> MetricSet:
    context = cfg.train.context_parallel_size
    shards = make_updates(make_samples(MIXED_LENGTHS, seed=step), cfg, dp=size // context)
    metrics = backend.train(step, shards[rank // context])
    return {name: value for name, value in metrics.items() if name.startswith("train/")}


def whole_state(backend: FsdpBackend) -> State:
    """Weights and optimizer state, gathered. Collective."""
    moments = parts_of(backend).optimizer.sharded_state()
    gathered = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in moments.items()
    }
    return {**all_weights(backend), **{name: value.clone() for name, value in gathered.items()}}


def differing(a: State, b: State) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def two_main(rank: int, port: int, root: Path, checkpoints: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    for name, changes in SAVED.items():
        cfg = config(checkpoints, **changes)
        backend = started(cfg, rank, 2, port)
        step_of(backend, cfg, rank, 2, 0)
        backend.save(0, root / name, hf_directory=root / f"{name}_hf")
        state = whole_state(backend)
        live = merged(all_gather_objects(backend.fingerprint()))
        again = started(cfg, rank, 2, port, resume_from=root / name)
        further, resumed = (step_of(b, cfg, rank, 2, 1) for b in (backend, again))
        if rank == 0:
            torch.save(
                (state, live, further == resumed, differing(whole_state_of(root, name), state)), root / f"{name}.pt"
            )
        assert not differing(whole_state(backend), whole_state(again))
    barrier()
    destroy_process_group()


def whole_state_of(root: Path, name: str) -> State:
    """What the files hold, read without any rank."""
    from rlkit.backends.fsdp.stored import stored_tensors

    return {key.removeprefix("model."): tensor.clone() for key, tensor in stored_tensors(root / name)}


def four_main(rank: int, port: int, root: Path, checkpoints: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    outcomes: dict[str, Any] = {}
    for name in SAVED:
        outcomes[f"from_{name}"] = whole_state(started(config(checkpoints), rank, 4, port, resume_from=root / name))
    for name, changes in LAYOUTS.items():
        cfg = config(checkpoints, **changes)
        backend = started(cfg, rank, 4, port)
        metrics = step_of(backend, cfg, rank, 4, 0)
        first = all_weights(backend)
        backend.save(0, root / f"four_{name}", hf_directory=None)
        live = merged(all_gather_objects(backend.fingerprint()))
        backend.sleep()
        asleep = all_weights(backend)
        backend.wake_up()
        further = step_of(backend, cfg, rank, 4, 1)
        again = started(cfg, rank, 4, port, resume_from=root / f"four_{name}")
        exact = not differing(asleep, first) and step_of(again, cfg, rank, 4, 1) == further
        same_everywhere = all_gather_objects([tensor.sum().item() for tensor in all_weights(backend).values()])
        exact = exact and all(sums == same_everywhere[0] for sums in same_everywhere)
        exact = exact and not differing(whole_state(backend), whole_state(again))
        outcomes[name] = (metrics, first, exact, live)
    crossed = started(config(checkpoints, **LAYOUTS["two_copies"]), rank, 4, port, resume_from=root / "four_plain")
    outcomes["plain_on_two_copies"] = whole_state(crossed)
    outcomes["plain"] += (whole_state(started(config(checkpoints), rank, 4, port, resume_from=root / "four_plain")),)
    if rank == 0:
        torch.save(outcomes, root / "four.pt")
    barrier()
    destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    mp.spawn(two_main, args=(free_port(), root, checkpoints), nprocs=2)  # pyright: ignore
    mp.spawn(four_main, args=(free_port(), root, checkpoints), nprocs=4)  # pyright: ignore
    return root


@pytest.fixture(scope="module")
def four(root: Path) -> dict[str, Any]:
    return torch.load(root / "four.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_two_ranks_is_the_same_on_one_and_on_four(
    root: Path, four: dict[str, Any], checkpoints: dict[str, Path], name: str
):
    """Bit for bit: weights, moments, step counts; on two ranks the next step is the same as well."""
    saved, live, resumes_exactly, differs_in_files = torch.load(root / f"{name}.pt", weights_only=False)
    assert resumes_exactly and not differs_in_files
    assert not differing(four[f"from_{name}"], saved)
    assert file_fingerprints(root / name) == live
    one = start_backend(config(checkpoints), resume_from=root / name)
    assert not differing(whole_state(one), saved)
    assert any(name.startswith("exp_avg.") and bool(value.abs().sum() > 0) for name, value in saved.items())


def test_a_full_checkpoint_is_one_file_that_torch_loads(root: Path, checkpoints: dict[str, Path]):
    assert not (root / "full" / "dcp").exists() and not (root / "sharded" / "full_state.pt").exists()
    tree = torch.load(root / "full" / "full_state.pt", weights_only=True)
    assert tree.keys() == {"model", "exp_avg", "exp_avg_sq", "step"}
    saved = torch.load(root / "full.pt", weights_only=False)[0]
    assert all(torch.equal(saved[name], tensor) for name, tensor in tree["model"].items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_the_same_step(four: dict[str, Any], name: str):
    """Gradient norm, loss and weights; resume and sleep are exact in each, and all ranks agree on every weight."""
    metrics, weights, is_exact = four[name][:3]
    plain, expected = four["plain"][:2]
    assert is_exact
    for metric in ("loss", "grad_norm", "kl_loss", "entropy", "ppo_kl"):
        assert metrics[f"train/{metric}"] == pytest.approx(plain[f"train/{metric}"], rel=1e-5, abs=1e-6), metric
    for key, value in expected.items():
        if not key.endswith("k_proj.bias"):  # attention does not see it: its gradient is rounding noise
            close = (weights[key] - value).abs() < 1e-4
            assert close.float().mean() > (0.97 if value.numel() > 100 else 0.85), key


def test_offload_changes_no_bit(four: dict[str, Any]):
    """The same arithmetic in the same order; the optimizer ran on the CPU before."""
    for offloaded, plain in (("offloaded", "plain"), ("offloaded_copies", "two_copies")):
        assert not differing(four[offloaded][1], four[plain][1])
        assert four[offloaded][3] == four[plain][3]


def test_copies_read_checkpoints_of_plain_shards(four: dict[str, Any]):
    assert not differing(four["plain_on_two_copies"], four["plain"][4])


def test_a_save_of_copies_is_written_once(root: Path, four: dict[str, Any]):
    assert file_fingerprints(root / "four_two_copies") == four["two_copies"][3]
    assert file_fingerprints(root / "four_plain") == four["plain"][3]
