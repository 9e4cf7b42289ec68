"""Model FLOP/s utilisation of a training step. Used by `train_step.py` and `gpu_floor.py`.

MFU = tokens/s x (6 (N_blocks + N_head) + 6 L d S) / rate, with L layers, d query width and S the length of a sequence.
Attention costs a token at position p 4 d p for forward, three times that with backward, and the mean p is S / 2: 6 L d
S. Recomputed activations do not count. `rate` is what a bf16 product of two 8192 x 8192 matrices reaches on this GPU
(float32 and 1024 on a CPU), measured in the same process.
"""

import json
import time
from pathlib import Path

import torch


def flops_per_token(model: Path, num_params: int, mean_length: float) -> float:
    """`model`: a checkpoint's folder; `num_params`: all of its parameters; `mean_length`: tokens of a sequence."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    embedding = config["vocab_size"] * config["hidden_size"]
    # the embedding is looked up, the head multiplied; tied, they are one matrix
    multiplied = num_params if config.get("tie_word_embeddings") else num_params - embedding
    return 6.0 * multiplied + 6.0 * config["num_hidden_layers"] * width * mean_length


def matmul_rate(device: str) -> float:
    """FLOP/s of a large square matrix product."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    for _ in range(3):
        _ = left @ right
    _wait(device)
    start = time.perf_counter()
    for _ in range(10):
        _ = left @ right
    _wait(device)
    return 10 * 2 * size**3 / (time.perf_counter() - start)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
