"""A reference that moves: `--ref-update-interval`."""

from pathlib import Path

import pytest
import torch
from fsdp_setup import all_weights, make_config, parts_of, start_backend, train_step

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.model import named_shards
from rlkit.types.errors import ConfigError

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}


def reference_of(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    (role,) = parts_of(backend).frozen
    return {name: shard.full_tensor().clone() for name, shard in named_shards(role.model)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(value, b[name]) for name, value in a.items())


def test_the_reference_follows_the_policy_every_so_many_steps(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"], ref_update_interval=2, **KL)
    backend = start_backend(cfg)
    policies, references, kls = [all_weights(backend)], [reference_of(backend)], []
    for step in range(4):
        kls.append(train_step(backend, cfg, step)["train/kl_loss"])
        policies.append(all_weights(backend))
        references.append(reference_of(backend))
    assert same(references[1], policies[0]) and same(references[2], policies[2])
    assert same(references[3], policies[2]) and same(references[4], policies[4])
    assert kls[0] == 0.0 and kls[2] == 0.0, "a fresh reference is the policy"
    assert kls[1] > 0.0 and kls[3] > 0.0


def test_without_the_flag_it_stays(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"], **KL)
    backend = start_backend(cfg)
    before = reference_of(backend)
    for step in range(3):
        train_step(backend, cfg, step)
    assert same(reference_of(backend), before)


@pytest.mark.parametrize("full", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(checkpoints: dict[str, Path], tmp_path: Path, full: bool):
    """Bit for bit, saved between two updates of the reference."""
    cfg = make_config(checkpoints["qwen3"], ref_update_interval=2, fsdp_full_params=full, **KL)
    first = start_backend(cfg)
    for step in range(3):
        train_step(first, cfg, step)
    first.save(2, tmp_path / "saved", hf_directory=None)
    second = start_backend(cfg, resume_from=tmp_path / "saved")
    assert same(reference_of(second), reference_of(first))
    assert first.fingerprint() == second.fingerprint()
    assert any(name.startswith("reference.model.") for name in first.fingerprint())
    for step in (3, 4):
        ours, theirs = train_step(first, cfg, step), train_step(second, cfg, step)
        for name in ("loss", "kl_loss", "grad_norm"):
            assert ours[f"train/{name}"] == theirs[f"train/{name}"]
    assert same(all_weights(first), all_weights(second))
    assert same(reference_of(second), reference_of(first))


def test_a_checkpoint_from_before_the_flag_has_not_moved_it(checkpoints: dict[str, Path], tmp_path: Path):
    before = make_config(checkpoints["qwen3"], **KL)
    backend = start_backend(before)
    train_step(backend, before, 0)
    backend.save(0, tmp_path / "saved", hf_directory=None)
    cfg = make_config(checkpoints["qwen3"], ref_update_interval=1, **KL)
    again = start_backend(cfg, resume_from=tmp_path / "saved")
    assert same(reference_of(again), reference_of(backend))
    train_step(again, cfg, 1)
    assert same(reference_of(again), all_weights(again))


def test_a_reference_of_another_shape_is_refused(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"], ref_update_interval=1, ref_load=str(checkpoints["qwen3-untied"]), **KL)
    with pytest.raises(ConfigError, match=r"--ref-update-interval .*lm_head\.weight has shape .* None here"):
        start_backend(cfg)
