"""Arithmetic in words as prompt files: `What is seventeen plus five?` -> `22`.

    python tools/make_arithmetic_data.py --output runs/arithmetic

Writes `train.jsonl` and `heldout.jsonl` (columns `prompt`, a list of chat messages, and `label`); no problem is in
both.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
OPERATIONS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b}


def in_words(number: int) -> str:
    """English for 0 to 99."""
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


def problems(largest: int) -> list[tuple[str, int]]:
    """(question, answer) for every pair of 1 to `largest`; differences are never negative."""
    found = []
    for left in range(1, largest + 1):
        for right in range(1, largest + 1):
            for name, operation in OPERATIONS.items():
                if operation(left, right) >= 0:
                    found.append((f"What is {in_words(left)} {name} {in_words(right)}?", operation(left, right)))
    return found


def write(path: Path, rows: Sequence[tuple[str, int]]) -> None:
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": question}], "label": str(answer)})
        for question, answer in rows
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument(
        "--largest", type=int, default=20, choices=range(2, 100), metavar="2..99", help="largest operand"
    )
    parser.add_argument("--num-heldout", type=int, default=64, help="problems that are only evaluated")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    args = parser.parse_args()
    rows = problems(args.largest)
    if not 0 < args.num_heldout < len(rows):
        raise SystemExit(
            f"--num-heldout {args.num_heldout} must lie between 1 and {len(rows) - 1}, one less than there are problems"
        )
    random.Random(args.seed).shuffle(rows)
    args.output.mkdir(parents=True, exist_ok=True)
    write(args.output / "heldout.jsonl", rows[: args.num_heldout])
    write(args.output / "train.jsonl", rows[args.num_heldout :])
    print(f"{len(rows) - args.num_heldout} training and {args.num_heldout} held-out problems in {args.output}")


if __name__ == "__main__":
    main()
