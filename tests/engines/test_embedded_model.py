import pytest
import torch
from tiny_model import make_model
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config

from rlkit.engines.embedded.attention import ATTENTION_NAME, register
from rlkit.engines.embedded.kv_cache import SlotCache
from rlkit.engines.embedded.model import ModelRunner, PromptPiece
from rlkit.types.errors import EngineError

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def make_runner(model, *, max_slots: int = 8) -> ModelRunner:
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    return ModelRunner(model.eval(), max_slots=max_slots, context_length=128)


@torch.inference_mode()
def reference(model, ids: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION_NAME)
    return logits


@torch.inference_mode()
def test_ragged_prefill_in_pieces_and_batched_decode_equal_plain_forwards():
    model = make_model(seed=0, tie=True, vocab_size=264)
    runner = make_runner(model)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 264, (length,), generator=generator).tolist() for length in (9, 30, 9, 17)]
    known = [5, 20, 5, 1]  # tokens that are prefilled; the rest is decoded
    runner.cache.reserve(4, 40)
    whole = [
        PromptPiece(slot=slot, tokens=ids[:count], start=0, logit_rows=[count - 1])
        for slot, (ids, count) in enumerate(zip(sequences, known, strict=True))
        if slot != 1
    ]
    logits = runner.prefill([whole[0], whole[1], whole[2]])
    first = [
        PromptPiece(slot=1, tokens=sequences[1][:8], start=0, logit_rows=[]),
        PromptPiece(slot=1, tokens=sequences[1][8:20], start=8, logit_rows=[0, 11]),
    ]
    runner.prefill(first[:1])
    second = runner.prefill(first[1:])
    expected = [reference(model, ids) for ids in sequences]
    torch.testing.assert_close(logits[0], expected[0][4], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[1], expected[2][4], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[2], expected[3][0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(second, expected[1][[8, 19]], atol=2e-5, rtol=1e-4)
    for step in range(4):
        lengths = [count + step for count in known]
        tokens = [ids[length] for ids, length in zip(sequences, lengths, strict=True)]
        rows = runner.decode(tokens, lengths)
        for row, length, table in zip(rows, lengths, expected, strict=True):
            torch.testing.assert_close(row, table[length], atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_long_and_short_contexts_take_both_decode_kernels():
    model = make_model(seed=0, tie=True, vocab_size=264)
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    runner = ModelRunner(model, max_slots=2, context_length=512)
    generator = torch.Generator().manual_seed(1)
    for length in (255, 256, 300):  # the new token makes 256, 257 and 301
        ids = torch.randint(0, 264, (length + 1,), generator=generator).tolist()
        runner.cache.reserve(2, length + 1)
        runner.prefill([PromptPiece(slot=0, tokens=ids[:-1], start=0, logit_rows=[])])
        runner.prefill([PromptPiece(slot=1, tokens=ids[:3], start=0, logit_rows=[])])
        rows = runner.decode([ids[-1], ids[3]], [length, 3])
        expected = reference(model, ids)
        torch.testing.assert_close(rows[0], expected[-1], atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(rows[1], expected[3], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_key_value_heads=4),
        LlamaConfig(**SMALL, num_key_value_heads=1),
        Qwen2Config(**SMALL, num_key_value_heads=2),
        MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4),
    ],
    ids=["llama", "llama one key head", "qwen2", "mistral sliding window"],
)
def test_architectures_that_it_serves(config):
    torch.manual_seed(0)
    runner = make_runner(AutoModelForCausalLM.from_config(config))
    num_bytes = runner.check_against_transformers()
    head_size = 32 // 4
    assert num_bytes == 2 * 2 * config.num_key_value_heads * head_size * 4
    assert runner.cache.num_bytes == 0


def test_architectures_that_it_refuses():
    config = Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=50.0)
    runner = make_runner(AutoModelForCausalLM.from_config(config))
    with pytest.raises(EngineError, match=r"gemma2.*softcap.*use SGLang"):
        runner.check_against_transformers()


def test_a_growing_cache_keeps_what_it_holds():
    cache = SlotCache(max_slots=8, max_length=300)
    cache.reserve(2, 10)
    keys, values = cache.layer(0, torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 5))
    assert keys.shape == (2, 3, 64, 4) and values.shape == (2, 3, 64, 5)
    keys[:, :, :10] = torch.randn(2, 3, 10, 4)
    before = keys.clone()
    cache.reserve(3, 100)
    grown, _ = cache.layer(0, keys, values)
    assert grown.shape[0] >= 3 and grown.shape[2] >= 100
    assert torch.equal(grown[:2, :, :64], before)
    assert (grown[2:] == 0).all() and (grown[:, :, 64:] == 0).all()
    cache.copy_slot(0, [1, 2], 10)
    assert torch.equal(grown[1, :, :10], before[0, :, :10]) and torch.equal(grown[2, :, :10], before[0, :, :10])
    cache.reserve(8, 300)
    assert (cache.num_slots, cache.length) == (8, 300)
    cache.free()
    assert cache.num_bytes == 0


def test_a_cache_at_its_limit_holds_what_is_needed_and_no_more():
    """Many short sequences, then a few long ones: the block must not be as wide as the one and as long as the other."""
    cache = SlotCache(max_slots=64, max_length=4096)
    cache.max_tokens = 6000
    cache.reserve(60, 90)
    keys, _ = cache.layer(0, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    assert keys.shape[0] * keys.shape[2] <= 60 * 128
    keys[:2, :, :90] = 1.0
    cache.reserve(2, 2500)
    grown, _ = cache.layer(0, keys, keys)
    assert grown.shape[0] * grown.shape[2] <= 6000
    assert (grown[:2, :, :90] == 1.0).all() and (grown[:2, :, 128:] == 0).all()
