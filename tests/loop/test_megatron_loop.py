"""The whole loop with Megatron-Core as the trainer: Ray, router, embedded engines, weight updates, checkpoints."""

import pytest

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (pip install rlkit[megatron])")

from rlkit.observability.audit import audit
from rlkit.observability.ledger import read_ledger

pytestmark = pytest.mark.loop

MEGATRON = ("--train-backend", "megatron", "--colocate")
ONE = (*MEGATRON, "--actor-num-gpus-per-node", 1)
TWO = (*MEGATRON, "--actor-num-gpus-per-node", 2)


@pytest.mark.slow
def test_reward_rises_and_the_run_continues(run_training, task):
    """One rank and one engine taking turns, ended after eight steps and continued."""
    flags = (
        *ONE, "--lr", 1e-2, "--save-interval", 8, "--check-weight-update-equal", "--save-hf", task / "mg-{rollout_id}",
    )  # fmt: skip
    run_training(*flags, "--num-rollout", 8, name="megatron")
    run = run_training(*flags, "--num-rollout", 16, name="megatron")
    reward = run.series("rollout/reward")
    assert [row["step"] for row in run.rows] == list(range(16))
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.2
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert all(abs(kl) < 1e-7 for kl in run.series("train/ppo_kl"))
    ledger = audit(read_ledger(run.directory / "ledger.jsonl"))
    assert (ledger.problems, ledger.retrained) == ([], [])
    assert (task / "mg-15" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def tiny_experts(tiny_model, tmp_path_factory):
    """The tiny model's tokenizer with a random Qwen3 of four experts a layer, of which each token takes two."""
    import shutil

    import torch
    from transformers import AutoConfig, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = tmp_path_factory.mktemp("tiny_experts")
    shutil.copytree(tiny_model, path, dirs_exist_ok=True)
    dense = AutoConfig.from_pretrained(tiny_model)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=48,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_model_with_experts_learns(run_training, tiny_experts):
    """Two ranks that share the experts, two engines."""
    run = run_training(
        *TWO, "--hf-checkpoint", tiny_experts, "--expert-model-parallel-size", 2, "--num-rollout", 14, "--lr", 1e-2
    )
    reward = run.series("rollout/reward")
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.2
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("--tensor-model-parallel-size", 2, "--sequence-parallel"),
        ("--pipeline-model-parallel-size", 2),
        ("--recompute-granularity", "full"),
    ],
    ids=["tensor", "pipeline", "data"],
)
def test_layouts_update_every_engine(run_training, layout):
    """After each update all engine weights equal the trainer's, byte for byte, and log-probs agree."""
    run = run_training(*TWO, *layout, "--num-rollout", 2, "--check-weight-update-equal")
    assert len(run.series("rollout/reward")) == 2
    assert max(run.series("train/train_rollout_logprob_abs_diff")) < 1e-4


@pytest.mark.slow
def test_first_step_is_that_of_fsdp(run_training, tmp_path):
    """From one recorded rollout: the same loss and gradient norm by either backend."""
    record = tmp_path / "rollout_{rollout_id}.jsonl"
    first = run_training(
        "--colocate", "--actor-num-gpus-per-node", 1, "--num-rollout", 1, "--save-debug-rollout-data", record,
        name="record",
    )  # fmt: skip
    flags = ("--train-backend", "megatron", "--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2)
    run = run_training(*flags, "--num-rollout", 1, "--load-debug-rollout-data", record, name="megatron_replay")
    for metric in ("train/loss", "train/grad_norm", "train/entropy"):
        assert run.series(metric)[0] == pytest.approx(first.series(metric)[0], abs=1e-4, rel=1e-4), metric
