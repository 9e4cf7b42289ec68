"""A random Qwen3 of 0.2 million parameters with a byte-level tokenizer, as a Hugging Face folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, PAD, SPECIAL, SPARE = "<|end|>", "<|pad|>", "<|special|>", "<|spare|>"
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("o", "n")]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """264 tokens: every byte, and a few merges, so that a text can be spelled in more than one way."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD, SPECIAL, SPARE])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def make_model(*, seed: int, tie: bool, vocab_size: int) -> Qwen3ForCausalLM:
    """Weights large enough for log-probs to differ visibly between tokens and between seeds."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def save_model(folder: Path, *, seed: int, tie: bool) -> Path:
    """The folder, complete with tokenizer and `generation_config.json`."""
    tokenizer = make_tokenizer()
    model = make_model(seed=seed, tie=tie, vocab_size=len(tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
