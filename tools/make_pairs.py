"""Preference pairs of the tiny model's sums, for DPO: chosen is the right sum, rejected the one without its carry.

python tools/make_pairs.py --prompts runs/quickstart/tiny-0/data/train.jsonl --output pairs.jsonl
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with `prompt` and an integer `label`")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    print(f"wrote {write_pairs(args.prompts, args.output)} pairs to {args.output}")


def write_pairs(prompts: Path, path: Path) -> int:
    """Rows of `prompt`, `chosen` and `rejected`, which is 10 too small; returns how many."""
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    pairs = [{"prompt": row["prompt"], "chosen": row["label"], "rejected": str(int(row["label"]) - 10)} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return len(pairs)


if __name__ == "__main__":
    main()
