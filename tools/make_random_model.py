"""A checkpoint of a well-known shape with random weights, for timing and smoke tests where the real one is not at hand.

    python tools/make_random_model.py --shape qwen3-0.6B --tokenizer models/smollm2 --output runs/models/qwen3-0.6B
    python tools/make_random_model.py --shape qwen3-4B --vocab-size 49152 --device cuda --tokenizer ... --output ...

Writes what a hub would: `config.json`, `generation_config.json`, safetensors in bfloat16 and the tokenizer's files.
The tokenizer may know fewer tokens than the model (ids beyond it decode to nothing), never more. Complete output that
was made the same way is not made again.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

QWEN3_VOCAB = 151_936
MARKER = ".random.json"
"""What the folder was made from; written last, and hidden so that exports do not copy it."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Qwen3 architecture; numbers from the public `config.json` of the model that it is called after."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int = 8
    head_dim: int = 128
    tie_word_embeddings: bool = True
    num_experts: int = 0
    """0 is a dense model."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    max_position_embeddings: int = 40_960
    vocab_size: int = QWEN3_VOCAB


_TINY = Shape(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=1024,
    vocab_size=512,
)

SHAPES = {
    "qwen3-0.6B": Shape(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072),
    "qwen3-1.7B": Shape(hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144),
    "qwen3-4B": Shape(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728),
    "qwen3-8B": Shape(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        intermediate_size=12_288,
        tie_word_embeddings=False,
    ),
    "qwen3-30B-A3B": Shape(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=6144,
        tie_word_embeddings=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "tiny": _TINY,
    "tiny-moe": replace(_TINY, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6B", help="default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint; made if missing")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder whose tokenizer is copied")
    parser.add_argument("--vocab-size", type=int, help="default: that of the shape")
    parser.add_argument("--seed", type=int, default=0, help="of torch (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where weights are drawn, e.g. cuda (default: %(default)s)")
    args = parser.parse_args()
    make_model(args.shape, args.output, args.tokenizer, vocab_size=args.vocab_size, seed=args.seed, device=args.device)


def make_model(
    name: str, output: Path, tokenizer: Path, *, vocab_size: int | None = None, seed: int = 0, device: str = "cpu"
) -> None:
    """Write the checkpoint unless it is there. SystemExit with the reason when it cannot be made."""
    shape = SHAPES[name]
    made_from = {
        "shape": asdict(shape),
        "vocab_size": vocab_size or shape.vocab_size,
        "tokenizer": str(tokenizer.resolve()),
        "seed": seed,
        "device": device.split(":")[0],
    }
    output = output.resolve()
    marker = output / MARKER
    if marker.exists() and json.loads(marker.read_text()) == made_from:
        print(f"{output} is there already, made from the same shape and seed; nothing to do")
        return
    if output.exists() and any(output.iterdir()) and not marker.exists():
        raise SystemExit(f"{output} is not empty and was not made by this tool; choose another --output")
    began = time.perf_counter()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        ids = copy_tokenizer(tokenizer, folder, limit=made_from["vocab_size"])
        num_params = write_weights(shape, folder, ids, vocab_size=made_from["vocab_size"], seed=seed, device=device)
        (folder / MARKER).write_text(json.dumps(made_from, indent=2) + "\n")
        shutil.rmtree(output, ignore_errors=True)
        folder.rename(output)
    print(f"wrote {output}: {name}, {num_params:,} random parameters, {time.perf_counter() - began:.0f} s")


def copy_tokenizer(source: Path, target: Path, *, limit: int) -> dict[str, int | None]:
    """Copy its files; returns its special ids. SystemExit when there is none or it knows more than `limit` tokens."""
    from transformers import AutoTokenizer

    if not (source / "tokenizer_config.json").is_file():
        raise SystemExit(f"--tokenizer {source}: there is no tokenizer_config.json; name a folder with a tokenizer")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    tokenizer = AutoTokenizer.from_pretrained(target)
    if len(tokenizer) > limit:
        raise SystemExit(
            f"--tokenizer {source} knows {len(tokenizer)} tokens, more than the model's vocabulary of {limit}; "
            "raise --vocab-size or choose another tokenizer"
        )
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def write_weights(
    shape: Shape, folder: Path, ids: dict[str, int | None], *, vocab_size: int, seed: int, device: str
) -> int:
    """Draw the weights on `device` by the architecture's own initialisation; returns their number."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config(shape, ids, vocab_size), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder, max_shard_size="4GB")
    return sum(parameter.numel() for parameter in model.parameters())


def model_config(shape: Shape, ids: dict[str, int | None], vocab_size: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3MoeConfig

    common = {
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "dtype": torch.bfloat16,
        **ids,
    }
    if shape.num_experts == 0:
        return Qwen3Config(**common)
    return Qwen3MoeConfig(
        **common,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
        moe_intermediate_size=shape.moe_intermediate_size,
        norm_topk_prob=True,
    )


if __name__ == "__main__":
    main()
