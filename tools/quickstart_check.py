"""The end of the quick start: shows the reward curve, writes `reward.png`, and says PASS or FAIL.

python tools/quickstart_check.py --run runs/quickstart/... --seconds 150
"""

import argparse
import sys
from pathlib import Path

from rlkit.observability.console import Console
from rlkit.observability.metrics import metric_series
from rlkit.observability.plots import plot_rewards

MAX_BEFORE = 0.5
"""Of `scripts/quickstart.sh`; other recipes pass their own."""
MIN_AFTER = 0.85
MIN_PROMPTS = 256
MAX_SECONDS = 300


def verdict(
    before: float,
    after: float,
    num_prompts: float,
    seconds: float,
    *,
    max_before: float = MAX_BEFORE,
    min_after: float = MIN_AFTER,
) -> list[str]:
    """What is wrong with the run; empty when it did what the quick start promises."""
    wrong: list[str] = []
    if before > max_before:
        wrong.append(f"the accuracy before training is {before:.3f}, above {max_before}")
    if after < min_after:
        wrong.append(f"the accuracy after training is {after:.3f}, below {min_after}")
    if num_prompts < MIN_PROMPTS:
        wrong.append(f"only {num_prompts:.0f} prompts were held out, fewer than {MIN_PROMPTS}")
    if seconds > MAX_SECONDS:
        wrong.append(f"training took {seconds:.0f} s, more than {MAX_SECONDS}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--seconds", type=float, required=True, help="wall-clock time of train.py, start to end")
    parser.add_argument("--max-before", type=float, default=MAX_BEFORE, help="accuracy (default: %(default)s)")
    parser.add_argument("--min-after", type=float, default=MIN_AFTER, help="accuracy (default: %(default)s)")
    args = parser.parse_args()
    console = Console()
    metrics = args.run / "metrics.jsonl"
    if not metrics.exists():
        console.say(f"FAIL: there is no {metrics}")
        return 1
    _, rewards = metric_series(metrics, "rollout/reward")
    _, scores = metric_series(metrics, "eval/heldout")
    _, num_prompts = metric_series(metrics, "eval/heldout/num_samples")
    if len(scores) < 2:
        console.say(f"FAIL: {metrics} holds {len(scores)} evaluations, two are needed")
        return 1
    console.show_curve(rewards, title="reward of each rollout (share of right answers at temperature 1)")
    plot_rewards(metrics, args.run / "reward.png", title="quick start")
    console.say(f"curve {args.run / 'reward.png'}, numbers {metrics}")
    limits = {"max_before": args.max_before, "min_after": args.min_after}
    wrong = verdict(scores[0], scores[-1], num_prompts[0], args.seconds, **limits)
    measured = f"greedy accuracy {scores[0]:.3f} -> {scores[-1]:.3f} on {num_prompts[0]:.0f} held-out prompts"
    if wrong:
        console.say(f"FAIL: {measured} in {args.seconds:.0f} s: {'; '.join(wrong)}")
        return 1
    console.say(f"PASS: {measured} in {args.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
