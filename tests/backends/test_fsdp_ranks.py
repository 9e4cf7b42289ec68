"""One rank and two ranks are the same run. The two ranks live in one spawned pair of processes, which answers all
questions at once.
"""

from dataclasses import dataclass
from pathlib import Path

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
from transformers import AutoModelForCausalLM

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import all_gather_objects, barrier, gather_over_shards, max_over_data, sum_over_data
from rlkit.dist.groups import RankMesh, destroy_process_group
from rlkit.types.batches import Update
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Sample

NUM_RANKS = 2

SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "tied": ("qwen3", {"entropy_coef": 0.05}),
    "untied": ("llama", {"num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}),
    "per_token": ("qwen3", {"calculate_per_token_loss": True, "max_tokens_per_gpu": 38}),
    "checkpointed": ("qwen3", {"gradient_checkpointing": True}),
    "sft": ("qwen3-untied", {"loss_type": "sft_loss"}),
    "gspo": ("qwen3", {"advantage_estimator": "gspo", "use_rollout_logprobs": True, "max_tokens_per_gpu": 38}),
    "mis": (
        "qwen3",
        {
            "use_tis": True,
            "tis_level": "geometric",
            "tis_batch_normalize": True,
            "use_rs": True,
            "rs_lower_bound": 0.1,
            "rs_upper_bound": 9.0,
            "max_tokens_per_gpu": 38,
        },
    ),
    "reinforce": (
        "qwen3",
        {
            "advantage_estimator": "reinforce_plus_plus",
            "normalize_advantages": True,
            "kl_coef": 0.05,
            "num_steps_per_rollout": 2,
        },
    ),
}
"""Each runs three steps: the mixed samples, a single sample (the other rank has only dummies), and one long sample
among short.
"""

STEPS = [MIXED_LENGTHS, [(4, 9)], [(2, 60), (1, 2), (3, 3), (2, 2)]]


def samples_of(step: int) -> list[Sample]:
    """A group of one has advantage 0, so the single sample gets a neighbour that cannot be scored and a group of its
    own.
    """
    samples = make_samples(STEPS[step], seed=step)
    if len(samples) == 1:
        samples = [samples[0], *make_samples(STEPS[step], seed=9)]
        samples[1].group_id, samples[1].index = samples[0].group_id, 1
        samples[1].loss_mask = [0] * len(samples[1].loss_mask)
    return samples


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one setting came to on rank 0."""

    metrics: list[MetricSet]
    first_weights: dict[str, torch.Tensor]
    """After the first step."""
    weights: dict[str, torch.Tensor]
    num_empty: int
    """Empty micro-batches over all steps and ranks."""


def run_setting(cfg: RunConfig, rank: int, size: int, port: int, device: str = "cpu") -> tuple[FsdpBackend, Outcome]:
    backend = FsdpBackend()
    backend.init(cfg, rank_info(rank, size, port, device), resume_from=None)
    metrics, num_empty, first_weights = [], 0, {}
    for step in range(len(STEPS)):
        shards: list[list[Update]] = make_updates(samples_of(step), cfg, dp=size)
        num_empty += sum(b.num_tokens == 0 for updates in shards for u in updates for b in u.micro_batches)
        metrics.append(backend.train(step, shards[rank]))
        first_weights = first_weights or all_weights(backend)
    weights = all_weights(backend, 4000)
    return backend, Outcome(metrics=metrics, first_weights=first_weights, weights=weights, num_empty=num_empty)


def rank_main(rank: int, port: int, root: Path, checkpoints: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    outcomes = {}
    for name, (model, changes) in SETTINGS.items():
        cfg = make_config(checkpoints[model], **changes)
        backend, outcomes[name] = run_setting(cfg, rank, NUM_RANKS, port)
        if name == "tied":
            check_collectives(parts_of(backend).mesh, rank)
            backend.save(2, root / "saved_by_two", hf_directory=root / "exported_by_two")
            backend.sleep()
            asleep = all_weights(backend, 4000)
            assert all(torch.equal(asleep[key], value) for key, value in outcomes[name].weights.items())
            backend.wake_up()
            outcomes["tied_and_on"] = one_more_step(backend, cfg, rank)
            again = FsdpBackend()
            again.init(cfg, rank_info(rank, NUM_RANKS, port), resume_from=root / "saved_by_two")
            outcomes["resumed"] = one_more_step(again, cfg, rank)
            other = FsdpBackend()
            other.init(cfg, rank_info(rank, NUM_RANKS, port), resume_from=root / "saved_by_one")
            outcomes["resumed_from_one"] = one_more_step(other, cfg, rank)
    gathered = all_gather_objects({name: outcome.weights for name, outcome in outcomes.items()})
    for name, weights in gathered[0].items():
        assert all(torch.equal(gathered[1][name][key], value) for key, value in weights.items()), (
            "ranks saw other buckets"
        )
    if rank == 0:
        torch.save(outcomes, root / "outcomes.pt")
    barrier()
    destroy_process_group()


def one_more_step(backend: FsdpBackend, cfg: RunConfig, rank: int) -> Outcome:
    metrics = backend.train(3, make_updates(samples_of(0), cfg, dp=NUM_RANKS)[rank])
    return Outcome(metrics=[metrics], first_weights={}, weights=all_weights(backend), num_empty=0)


def check_collectives(mesh: RankMesh, rank: int) -> None:
    device = mesh.device
    assert sum_over_data(torch.tensor([1.0 + rank], device=device), mesh).item() == 3.0
    assert max_over_data(torch.tensor([1.0 + rank, -rank], device=device), mesh).tolist() == [2.0, 0.0]
    assert gather_over_shards(torch.tensor([rank, 7], device=device), mesh).tolist() == [[0, 7], [1, 7]]
    assert all_gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def by_one(root: Path, checkpoints: dict[str, Path]) -> dict[str, Outcome]:
    outcomes = {}
    for name, (model, changes) in SETTINGS.items():
        backend, outcomes[name] = run_setting(make_config(checkpoints[model], **changes), 0, 1, 0)
        if name == "tied":
            backend.save(2, root / "saved_by_one", hf_directory=None)
    destroy_process_group()
    return outcomes


@pytest.fixture(scope="module")
def by_two(root: Path, by_one: dict[str, Outcome], checkpoints: dict[str, Path]) -> dict[str, Outcome]:
    mp.spawn(rank_main, args=(free_port(), root, checkpoints), nprocs=NUM_RANKS)  # pyright: ignore
    return torch.load(root / "outcomes.pt", weights_only=False)


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_equal_one(by_one: dict[str, Outcome], by_two: dict[str, Outcome], name: str):
    for step, (one, two) in enumerate(zip(by_one[name].metrics, by_two[name].metrics, strict=True)):
        assert one.keys() == two.keys()
        for metric in trained(one):
            # the first step starts from equal weights; Adam then turns rounding noise of tiny gradients into steps of
            # lr
            rel, tiny = (1e-5, 1e-6) if step == 0 else (2e-2, 1e-3)
            assert two[metric] == pytest.approx(one[metric], rel=rel, abs=tiny), f"{metric} at step {step}"


def test_the_settings_exercise_dummies(by_one: dict[str, Outcome], by_two: dict[str, Outcome]):
    assert by_one["tied"].num_empty == 0
    assert by_two["tied"].num_empty > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_agree_after_the_first_step(by_one: dict[str, Outcome], by_two: dict[str, Outcome], name: str):
    """Adam's first step is lr * sign(gradient); where the gradient is rounding noise, so is the sign."""
    one, two = by_one[name].first_weights, by_two[name].first_weights
    assert one.keys() == two.keys()
    for key, value in one.items():
        if key.endswith("k_proj.bias"):
            continue  # its gradient is zero but for noise: attention does not see a constant added to all keys
        close = (value - two[key]).abs() < 1e-5
        assert close.float().mean() > (0.97 if value.numel() > 100 else 0.85), key


def test_resuming_on_two_ranks_is_exact(by_two: dict[str, Outcome]):
    assert_same(by_two["tied_and_on"], by_two["resumed"])


def test_a_checkpoint_changes_the_number_of_ranks(
    by_one: dict[str, Outcome], by_two: dict[str, Outcome], root: Path, checkpoints: dict[str, Path]
):
    cfg = make_config(checkpoints["qwen3"], **SETTINGS["tied"][1])
    from_two = start_backend(cfg, resume_from=root / "saved_by_two")
    assert all(torch.equal(value, by_two["tied"].weights[key]) for key, value in all_weights(from_two).items())
    metrics = from_two.train(3, make_updates(samples_of(0), cfg)[0])
    for metric in ("loss", "grad_norm"):
        expected = by_two["tied_and_on"].metrics[0][f"train/{metric}"]
        assert metrics[f"train/{metric}"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    from_one = start_backend(cfg, resume_from=root / "saved_by_one")
    metrics = from_one.train(3, make_updates(samples_of(0), cfg)[0])
    for metric in ("loss", "grad_norm"):
        found = by_two["resumed_from_one"].metrics[0][f"train/{metric}"]
        assert found == pytest.approx(metrics[f"train/{metric}"], rel=1e-5, abs=1e-6)


def test_two_ranks_export_what_they_send(by_two: dict[str, Outcome], root: Path):
    exported = dict(AutoModelForCausalLM.from_pretrained(root / "exported_by_two").named_parameters())
    assert exported.keys() == by_two["tied"].weights.keys()
    assert all(torch.equal(exported[key], value) for key, value in by_two["tied"].weights.items())


def assert_same(a: Outcome, b: Outcome) -> None:
    assert all(torch.equal(value, b.weights[key]) for key, value in a.weights.items())
    assert trained(a.metrics[0]) == trained(b.metrics[0])


def trained(metrics: MetricSet) -> MetricSet:
    return {name: value for name, value in metrics.items() if name.startswith("train/")}


@pytest.mark.multigpu
def test_two_gpus_equal_one_cpu(by_one: dict[str, Outcome], root: Path, checkpoints: dict[str, Path]):
    mp.spawn(gpu_main, args=(free_port(), root, checkpoints), nprocs=NUM_RANKS)  # pyright: ignore
    by_gpus = torch.load(root / "by_gpus.pt", weights_only=False)
    for metric in ("loss", "grad_norm", "entropy"):
        expected = by_one["tied"].metrics[0][f"train/{metric}"]
        assert by_gpus.metrics[0][f"train/{metric}"] == pytest.approx(expected, rel=1e-4, abs=1e-5), metric


def gpu_main(rank: int, port: int, root: Path, checkpoints: dict[str, Path]) -> None:
    model, changes = SETTINGS["tied"]
    backend, outcome = run_setting(make_config(checkpoints[model], **changes), rank, NUM_RANKS, port, "cuda")
    check_collectives(parts_of(backend).mesh, rank)
    backend.sleep()
    asleep = all_weights(backend, 4000)
    assert all(torch.equal(asleep[key], value) for key, value in outcome.weights.items())
    backend.wake_up()
    if rank == 0:
        torch.save(outcome, root / "by_gpus.pt")
    barrier()
    destroy_process_group()
