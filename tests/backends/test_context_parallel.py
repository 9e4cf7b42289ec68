"""Any dp x cp is the same run: loss, every metric, gradient norm and weights. Four processes answer for all layouts."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from critic_cases import with_head
from fsdp_setup import all_weights, free_port, make_config, make_samples, make_updates, rank_info

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import barrier
from rlkit.dist.groups import destroy_process_group
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Sample

LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
"""(dp, cp)."""

SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "grpo": ("qwen3", {"entropy_coef": 0.05}),
    "per_token": ("qwen3", {"calculate_per_token_loss": True, "max_tokens_per_gpu": 8}),
    "two_steps_and_kl": ("llama", {"num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}),
    "gspo": ("qwen3", {"advantage_estimator": "gspo", "gradient_checkpointing": True}),
    "sft": ("qwen3-untied", {"loss_type": "sft_loss"}),
    "dpo": ("qwen3", {"loss_type": "dpo_loss", "dpo_beta": 0.5}),
    "ppo": (
        "qwen3",
        {
            **{"advantage_estimator": "ppo", "lambd": 0.9, "gamma": 0.95, "value_clip": 0.05, "critic_lr": 1e-2},
            **{"num_steps_per_rollout": 2, "kl_coef": 0.1, "kl_loss_type": "k1", "normalize_advantages": True},
        },
    ),
    "eager": ("qwen3", {"attn_implementation": "eager"}),
}
"""The last attention is written out; packs of 8 tokens a rank make most samples run alone."""

SHAPES = [(5, 7), (3, 1), (2, 60), (1, 1), (9, 20), (17, 2), (4, 5), (6, 3), (1, 12), (2, 2), (30, 4)]


def samples(cfg: RunConfig) -> list[Sample]:
    """Single-token responses, groups of four, two, four and one, and samples without any trained token; or pairs."""
    made = make_samples(SHAPES)
    if cfg.is_dpo:
        return made[:10]
    for sample, group in zip(made, [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3], strict=True):
        sample.group_id = group
    for empty in (made[2], made[5]):
        empty.loss_mask = [0] * len(empty.loss_mask)
    return made


def run(cfg: RunConfig, rank: int, world: int, cp: int, port: int) -> tuple[MetricSet, dict[str, torch.Tensor]]:
    backend = FsdpBackend()
    backend.init(cfg, rank_info(rank, world, port, context_parallel_size=cp), resume_from=None)
    metrics = backend.train(0, make_updates(samples(cfg), cfg, dp=world // cp)[rank // cp])
    return metrics, all_weights(backend, 4000)


def rank_main(rank: int, world: int, port: int, root: Path, checkpoints: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    for name, (model, changes) in SETTINGS.items():
        for dp, cp in LAYOUTS:
            if dp * cp == world:
                cfg = make_config(checkpoints[model], context_parallel_size=cp, **changes)
                if cfg.needs_reference or cfg.needs_critic:
                    cfg = make_config(
                        checkpoints[model],
                        context_parallel_size=cp,
                        ref_load=str(checkpoints["qwen3-other" if model == "qwen3" else model]),
                        critic_load=str(root / "critic") if cfg.needs_critic else None,
                        **changes,
                    )
                outcome = run(cfg, rank, world, cp, port)
                if rank == world - 1:  # any rank will do: metrics and weights are the same on all
                    torch.save(outcome, root / f"{name}_{dp}x{cp}.pt")
    barrier()
    destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    with_head(checkpoints["qwen3"], root / "critic")
    for world in sorted({dp * cp for dp, cp in LAYOUTS}):
        mp.spawn(rank_main, args=(world, free_port(), root, checkpoints), nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
    return root


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: f"dp{layout[0]}_cp{layout[1]}")
@pytest.mark.parametrize("name", SETTINGS)
def test_any_layout_is_the_same_step(root: Path, name: str, layout: tuple[int, int]) -> None:
    expected, expected_weights = torch.load(root / f"{name}_1x1.pt")
    found, weights = torch.load(root / f"{name}_{layout[0]}x{layout[1]}.pt")
    for key, value in expected.items():
        if key.startswith(("train/", "critic/")):
            # the log-ratios of whole responses cancel: what rounding left of them is larger
            tiny = 1e-5 if "dpo_" in key else 1e-6
            assert found[key] == pytest.approx(value, rel=1e-5, abs=tiny), key
    for key, tensor in expected_weights.items():
        close = (tensor - weights[key]).abs() < 1e-4  # Adam's first step is a sign, also of rounding noise
        assert close.float().mean() > 0.99, key
