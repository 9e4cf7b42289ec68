"""Times synchronous, one-step-ahead and never-stopping training on the same resources: a trainer and an engine side by
side, responses of log-normal lengths.

    python tools/bench/async.py                       two rounds of all three, on two cores one each
    python tools/bench/async.py --rounds 4 --steps 20 --max-staleness 1

All run the same model, prompts, lengths, seeds and batch, with `--custom-generate-function-path` as the one source of
lengths. The comparison says something only where generation and training take about the same time in the synchronous
run; their ratio is printed, and called out beyond 1.3. Modes alternate inside a round, because other programs on the
machine slow all of them down. The model is made on demand below `runs/bench`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_step import BENCH_DIR, ROOT, make, run_logged

from rlkit.observability.metrics import read_metrics

WORKLOAD = Path(__file__).parent / "async_workload.py"
SYNCHRONOUS = "synchronous"
BALANCED = 1.3
"""Largest ratio of the two sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    name: str
    program: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Of one run, without its warm-up."""

    samples_per_s: float
    step_s: float
    """Mean."""
    generate_s: float
    train_s: float
    trainer_bubble: float
    engine_bubble: float
    staleness_mean: float
    staleness_max: float
    num_dropped: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all modes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run, with the warm-up (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=4, help="first steps that do not count (default: %(default)s)")
    parser.add_argument("--max-staleness", type=int, default=2, help="of the run that never stops (default: 2)")
    parser.add_argument("--prompts", type=int, default=16, help="a step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="a prompt (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a response (default: %(default)s)")
    args, more = parser.parse_known_args()
    if args.steps <= args.warmup:
        parser.error(f"--steps {args.steps} leaves nothing after the {args.warmup} warm-up steps")
    model = BENCH_DIR / "tiny"
    make("make_tiny_model.py", "--output", str(model), "--untrained")
    folder = BENCH_DIR / f"async-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    print(f"{args.prompts} prompts x {args.samples} samples, {args.steps} steps; runs in {folder}", flush=True)
    results: dict[str, list[Result]] = {}
    for number in range(args.rounds):
        for mode in modes(args.max_staleness):
            run_dir = folder / f"{mode.name.replace(' ', '-')}-{number}"
            run(mode, model, run_dir, args, more)
            result = summary(run_dir, args.warmup)
            results.setdefault(mode.name, []).append(result)
            print(f"  round {number}: {mode.name:<14}{result.samples_per_s:8.1f} samples/s", flush=True)
    print("\n".join(table(results)), flush=True)


def modes(max_staleness: int) -> tuple[Mode, ...]:
    full = ("--async-mode", "full", "--max-staleness", str(max_staleness))
    return (
        Mode(name=SYNCHRONOUS, program="train.py"),
        Mode(name="one step ahead", program="train_async.py"),
        Mode(name="never stopping", program="train_async.py", flags=full),
    )


def run(mode: Mode, model: Path, run_dir: Path, args: argparse.Namespace, more: Sequence[str]) -> None:
    """One run; its console goes to `<run_dir>.log`."""
    flags = [
        *("--hf-checkpoint", str(model), "--prompt-data", str(model / "data" / "train.jsonl")),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
        *("--custom-rm-path", f"{WORKLOAD}:reward", "--custom-generate-function-path", f"{WORKLOAD}:generate"),
        *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--num-gpus-per-node", "2", "--device", "cpu"),
        *("--num-rollout", str(args.steps), "--rollout-batch-size", str(args.prompts)),
        *("--n-samples-per-prompt", str(args.samples), "--rollout-max-response-len", str(args.longest)),
        *("--rollout-ignore-eos", "--lr", "1e-6", "--save-interval", "100000", "--use-tis"),
        *("--embedded-max-running-requests", str(args.prompts * args.samples)),
        *("--sglang-server-concurrency", str(args.prompts * args.samples), "--output-dir", str(run_dir)),
    ]
    run_logged([sys.executable, str(ROOT / mode.program), *flags, *mode.flags, *more], run_dir.with_suffix(".log"))


def summary(run_dir: Path, num_warmup_steps: int) -> Result:
    """Samples over the wall time of the steps that count. A step lasts from asking for its batch to the end of the
    weight update, and the next one begins at once, so that nothing is left out."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "time/step_s" in row][num_warmup_steps:]

    def mean(name: str) -> float:
        return statistics.mean(row.get(name, 0.0) for row in rows)

    return Result(
        samples_per_s=sum(row["rollout/num_samples"] for row in rows) / sum(row["time/step_s"] for row in rows),
        step_s=mean("time/step_s"),
        generate_s=mean("time/generate_s"),
        train_s=mean("time/train_s"),
        trainer_bubble=mean("bubble/trainer"),
        engine_bubble=mean("bubble/engines"),
        staleness_mean=mean("staleness/mean"),
        staleness_max=max(row["staleness/max"] for row in rows),
        num_dropped=sum(row["rollout/groups_dropped"] for row in rows),
    )


def table(results: dict[str, list[Result]]) -> list[str]:
    """Medians over the rounds; ratios are those of each round's own synchronous run."""
    lines = [
        "",
        f"{'':<16}{'samples/s':>10}{'ratio':>7}{'(of rounds)':>16}{'step':>8}{'train':>8}"
        f"{'trainer idle':>14}{'engine idle':>13}{'staleness':>12}{'dropped':>9}",
    ]
    base = results[SYNCHRONOUS]
    for name, rounds in results.items():
        ratios = [result.samples_per_s / other.samples_per_s for result, other in zip(rounds, base, strict=True)]
        middle = {field: statistics.median(getattr(result, field) for result in rounds) for field in Result.__slots__}
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        age = f"{middle['staleness_mean']:.2f} / {middle['staleness_max']:.0f}"
        lines.append(
            f"{name:<16}{middle['samples_per_s']:>10.1f}{statistics.median(ratios):>7.2f}{spread:>16}"
            f"{middle['step_s']:>7.2f}s{middle['train_s']:>7.2f}s{middle['trainer_bubble']:>14.0%}"
            f"{middle['engine_bubble']:>13.0%}{age:>12}{middle['num_dropped']:>9.0f}"
        )
    sides = statistics.median(result.generate_s / result.train_s for result in base)
    told = "" if 1 / BALANCED <= sides <= BALANCED else f": beyond {BALANCED}, so one side waits whatever the mode"
    lines.append(f"synchronous: generation takes {sides:.2f} times as long as training{told}")
    return lines


if __name__ == "__main__":
    main()
