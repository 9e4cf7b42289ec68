"""Trains the tiny model with every algorithm through the whole loop and says what it learned: slow, minutes each.

    python tools/bench/learning_curves.py --output-dir runs/curves --model runs/quickstart/tiny-0 grpo ppo sft dpo
    python tools/bench/learning_curves.py --output-dir runs/curves --table

Each algorithm starts from the same half-knowledge of sums (`make_tiny_model.py`, made if it is not there) and is
measured by its greedy accuracy on the same held-out sums. Results stand in `<output-dir>/<algorithm>.json`; `--table`
prints all of them as Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_STEPS = 24
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What one algorithm adds to the common flags, and the metric that shows it at work."""

    flags: tuple[str, ...]
    shown: str
    num_steps: int = NUM_STEPS


SAMPLES = ("--n-samples-per-prompt", "8")
DECAY = ("--lr-decay-style", "linear", "--min-lr", "1e-4")
POLICY = (*SAMPLES, "--num-steps-per-rollout", "2", "--lr", "1e-3", *DECAY, "--lr-warmup-iters", "6")
WHITENED = ("--normalize-advantages", "--calculate-per-token-loss")

RECIPES = {
    "grpo": Recipe(flags=(*POLICY, "--eps-clip-high", "0.28"), shown="rollout/reward"),
    "gspo": Recipe(
        flags=(*POLICY, "--advantage-estimator", "gspo", "--eps-clip", "0.1", "--eps-clip-high", "0.15"),
        shown="rollout/reward",
    ),
    "cispo": Recipe(
        flags=(*POLICY, "--advantage-estimator", "cispo", "--eps-clip", "1", "--eps-clip-high", "0.28"),
        shown="rollout/reward",
    ),
    "rloo": Recipe(flags=(*POLICY, "--advantage-estimator", "rloo"), shown="rollout/reward"),
    "reinforce_plus_plus": Recipe(
        flags=(*POLICY, "--advantage-estimator", "reinforce_plus_plus", *WHITENED), shown="rollout/reward"
    ),
    "ppo": Recipe(
        flags=(
            *(*POLICY, "--advantage-estimator", "ppo", *WHITENED, "--lambd", "0.95"),
            *("--critic-lr", "1e-3", "--num-critic-only-steps", "3"),
        ),
        shown="rollout/reward",
    ),
    "sft": Recipe(
        flags=("--loss-type", "sft_loss", "--calculate-per-token-loss", "--label-key", "label", "--lr", "1e-3", *DECAY),
        shown="train/loss",
        num_steps=80,
    ),
    "dpo": Recipe(
        flags=("--loss-type", "dpo_loss", "--n-samples-per-prompt", "2", "--dpo-beta", "0.3", "--lr", "3e-4", *DECAY),
        shown="train/dpo_margin",
        num_steps=80,
    ),
}
SUPERVISED = ("sft", "dpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one algorithm came to."""

    algorithm: str
    flags: list[str]
    num_steps: int
    before: float
    """Greedy accuracy on held-out sums."""
    after: float
    shown: str
    curve: list[float]
    """The metric `shown`, of every step."""
    seconds: float
    """From start to end of the processes, evaluations included."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="made by make_tiny_model.py; unset: <output-dir>/tiny-0")
    parser.add_argument("--seed", type=int, default=0, help="of the samples, and of a model that has to be made")
    parser.add_argument("--table", action="store_true", help="print what was measured so far, train nothing")
    args = parser.parse_args()
    if unknown := set(args.algorithms) - RECIPES.keys():
        parser.error(f"unknown algorithms: {', '.join(sorted(unknown))}")
    if args.table:
        print("\n".join(table(args.output_dir)))
        return 0
    model: Path = args.model or args.output_dir / f"tiny-{args.seed}"
    if not (model / "config.json").is_file():
        tool = ROOT / "tools" / "make_tiny_model.py"
        subprocess.run([sys.executable, tool, "--output", model, "--seed", str(args.seed)], check=True)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name in args.algorithms or RECIPES:
        result = learn(name, model, args.output_dir, seed=args.seed)
        (args.output_dir / f"{name}.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
        print(
            f"{name}: greedy accuracy {result.before:.3f} -> {result.after:.3f} in {result.seconds:.0f} s", flush=True
        )
    return 0


def learn(name: str, model: Path, output: Path, *, seed: int) -> Result:
    recipe = RECIPES[name]
    began = time.perf_counter()
    run = output / f"{name}-{time.strftime('%H%M%S')}"
    data = model / "data" / "train.jsonl"
    if name == "dpo":
        pairs = output / "pairs.jsonl"
        subprocess.run(
            [sys.executable, ROOT / "tools" / "make_pairs.py", "--prompts", data, "--output", pairs], check=True
        )
        data = pairs
    flags = [
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--input-key", "prompt", "--apply-chat-template"),
        *("--rollout-shuffle", "--rollout-seed", str(seed), "--rollout-batch-size", "64"),
        *("--num-rollout", str(recipe.num_steps)),
        *recipe.flags,
    ]
    if name in SUPERVISED:
        export = run / "export"
        launch([*flags, "--save-hf", str(export)], run)
        before, after = accuracy_before(model, output), greedy_accuracy(export, model, run / "after")
    else:
        launch([*flags, "--label-key", "label", "--rm-type", "exact", *evaluation(model, recipe.num_steps)], run)
        scores = series(run, "eval/heldout")
        before, after = scores[0], scores[-1]
    return Result(
        algorithm=name,
        flags=flags,
        num_steps=recipe.num_steps,
        before=before,
        after=after,
        shown=recipe.shown,
        curve=series(run, recipe.shown),
        seconds=time.perf_counter() - began,
    )


def launch(flags: Sequence[str], run: Path) -> None:
    """One run of train.py; its errors are ours."""
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--output-dir", str(run), *PLACE]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})


PLACE = (
    *("--device", "cpu", "--colocate", "--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "1"),
    *("--rollout-max-response-len", "8", "--embedded-max-running-requests", "256"),
)


def evaluation(model: Path, interval: int) -> tuple[str, ...]:
    held_out = str(model / "data" / "heldout.jsonl")
    return (
        *("--eval-interval", str(interval), "--eval-prompt-data", "heldout", held_out),
        *("--eval-temperature", "0"),
    )


def accuracy_before(model: Path, output: Path) -> float:
    """Of the model that all start from; measured once."""
    known = output / f"before-{model.name}.json"
    if not known.is_file():
        known.write_text(json.dumps(greedy_accuracy(model, model, output / f"before-{model.name}")))
    return json.loads(known.read_text())


def greedy_accuracy(checkpoint: Path, model: Path, run: Path) -> float:
    """By a run that only evaluates: one without engines cannot."""
    flags = (
        *("--hf-checkpoint", str(checkpoint), "--num-rollout", "0", "--rm-type", "exact"),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
    )
    launch([*flags, *evaluation(model, 1)], run)
    return series(run, "eval/heldout")[-1]


def series(run: Path, name: str) -> list[float]:
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row[name] for row in rows if name in row]


def table(output: Path) -> list[str]:
    lines = ["| algorithm | steps | held-out accuracy | curve | seconds |", "|---|---|---|---|---|"]
    for name in RECIPES:
        path = output / f"{name}.json"
        if path.is_file():
            result = Result(**json.loads(path.read_text(encoding="utf-8")))
            curve = f"`{result.shown}` {result.curve[0]:.2f} {sparkline(result.curve)} {result.curve[-1]:.2f}"
            gain = f"{result.before:.3f} -> {result.after:.3f}"
            lines.append(f"| {name} | {result.num_steps} | {gain} | {curve} | {result.seconds:.0f} |")
    return lines


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """At most `width` bars, each the mean of a stretch, between the smallest and the largest of them."""
    count = min(width, len(values))
    edges = [round(number * len(values) / count) for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


if __name__ == "__main__":
    sys.exit(main())
