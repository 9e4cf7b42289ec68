"""Estimated beside measured memory on a GPU, for the fixed workloads of `gpu_step.py`. Unattended; a table comes last.

    python tools/bench/gpu_memory.py --tokenizer models/smollm2 --prompts gsm8k_train.jsonl
    python tools/bench/gpu_memory.py ... --workloads W1 --loop       also the GPU as a whole, from 4 steps of the loop

`--probe` of `train.py` measures the trainer: a step on the longest packs, and a weight update. With `--loop`,
`gpu_step.py` runs the whole loop, and the largest use of the GPU while generating and while training is compared too.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_workloads import WORKLOADS, GpuWorkload, train_flags

from rlkit.algo.memory_plan import GIB
from rlkit.algo.phase_memory import plan_memory
from rlkit.cli.dry_run_phases import planned_hardware, policy_shape
from rlkit.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
TARGET = 0.10
ROW = re.compile(r"^(\S+)\s+([\d.]+) GiB\s+([\d.]+) GiB")


def main() -> int:
    args = parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.workloads:
        load = WORKLOADS[name]
        model = args.output / "models" / f"{load.shape}-{load.vocab_size}"
        make_model(load, model, args.tokenizer)
        flags = [
            *train_flags(load, model=model, prompts=args.prompts, device="cuda", rm=("--rm-type", "math")),
            *("--num-rollout", "4", "--output-dir", str(args.output / name)),
        ]
        rows += probe(name, flags, args.limit_s)
        if args.loop:
            rows += whole_loop(name, flags, args)
        (args.output / "memory.json").write_text(json.dumps(rows, indent=2))
    print_rows(rows)
    return 0 if rows and all(abs(row["error"]) <= TARGET for row in rows if "error" in row) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["W1", "W3"])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "bench" / "memory")
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--limit-s", type=float, default=420.0, help="for one probe, and for one loop")
    args = parser.parse_args()
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    return args


def make_model(load: GpuWorkload, model: Path, tokenizer: Path) -> None:
    words = ["--shape", load.shape, "--vocab-size", str(load.vocab_size), "--tokenizer", str(tokenizer)]
    tool = ROOT / "tools" / "make_random_model.py"
    subprocess.run(
        [sys.executable, str(tool), *words, "--device", "cuda", "--output", str(model)], check=True, stdout=sys.stderr
    )


def probe(name: str, flags: list[str], limit_s: float) -> list[dict[str, Any]]:
    """Rows of `train.py --probe`; one row with the end of its output where it failed."""
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        output = f"{late.stdout or ''}\nnot done after {limit_s:.0f} s"
    print(output, flush=True)
    found = [match for line in output.splitlines() if (match := ROW.match(line))]
    if not found:
        return [{"workload": name, "what": "probe", "failed": output.strip()[-300:]}]
    return [row(name, f"trainer, {m[1]}", float(m[2]), float(m[3])) for m in found]


def whole_loop(name: str, flags: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The GPU as a whole, generating and training, as `gpu_step.py` samples it."""
    output = args.output / "loop"
    words = ["--workload", name, "--tokenizer", str(args.tokenizer), "--prompts", str(args.prompts)]
    command = [sys.executable, str(ROOT / "tools" / "bench" / "gpu_step.py"), *words, "--parts", "loop"]
    try:
        subprocess.run([*command, "--steps", "4", "--output", str(output)], timeout=args.limit_s, check=False)
        result = json.loads((output / name / "result.json").read_text())
    except (subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
        return [{"workload": name, "what": "loop", "failed": str(error)}]
    cfg = load_config(flags).config
    shape = policy_shape(cfg)
    assert shape is not None
    plan = plan_memory(cfg, shape, planned_hardware(cfg))
    predicted = {peak.phase: peak.num_bytes / GIB for peak in plan.places["GPU of trainer and engine"]}
    measured = result["loop"]["gpu_peak_gib"]
    return [row(name, f"GPU, {phase}", predicted[phase], measured[phase]["0"]) for phase in ("generate", "train")]


def row(workload: str, what: str, predicted: float, measured: float) -> dict[str, Any]:
    error = predicted / measured - 1
    return {"workload": workload, "what": what, "predicted": predicted, "measured": measured, "error": error}


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'workload':<10}{'what':<20}{'predicted GiB':>15}{'measured GiB':>14}{'error':>9}")
    for item in rows:
        if "failed" in item:
            print(f"{item['workload']:<10}{item['what']:<20} FAILED: {item['failed']}")
            continue
        verdict = "" if abs(item["error"]) <= TARGET else "  above 10 %"
        print(
            f"{item['workload']:<10}{item['what']:<20}{item['predicted']:>15.2f}{item['measured']:>14.2f}"
            f"{item['error']:>+9.1%}{verdict}"
        )


if __name__ == "__main__":
    sys.exit(main())
