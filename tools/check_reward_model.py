"""Compares the scores of a reward model's server with those of transformers, row by row.

    python tools/check_reward_model.py --make-random runs/rm --tokenizer FOLDER      a random model to try it with
    python -m sglang.launch_server --model-path runs/rm --is-embedding --port 30100
    python tools/check_reward_model.py --model-path runs/rm --url http://127.0.0.1:30100

The last lines are a table; the exit status is 1 where a score differs by more than `--tolerance`.
"""

import argparse
import json
import random
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, help="folder of the model that the server serves")
    parser.add_argument("--url", help="of the server")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=100, help="tokens of a row")
    parser.add_argument("--tolerance", type=float, default=0.05, help="for bfloat16 (default: %(default)s)")
    parser.add_argument("--make-random", type=Path, metavar="FOLDER", help="write a random model there and end")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer files the random model gets")
    args = parser.parse_args(argv)
    if args.make_random is not None:
        make_random(args.make_random, args.tokenizer)
        return 0
    if args.model_path is None or args.url is None:
        parser.error("pass --model-path and --url, or --make-random")
    return compare(args.model_path, args.url, args.rows, args.max_length, args.tolerance)


def make_random(folder: Path, tokenizer: Path | None) -> None:
    """A Qwen3 with a head of one number, of a shape that GPU kernels take."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    if tokenizer is None:
        raise SystemExit("--make-random needs --tokenizer FOLDER: servers tokenise by the model's own tokenizer")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(tokenizer)),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        dtype=torch.bfloat16,
    )
    config.num_labels = 1
    model: Any = Qwen3ForSequenceClassification(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in tokenizer.iterdir():
        if "token" in file.name or file.name in ("vocab.json", "merges.txt", "chat_template.jinja"):
            shutil.copy(file, folder / file.name)


def compare(model_path: Path, url: str, num_rows: int, max_length: int, tolerance: float) -> int:
    import torch
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(model_path, dtype=torch.float32).eval()
    rng = random.Random(0)
    size = int(model.config.get_text_config().vocab_size)
    rows = [[rng.randrange(size) for _ in range(rng.randint(1, max_length))] for _ in range(num_rows)]
    with torch.no_grad():
        # one row at a time, and the head by hand: no padding, and no search for a row's end
        hidden = [model.base_model(input_ids=torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        expected = [model.score(state).item() for state in hidden]
    request = urllib.request.Request(
        f"{url.rstrip('/')}/classify",
        data=json.dumps({"input_ids": rows}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        found = [row["embedding"][0] for row in json.load(answer)]
    differences = [abs(a - b) for a, b in zip(expected, found, strict=True)]
    spread = max(expected) - min(expected)
    is_same = max(differences) <= tolerance
    print(f"rows {num_rows}, scores from {min(expected):.3f} to {max(expected):.3f}")
    print(f"largest difference {max(differences):.6f} ({max(differences) / spread:.2%} of the spread)")
    print("PASS" if is_same else f"FAIL: more than --tolerance {tolerance:g}")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
