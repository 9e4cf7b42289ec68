from pathlib import Path

import pytest
import torch
from fsdp_setup import all_weights, make_config, make_samples, parts_of, save_checkpoint_dir, start_backend, train_step
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "llama"])
@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 30])
def test_buckets_equal_the_checkpoint(checkpoints: dict[str, Path], name: str, max_bytes: int):
    backend = start_backend(make_config(checkpoints[name]))
    expected = dict(AutoModelForCausalLM.from_pretrained(checkpoints[name]).named_parameters())
    found = {}
    for bucket in backend.weights.buckets(max_bytes):
        assert bucket.flat.numel() <= max_bytes or len(bucket.specs) == 1
        assert bucket.flat.numel() == sum(spec.num_bytes for spec in bucket.specs)
        found.update((name, tensor.clone()) for name, tensor in bucket.tensors())
    assert list(found) == [spec.name for spec in backend.weights.specs()]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_memory_of_a_bucket_is_reused(checkpoints: dict[str, Path]):
    backend = start_backend(make_config(checkpoints["qwen3"]))
    assert len({bucket.flat.data_ptr() for bucket in backend.weights.buckets(5000)}) == 1


def test_engines_receive_the_compute_dtype(checkpoints: dict[str, Path]):
    backend = start_backend(make_config(checkpoints["llama"], dtype="bfloat16"))
    expected = dict(AutoModelForCausalLM.from_pretrained(checkpoints["llama"]).named_parameters())
    for name, tensor in all_weights(backend).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name].to(torch.bfloat16))


def test_a_tied_matrix_is_one_parameter_with_the_gradient_of_both_uses(tmp_path: Path):
    """Case ws-03: vocabulary 8, hidden 4."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
    )
    config.initializer_range = 0.5
    model = Qwen3ForCausalLM(config)
    path = save_checkpoint_dir(model, tmp_path / "tied")
    cfg = make_config(path, loss_type="sft_loss", clip_grad=0.0, weight_decay=0.0)
    backend = start_backend(cfg)
    names = [spec.name for spec in backend.weights.specs()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert sum(torch.Size(spec.shape).numel() for spec in backend.weights.specs()) == model.num_parameters()

    samples = tied_samples()
    train_step(backend, cfg, samples=samples)
    optimizer = parts_of(backend).optimizer
    moments = dict(zip(optimizer._shards, (optimizer.adamw.state[p] for p in optimizer._locals.values()), strict=True))
    ours = moments["model.embed_tokens.weight"]["exp_avg"] / (1 - cfg.optimizer.adam_beta1)

    untied_grads = gradients_of_both_uses(path, samples)
    torch.testing.assert_close(ours, sum(untied_grads), rtol=1e-5, atol=1e-6)
    assert all(grad.abs().max() > 1e-3 for grad in untied_grads), "both uses must matter for this test to mean anything"

    backend.save(0, tmp_path / "saved", hf_directory=tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    assert torch.equal(exported.lm_head.weight, all_weights(backend)["model.embed_tokens.weight"])


def tied_samples():
    samples = make_samples([(2, 4), (1, 3), (3, 3), (2, 2)] * 2)
    for sample in samples:
        sample.tokens = [token % 8 for token in sample.tokens]
    return samples


def gradients_of_both_uses(path: Path, samples) -> list[torch.Tensor]:
    """Gradients of embedding and head of an untied copy."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    total = torch.zeros(())
    for sample in samples:
        logp = model(input_ids=torch.tensor([sample.tokens]), use_cache=False).logits[0].log_softmax(-1)
        rows = logp[sample.prompt_length - 1 : -1]
        picked = rows.gather(1, torch.tensor(sample.tokens[sample.prompt_length :])[:, None]).squeeze(1)
        mask = torch.tensor(sample.loss_mask, dtype=torch.float32)
        total = total - (picked * mask).sum() / mask.sum() / len(samples)
    total.backward()
    return [model.model.embed_tokens.weight.grad, model.lm_head.weight.grad]
