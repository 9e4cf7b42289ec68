"""Says whether a short run did what it should: weights moved, arrived in the engines, and were saved.

    python tools/check_smoke_run.py --run runs/smoke/x --steps 3 --export runs/smoke/x/hf-2

The run must have had `--check-weight-update-equal`. Prints what was looked at; status 1 and a line a problem otherwise.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rlkit.observability.metrics import read_metrics
from rlkit.orchestration.checkpoints import find_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--steps", type=int, required=True, help="steps that it should have taken")
    parser.add_argument("--export", type=Path, required=True, help="Hugging Face export that it should have left")
    parser.add_argument("--max-logprob-diff", type=float, default=0.03, help="mean over a step (default: %(default)s)")
    args = parser.parse_args()
    rows = [row for row in read_metrics(args.run / "metrics.jsonl") if "time/step_s" in row]
    problems = [
        *training_problems(rows, args.steps, args.max_logprob_diff),
        *config_problems(args.run),
        *saved_problems(args.run, args.steps, args.export),
    ]
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        largest = max(row["train/train_rollout_logprob_abs_diff"] for row in rows)
        print(
            f"PASS: {args.steps} steps, every weight update verified byte for byte, mean log-prob difference at most "
            f"{largest:.2g}, checkpoint and export complete"
        )
    return 1 if problems else 0


def training_problems(rows: list[dict[str, Any]], steps: int, max_diff: float) -> list[str]:
    found = []
    if [row["step"] for row in rows] != list(range(steps)):
        found.append(f"steps {[row['step'] for row in rows]} were reported instead of 0 to {steps - 1}")
    for row in rows:
        where = f"step {row['step']}"
        norm, diff = row.get("train/grad_norm"), row.get("train/train_rollout_logprob_abs_diff")
        if not norm:
            found.append(f"{where}: gradient norm {norm}, so no weight moved")
        if diff is None or diff > max_diff:
            found.append(f"{where}: engine and trainer differ by {diff} in log-probs, more than {max_diff}")
        if not row.get("sync/num_bytes"):
            found.append(f"{where}: no weights were sent to the engines")
    return found


def config_problems(run: Path) -> list[str]:
    """A run that compares checksums after each update raises where they differ, so it is enough that it did compare."""
    config: dict[str, Any] = json.loads((run / "config.json").read_text())
    if config["sync"]["check_weight_update_equal"]["value"] is not True:
        return ["the run did not compare weights after its updates (--check-weight-update-equal)"]
    return []


def saved_problems(run: Path, steps: int, export: Path) -> list[str]:
    found = []
    checkpoint = find_checkpoint(run / "checkpoints")
    if checkpoint is None or checkpoint.meta.step != steps - 1:
        found.append(f"{run / 'checkpoints'} holds no complete checkpoint of step {steps - 1}")
    for pattern in ("config.json", "tokenizer_config.json", "*.safetensors"):
        if not any(export.glob(pattern)):
            found.append(f"{export} holds no {pattern}")
    return found


if __name__ == "__main__":
    sys.exit(main())
