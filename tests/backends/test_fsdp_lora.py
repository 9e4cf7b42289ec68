"""Adapters on the policy: against peft's own model, against the merged model, and over ranks."""

import json
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
    naive_log_probs,
    parts_of,
    rank_info,
    start_backend,
    train_step,
)
from peft import PeftModel
from safetensors.torch import load_file
from test_fsdp_layouts import differing, whole_state
from transformers import AutoModelForCausalLM

from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.fingerprint import file_fingerprints
from rlkit.backends.fsdp.lora import is_adapter, without_adapters
from rlkit.backends.fsdp.model import named_shards
from rlkit.backends.fsdp.trainer import micro_batch
from rlkit.config.schema import RunConfig
from rlkit.dist.collectives import all_gather_objects, barrier
from rlkit.dist.groups import destroy_process_group
from rlkit.types.errors import CheckpointError, ConfigError
from rlkit.types.fingerprints import merged

MERGED_GAP = 2e-5
"""Largest difference in float32 between log-probs of adapters and of the merged matrices."""


def lora_config(path: Path, **changes: object) -> RunConfig:
    options = {"lora_rank": 4, "lora_alpha": 8.0, "lr": 3e-2, **changes}
    return make_config(path, **options)


def scores(backend: FsdpBackend, cfg: RunConfig) -> torch.Tensor:
    """Log-probs of the mixed samples under the policy as it is."""
    parts = parts_of(backend)
    batches = [
        micro_batch(b, parts.mesh) for u in make_updates(make_samples(MIXED_LENGTHS), cfg)[0] for b in u.micro_batches
    ]
    return torch.cat(parts.trainer.score(parts.policy, batches))


def merged_model(path: Path, weights: dict[str, torch.Tensor]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_adapters_start_as_nothing_and_alone_are_trained(checkpoints: dict[str, Path], name: str):
    cfg = lora_config(checkpoints[name])
    backend, plain = start_backend(cfg), start_backend(make_config(checkpoints[name]))
    assert not differing(all_weights(backend), all_weights(plain))
    assert torch.equal(scores(backend, cfg), scores(plain, cfg))
    before = {key: shard.full_tensor().clone() for key, shard in named_shards(parts_of(backend).policy)}
    metrics = [train_step(backend, cfg, step) for step in range(3)]
    assert all(row["train/grad_norm"] > 0 for row in metrics)
    for key, shard in named_shards(parts_of(backend).policy):
        assert torch.equal(shard.full_tensor(), before[key]) == (not is_adapter(key)), key
    moments = parts_of(backend).optimizer.sharded_state()
    assert all(is_adapter(key) for key in moments) and len(moments) == 3 * sum(map(is_adapter, before))


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_engines_get_the_merged_weights(checkpoints: dict[str, Path], name: str):
    """A plain transformers model with what engines receive scores as the trainer does."""
    cfg = lora_config(checkpoints[name])
    backend = start_backend(cfg)
    for step in range(2):
        train_step(backend, cfg, step)
    weights = all_weights(backend)
    assert weights.keys() == all_weights(start_backend(make_config(checkpoints[name]))).keys()
    for small in (200, 4000):
        assert not differing(all_weights(backend, small), weights)
    backend.sleep()
    assert not differing(all_weights(backend), weights)
    backend.wake_up()
    samples = make_samples(MIXED_LENGTHS)
    logps, _ = naive_log_probs(merged_model(checkpoints[name], weights), samples, 1.0, padded=False)
    expected = torch.cat([logp[torch.tensor(s.loss_mask) > 0] for s, logp in zip(samples, logps, strict=True)])
    ours = scores(backend, cfg)
    ours = ours[ours != 0]
    torch.testing.assert_close(ours.sort().values, expected.detach().sort().values, atol=MERGED_GAP, rtol=0)


def test_the_first_step_is_that_of_peft(checkpoints: dict[str, Path]):
    """Gradients of A and B, and their norm, from peft's own model around transformers'."""
    from peft import LoraConfig, get_peft_model

    cfg = lora_config(
        checkpoints["llama"], clip_grad=0.0, loss_type="sft_loss", lora_target_modules=("q_proj", "up_proj")
    )
    backend = start_backend(cfg)
    policy = parts_of(backend).policy
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)
    options = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    theirs = get_peft_model(model, options)
    ours = {key: shard for key, shard in named_shards(policy) if is_adapter(key)}
    factors = {
        key.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for key, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert factors.keys() == ours.keys() and len(ours) == 2 * 2 * 2
    with torch.no_grad():
        for key, shard in ours.items():
            shard.to_local().normal_(std=0.3, generator=torch.Generator().manual_seed(len(key)))
            factors[key].copy_(shard.full_tensor())
    samples = make_samples(MIXED_LENGTHS)
    logps, _ = naive_log_probs(theirs, samples, 1.0, padded=False)
    losses = [
        -(logp * torch.tensor(s.loss_mask)).sum() / sum(s.loss_mask) for s, logp in zip(samples, logps, strict=True)
    ]
    (sum(losses) / len(losses)).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in factors.values()]).item()
    metrics = backend.train(0, make_updates(samples, cfg)[0])
    assert metrics["train/grad_norm"] == pytest.approx(expected, rel=1e-5)
    moments = parts_of(backend).optimizer.sharded_state()
    for key, factor in factors.items():  # after one step the first moment is a tenth of the gradient
        torch.testing.assert_close(moments[f"exp_avg.{key}"].full_tensor(), 0.1 * factor.grad, atol=1e-7, rtol=1e-4)


def test_the_reference_is_the_policy_without_adapters(checkpoints: dict[str, Path]):
    """No second model is built, and the KL is that to the untouched base, step after step."""
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    cfg = lora_config(checkpoints["qwen3"], **changes)
    switched = start_backend(cfg)
    copied = start_backend(lora_config(checkpoints["qwen3"], **changes, ref_load=f"{checkpoints['qwen3']}/."))
    assert [role.is_base for role in parts_of(switched).frozen] == [True]
    assert [role.is_base for role in parts_of(copied).frozen] == [False]
    for step in range(3):
        one, two = train_step(switched, cfg, step), train_step(copied, cfg, step)
        for metric in ("kl_loss", "loss", "grad_norm"):
            assert one[f"train/{metric}"] == two[f"train/{metric}"], metric
    assert one["train/kl_loss"] > 1e-3
    with without_adapters(parts_of(switched).policy):
        base = scores(switched, cfg)
    assert torch.equal(base, scores(start_backend(make_config(checkpoints["qwen3"])), cfg))
    assert not torch.equal(base, scores(switched, cfg))


def test_peft_loads_the_exported_adapter(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = lora_config(checkpoints["qwen3"])
    backend = start_backend(cfg)
    for step in range(2):
        train_step(backend, cfg, step)
    backend.save(1, tmp_path / "saved", hf_directory=tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert not differing(dict(exported.named_parameters()), all_weights(backend))
    base = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3"], dtype=torch.float32)
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "hf" / "adapter")
        logits = adapted(tokens).logits
        torch.testing.assert_close(logits, exported(tokens).logits, atol=1e-4, rtol=0)
    assert (logits - before).abs().max() > 1e-2
    stored = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    ours = {
        f"base_model.model.{key}": s.full_tensor()
        for key, s in named_shards(parts_of(backend).policy)
        if is_adapter(key)
    }
    assert not differing(stored, ours)
    assert json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())["r"] == 4


VARIANTS: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.3},
    "checkpointed": {"gradient_checkpointing": True},
    "full": {"fsdp_full_params": True},
    "async": {"async_save": True},
    "offloaded": {"fsdp_cpu_offload": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resume_is_exact(checkpoints: dict[str, Path], tmp_path: Path, name: str):
    """The checkpoint holds adapters and their moments alone; with dropout the random state matters."""
    cfg = lora_config(checkpoints["qwen3"], use_kl_loss=True, kl_loss_coef=0.1, **VARIANTS[name])
    first = start_backend(cfg)
    train_step(first, cfg, 0)
    first.save(0, tmp_path / "saved", hf_directory=None)
    further = train_step(first, cfg, 1)
    first.finish_save()
    assert all(is_adapter(key) for key in file_fingerprints(tmp_path / "saved"))
    second = start_backend(cfg, resume_from=tmp_path / "saved")
    assert merged([second.fingerprint()]) == file_fingerprints(tmp_path / "saved")
    resumed = train_step(second, cfg, 1)
    for metric in ("loss", "grad_norm", "kl_loss"):
        assert resumed[f"train/{metric}"] == further[f"train/{metric}"], metric
    assert not differing(whole_state(first), whole_state(second))
    with pytest.raises(CheckpointError, match="does not fit this run"):
        start_backend(make_config(checkpoints["qwen3"]), resume_from=tmp_path / "saved")


def test_checkpointing_changes_nothing_and_dropout_does(checkpoints: dict[str, Path]):
    results = {}
    for name, changes in {"plain": {}, **VARIANTS}.items():
        cfg = lora_config(checkpoints["qwen3"], **changes)
        backend = start_backend(cfg)
        results[name] = [train_step(backend, cfg, step)["train/grad_norm"] for step in range(3)]
        # scoring drops nothing out
        assert torch.equal(scores(backend, cfg), scores(backend, cfg))
    assert results["checkpointed"] == pytest.approx(results["plain"], rel=1e-5)
    assert results["offloaded"] == results["plain"]
    assert results["dropout"][1:] != pytest.approx(results["plain"][1:], rel=1e-5)


def test_compiled_adapters_take_the_same_steps(checkpoints: dict[str, Path]):
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    results = []
    for compiled in ("off", "on"):
        cfg = lora_config(checkpoints["qwen3"], torch_compile=compiled, **changes)
        backend = start_backend(cfg)
        results.append([train_step(backend, cfg, step) for step in range(2)])
    for eager, graph in zip(*results, strict=True):
        for metric in ("loss", "grad_norm", "kl_loss"):
            assert graph[f"train/{metric}"] == pytest.approx(eager[f"train/{metric}"], rel=1e-4, abs=1e-6), metric


def test_a_base_in_half_precision_stays_so(tmp_path: Path):
    """No float32 copy is kept of what nobody trains; adapters are float32; engines get what the formula says."""
    from fsdp_setup import save_checkpoint_dir, spread_out, tiny_qwen3

    source = save_checkpoint_dir(spread_out(tiny_qwen3()).to(torch.bfloat16), tmp_path / "half")
    cfg = lora_config(source)
    backend = start_backend(cfg)
    train_step(backend, cfg, 0)
    dtypes = {is_adapter(key): shard.dtype for key, shard in named_shards(parts_of(backend).policy)}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    shards = {key: shard.full_tensor() for key, shard in named_shards(parts_of(backend).policy)}
    sent = all_weights(backend)
    layer = "model.layers.0.self_attn.q_proj"
    b, a = shards[f"{layer}.lora_B.weight"], shards[f"{layer}.lora_A.weight"]
    expected = shards[f"{layer}.weight"].float() + (2.0 * b.double() @ a.double()).float()
    assert torch.equal(sent[f"{layer}.weight"], expected)


def test_targets_that_are_not_there_are_named(checkpoints: dict[str, Path]):
    with pytest.raises(ConfigError, match="--lora-target-modules query: this model has no linear layer of that name"):
        start_backend(lora_config(checkpoints["qwen3"], lora_target_modules=("q_proj", "query")))


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_copies": {"fsdp_replicate_size": 2},
    "context": {"context_parallel_size": 2},
}


def four_main(rank: int, port: int, root: Path, checkpoints: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    outcomes = {}
    for name, changes in LAYOUTS.items():
        cfg = lora_config(checkpoints["llama"], lora_rank=3, use_kl_loss=True, kl_loss_coef=0.1, **changes)
        context = cfg.train.context_parallel_size
        backend = FsdpBackend()
        backend.init(cfg, rank_info(rank, 4, port, context_parallel_size=context), resume_from=None)
        shards = make_updates(make_samples(MIXED_LENGTHS), cfg, dp=4 // context)
        metrics = backend.train(0, shards[rank // context])
        backend.save(0, root / name, hf_directory=root / f"{name}_hf")
        live = merged(all_gather_objects(backend.fingerprint()))
        outcomes[name] = (metrics, all_weights(backend), live)
    if rank == 0:
        torch.save(outcomes, root / "outcomes.pt")
    barrier()
    destroy_process_group()


@pytest.mark.slow
def test_four_ranks_are_one(tmp_path: Path, checkpoints: dict[str, Path]):
    """Fewer rows of A than ranks; engines get the bytes that one rank makes of the same adapters."""
    mp.spawn(four_main, args=(free_port(), tmp_path, checkpoints), nprocs=4)  # pyright: ignore
    outcomes = torch.load(tmp_path / "outcomes.pt", weights_only=False)
    cfg = lora_config(checkpoints["llama"], lora_rank=3, use_kl_loss=True, kl_loss_coef=0.1)
    one = start_backend(cfg)
    expected = train_step(one, cfg, 0)
    for name, (metrics, weights, live) in outcomes.items():
        for metric in ("loss", "grad_norm", "kl_loss"):
            found = metrics[f"train/{metric}"]
            assert found == pytest.approx(expected[f"train/{metric}"], rel=1e-4, abs=1e-6), (name, metric)
        assert file_fingerprints(tmp_path / name) == live
        resumed = start_backend(cfg, resume_from=tmp_path / name)
        assert not differing(all_weights(resumed), weights)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}_hf")
        assert not differing(dict(exported.named_parameters()), weights)


def test_a_checkpoint_is_expected_to_hold_adapters_alone(checkpoints: dict[str, Path]):
    backend = FsdpBackend()
    report = backend.init(lora_config(checkpoints["qwen3"]), rank_info(), resume_from=None)
    adapters = [shard for name, shard in named_shards(parts_of(backend).policy) if is_adapter(name)]
    assert report.num_saved_params == sum(shard.numel() for shard in adapters) < report.num_params / 2
