"""Times a GRPO step on the CPU by phase, and compares it with TRL's `GRPOTrainer`.

    python tools/bench/cpu_step.py                              phases of rlkit's step, a model of 1 M parameters
    python tools/bench/cpu_step.py --workload tiny-short        the same with answers of 4 tokens, as in the quick start
    python tools/bench/cpu_step.py --workload smollm2 --compare 3       rlkit and TRL in turn, three rounds each

Both sides get the same model, prompts, lengths, batch, threads and reward. rlkit runs through `train.py` with its
engine, router and weight updates; TRL generates with transformers inside its trainer, in an environment of its own that
is made on demand (`--trl-venv`). Models are made on demand below `runs/bench`. Times are medians over the steps after
the warm-up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from workload import StepTimes, Workload

from rlkit.observability.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
BENCH_DIR = ROOT / "runs" / "bench"
TRL_PACKAGES = ["torch==2.13.0", "transformers==5.12.1", "trl==1.16.0"]
PHASES = ("generate", "grade", "pack", "train", "log_prob", "sync", "sleep", "wake")
ACCOUNTED = ("generate", "grade", "train", "sync")
"""What a step is for. The rest of it is overhead; `pack` and the turns of shared slots (`sleep`, `wake`) belong to
that rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=["tiny", "tiny-short", "smollm2"], default="tiny")
    parser.add_argument(
        "--compare",
        type=int,
        default=0,
        metavar="ROUNDS",
        help="alternate with TRL so many times (default: rlkit alone, once)",
    )
    parser.add_argument("--steps", type=int, help="steps of a round, the warm-up included")
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="threads of either side (default: all cores, %(default)s)",
    )
    parser.add_argument(
        "--trl-venv",
        type=Path,
        default=ROOT / ".venv-trl",
        help="TRL's environment; made if missing (default: .venv-trl)",
    )
    args = parser.parse_args()
    load = make_workload(args.workload, num_threads=args.threads)
    load = replace(load, num_steps=args.steps) if args.steps else load
    if load.num_steps <= load.num_warmup_steps:
        parser.error(f"--steps {load.num_steps} leaves nothing after the {load.num_warmup_steps} warm-up steps")
    folder = BENCH_DIR / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    size = (
        f"{load.num_prompts} prompts x {load.samples_per_prompt} samples, at most {load.max_response_len} tokens each"
    )
    count = f"{load.num_steps} steps ({load.num_warmup_steps} warm-up), {load.num_threads} threads"
    print(f"{load.name}: {size}, {count}; runs in {folder}", flush=True)
    trl_python = provide_trl(args.trl_venv) if args.compare else None
    ours: list[StepTimes] = []
    theirs: list[StepTimes] = []
    for number in range(max(1, args.compare)):
        run_dir = folder / f"rlkit-{number}"
        run_rlkit(load, run_dir)
        print_phases(load, run_dir)
        ours += rlkit_times(load, run_dir)
        if trl_python is not None:
            theirs += run_trl(load, trl_python, folder / f"trl-{number}")
    if theirs:
        print_comparison(ours, theirs)


def make_workload(name: str, *, num_threads: int) -> Workload:
    """The fixed recipe of that name; makes its model and prompts unless they are there."""
    if name in ("tiny", "tiny-short"):
        is_long = name == "tiny"
        model = BENCH_DIR / name
        make("make_tiny_model.py", "--output", str(model), *(["--untrained"] if is_long else []))
        return Workload(
            name=name,
            model=str(model),
            prompts=str(model / "data" / "train.jsonl"),
            num_prompts=16 if is_long else 32,
            samples_per_prompt=8,
            max_response_len=128 if is_long else 8,
            num_steps=13 if is_long else 23,
            num_warmup_steps=3,
            num_threads=num_threads,
        )
    model, data = BENCH_DIR / "smollm2", BENCH_DIR / "arithmetic"
    make("get_smollm2.py", "--output", str(model))
    make("make_arithmetic_data.py", "--output", str(data))
    return Workload(
        name=name,
        model=str(model),
        prompts=str(data / "train.jsonl"),
        num_prompts=8,
        samples_per_prompt=4,
        max_response_len=64,
        num_steps=4,
        num_warmup_steps=1,
        num_threads=num_threads,
    )


def make(tool: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / tool), *arguments], check=True)


def provide_trl(venv: Path) -> Path:
    """The Python of an environment that holds TRL."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    wanted = ";".join(
        f"assert version({name!r}).split('+')[0] == {number!r}"
        for name, number in (p.split("==") for p in TRL_PACKAGES)
    )
    if subprocess.run(
        [python, "-c", f"from importlib.metadata import version;{wanted}"], capture_output=True
    ).returncode:
        print(f"installing {' '.join(TRL_PACKAGES)} into {venv}", flush=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TRL_PACKAGES], check=True
        )
    return python


def run_rlkit(load: Workload, run_dir: Path) -> None:
    """One run of `train.py`; its console goes to `<run_dir>.log`."""
    flags = [
        *("--hf-checkpoint", load.model, "--prompt-data", load.prompts),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
        *("--custom-rm-path", f"{Path(__file__).parent / 'workload.py'}:reward"),
        *("--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "1", "--colocate", "--device", "cpu"),
        *("--num-rollout", str(load.num_steps), "--rollout-batch-size", str(load.num_prompts)),
        *("--n-samples-per-prompt", str(load.samples_per_prompt), "--num-steps-per-rollout", "1"),
        *("--rollout-max-response-len", str(load.max_response_len), "--lr", str(load.lr)),
        *("--embedded-max-running-requests", str(load.num_samples), "--output-dir", str(run_dir)),
    ]
    run_logged([sys.executable, str(ROOT / "train.py"), *flags], run_dir.with_suffix(".log"))


def run_trl(load: Workload, python: Path, prefix: Path) -> list[StepTimes]:
    """One run of TRL: the times of its steps after the warm-up."""
    given, taken = prefix.with_suffix(".workload.json"), prefix.with_suffix(".times.json")
    given.write_text(json.dumps(asdict(load)))
    run_logged(
        [str(python), str(Path(__file__).parent / "trl_step.py"), str(given), str(taken)], prefix.with_suffix(".log")
    )
    return [StepTimes(**step) for step in json.loads(taken.read_text())][load.num_warmup_steps :]


def run_logged(command: list[str], log: Path) -> None:
    """SystemExit with the end of the log if the command fails."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",  # as rlkit sets for its own processes
    }
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        raise SystemExit(f"exit {code}: {' '.join(command)}\n{log}:\n" + "\n".join(log.read_text().splitlines()[-25:]))


def step_rows(load: Workload, run_dir: Path) -> list[dict[str, float]]:
    """The metrics of the steps after the warm-up."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "time/step_s" in row]
    return rows[load.num_warmup_steps :]


def rlkit_times(load: Workload, run_dir: Path) -> list[StepTimes]:
    return [
        StepTimes(
            total=row["time/step_s"],
            generate=row["time/generate_s"],
            train=row["time/train_s"],
            response_tokens=row["rollout/response_length"] * row["rollout/num_samples"],
        )
        for row in step_rows(load, run_dir)
    ]


def overhead_share(rows: Sequence[dict[str, float]]) -> float:
    """Share of all steps' time outside generation, grading, training and weight update."""
    total = sum(row["time/step_s"] for row in rows)
    return 1.0 - sum(row.get(f"time/{phase}_s", 0.0) for row in rows for phase in ACCOUNTED) / total


def print_phases(load: Workload, run_dir: Path) -> None:
    rows = step_rows(load, run_dir)
    step = statistics.median(row["time/step_s"] for row in rows)
    print(f"rlkit, {len(rows)} steps: median {step:.3f} s", flush=True)
    for phase in PHASES:
        seconds = statistics.median(row.get(f"time/{phase}_s", 0.0) for row in rows)
        print(f"  {phase:<10}{seconds:8.3f} s {100 * seconds / step:6.1f} %")
    print(f"  outside generate, grade, train and sync, over all steps: {100 * overhead_share(rows):.1f} %", flush=True)


def print_comparison(ours: Sequence[StepTimes], theirs: Sequence[StepTimes]) -> None:
    print(f"{'median of a step':<26}{'rlkit':>10}{'TRL':>10}{'TRL / rlkit':>13}")
    for name in ("generate", "train", "total"):
        a, b = (statistics.median(getattr(step, name) for step in side) for side in (ours, theirs))
        print(f"{name + ' [s]':<26}{a:>10.3f}{b:>10.3f}{b / a:>13.2f}")
    a, b = (statistics.mean(step.response_tokens for step in side) for side in (ours, theirs))
    print(f"{'response tokens (mean)':<26}{a:>10.0f}{b:>10.0f}")
    a, b = (sum(step.response_tokens for step in side) / sum(step.total for step in side) for side in (ours, theirs))
    print(f"{'response tokens/s':<26}{a:>10.0f}{b:>10.0f}{a / b:>13.2f}  (rlkit / TRL)", flush=True)


if __name__ == "__main__":
    main()
