"""The embedded engine takes the experts of a layer one by one, as checkpoints and the Megatron backend name them."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlkit.engines.embedded.weights import WeightStore
from rlkit.types.errors import EngineError


def tiny_experts(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=16,
            moe_intermediate_size=6,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            num_experts=3,
            num_experts_per_tok=2,
        )
    )


@pytest.fixture
def stored(tmp_path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: one matrix an expert."""
    from safetensors.torch import load_file

    tiny_experts(1).save_pretrained(tmp_path)
    return load_file(tmp_path / "model.safetensors")


def test_single_experts_fill_the_fused_parameters(stored):
    model, wanted = tiny_experts(0), tiny_experts(1)
    store = WeightStore(model)
    store.sleep()
    store.wake()
    store.load_all(list(stored.items()))
    assert store.stale == set()
    for (name, found), (_, expected) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_a_layer_without_one_of_its_experts_stays_stale(stored):
    store = WeightStore(tiny_experts(0))
    store.sleep()
    store.wake()
    store.load_all([(name, value) for name, value in stored.items() if ".1.mlp.experts.2.up_proj" not in name])
    assert store.stale == {"model.layers.1.mlp.experts.gate_up_proj"}


def test_a_folder_of_single_experts_is_complete(stored, tmp_path):
    model = tiny_experts(0)
    WeightStore(model).load_folder(tmp_path)
    assert torch.equal(
        model.model.layers[1].mlp.experts.down_proj, tiny_experts(1).model.layers[1].mlp.experts.down_proj
    )


def test_an_expert_of_another_shape_is_refused(stored):
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    with pytest.raises(EngineError, match=r"experts\.0\.gate_proj\.weight has shape"):
        WeightStore(tiny_experts(0)).load_all([(name, torch.zeros(3, 3))])
