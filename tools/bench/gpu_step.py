"""Times a GRPO step on GPUs by phase, each beside its floor: the same work by itself, measured in the same invocation.

    python tools/bench/gpu_step.py --workload W1 --tokenizer models/smollm2 --prompts gsm8k_train.jsonl
    python tools/bench/gpu_step.py --workload W3 ... --parts loop     then     --parts floor    (two short commands)
    python tools/bench/gpu_step.py --workload W1 ... --leak-check     50 steps: does memory grow?
    python tools/bench/gpu_step.py --workload W1 ... --kill-engine    after the steps that count: how long is it missed?
    python tools/bench/gpu_step.py --workload W2 --device cpu --tiny  the benchmark itself, without a GPU

The run is `train.py` with flags, as a user starts it; it is ended after the last step that counts, before it would
save. The first two steps do not count. What follows a `--` is handed to `train.py`, e.g. `--
--no-gradient-checkpointing`. Everything measured is in `<output>/<workload>/result.json`; parts of earlier invocations
with the same output are kept.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_report import (
    LEAK_STEPS,
    MIN_COUNTED_STEPS,
    NUM_WARMUP_STEPS,
    floors,
    leak_table,
    leaks,
    memory_peaks,
    phase_table,
    step_rows,
    step_times,
    summarise_loop,
    verdict,
)
from gpu_watch import Watch, generating_process
from gpu_workloads import WORKLOADS, GpuWorkload, tiny, train_flags

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
LEAK_RESPONSE_LEN = 256
KILL_AFTER = 0.3
"""Of the time that the step before generated."""
KILL_LIMIT_S = 240.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One invocation."""

    load: GpuWorkload
    flags: list[str]
    """Of `train.py`, but for the number of steps and the run folder."""
    folder: Path
    steps: int
    rounds: int
    loop_limit_s: float
    kills_engine: bool


def main() -> int:
    argv, extra = split_extra(sys.argv[1:])
    args = parse(argv)
    load = WORKLOADS[args.workload]
    load = tiny(load) if args.tiny else load
    if args.leak_check:
        load = replace(load, name=f"{load.name}-leak", response_len=min(load.response_len, LEAK_RESPONSE_LEN))
    steps = args.steps or (LEAK_STEPS[1] if args.leak_check else NUM_WARMUP_STEPS + MIN_COUNTED_STEPS)
    folder = args.output.resolve() / load.name
    model = args.model or folder.parent / "models" / f"{load.shape}-{load.vocab_size}"
    prompts = args.prompts
    if args.tiny:
        model = args.model or folder.parent / "models" / "tiny"
        prompts = prompts or model / "data" / "train.jsonl"
    rm = ("--rm-type", "exact" if args.tiny else "math")
    flags = [*train_flags(load, model=model, prompts=prompts, device=args.device, rm=rm), *extra]
    flags += ["--use-fault-tolerance"] * args.kill_engine
    bench = Bench(
        load=load,
        flags=flags,
        folder=folder,
        steps=steps,
        rounds=args.rounds,
        loop_limit_s=args.loop_limit_s,
        kills_engine=args.kill_engine,
    )
    print(
        f"{load.name}: {load.about}; {steps} steps, {NUM_WARMUP_STEPS} of them warm-up; results in {folder}", flush=True
    )
    if args.dry_run:
        print_plan(bench, model, args)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    if args.model is None:
        make_model(load, model, args)
    parts = ["loop"] if args.leak_check else args.parts
    result = measure(bench, parts)
    return report(bench, result, leak_check=args.leak_check)


def split_extra(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(ours, what stands behind `--`)."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="W1")
    parser.add_argument("--parts", default="loop,floor", help="loop, floor or both (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps of the run, warm-up included (default: 7; leak check: 50)")
    parser.add_argument("--rounds", type=int, default=3, help="timed repeats of each floor (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="checkpoint; default: made with random weights")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer the random model gets")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt` (chat messages) and `label`, e.g. GSM8K's")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "bench" / "gpu", help="default: %(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same layout with a tiny model and few short samples")
    parser.add_argument("--leak-check", action="store_true", help="50 steps of short responses; compares memory")
    parser.add_argument("--kill-engine", action="store_true", help="kill one in mid-generation of the step after")
    parser.add_argument(
        "--loop-limit-s",
        type=float,
        default=0.0,
        help="end the run after so many seconds and report the steps so far (default: no limit)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run; needs neither GPU nor model")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if not set(args.parts) <= {"loop", "floor"}:
        parser.error(f"--parts {','.join(args.parts)}: parts are loop and floor")
    if args.steps is not None and args.steps <= NUM_WARMUP_STEPS:
        parser.error(f"--steps {args.steps} leaves nothing after the {NUM_WARMUP_STEPS} warm-up steps")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least one timed repeat is needed")
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu takes days for a workload of this size; add --tiny")
    if not args.tiny and args.prompts is None:
        parser.error("--prompts FILE is needed, e.g. GSM8K's training set as JSONL with `prompt` and `label`")
    if not args.tiny and args.model is None and args.tokenizer is None:
        parser.error("--tokenizer DIR (for a random model) or --model DIR is needed")
    for name, path in (("--prompts", args.prompts), ("--model", args.model), ("--tokenizer", args.tokenizer)):
        if path is not None and not path.exists() and not args.dry_run:
            parser.error(f"{name} {path} does not exist")
    return args


def print_plan(bench: Bench, model: Path, args: argparse.Namespace) -> None:
    print("\n".join(["train.py", *(f"    {flag}" for flag in bench.flags)]), flush=True)
    if args.model is None:
        print(f"model: made at {model} ({'tiny' if args.tiny else bench.load.shape}), if it is not there")
    command = [sys.executable, str(ROOT / "train.py"), *bench.flags, "--num-rollout", str(bench.steps + 1), "--dry-run"]
    raise SystemExit(subprocess.run(command, check=False).returncode)


def make_model(load: GpuWorkload, model: Path, args: argparse.Namespace) -> None:
    if args.tiny:
        command = ["make_tiny_model.py", "--untrained", "--output", str(model)]
    else:
        command = [
            *("make_random_model.py", "--shape", load.shape, "--vocab-size", str(load.vocab_size)),
            *("--tokenizer", str(args.tokenizer), "--output", str(model), "--device", args.device),
        ]
    subprocess.run([sys.executable, str(TOOLS / command[0]), *command[1:]], check=True)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(bench: Bench, parts: Sequence[str]) -> dict[str, Any]:
    """Run the parts; the result of this and of earlier invocations, also written to `result.json`."""
    path = bench.folder / "result.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    identity = {"workload": asdict(bench.load), "flags": bench.flags}
    result = kept if {name: kept.get(name) for name in identity} == identity else identity
    if "loop" in parts:
        result["loop"] = measure_loop(bench)
        result["loop"]["invocation"] = os.getpid()
        path.write_text(json.dumps(result, indent=2) + "\n")
    if "floor" in parts:
        rollout = bench.folder / "floor_rollout.jsonl"
        result["floor"] = {"invocation": os.getpid()}
        for part in ("generate", "train"):
            result["floor"][part] = run_floor(bench, part, rollout)
        path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def measure_loop(bench: Bench) -> dict[str, Any]:
    """`train.py` until the last step that counts, watched from outside."""
    run_dir = bench.folder / time.strftime("run-%Y%m%d-%H%M%S")
    command = [
        *(sys.executable, str(ROOT / "train.py"), *bench.flags),
        *("--num-rollout", str(bench.steps + 1 + 3 * bench.kills_engine), "--output-dir", str(run_dir)),
    ]
    log = run_dir.with_suffix(".log")
    print(f"run: {log}", flush=True)
    started = time.time()
    with log.open("w") as out:
        driver = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT)
    with Watch(driver.pid) as watch:
        try:
            wait_for_steps(driver, run_dir, bench.steps, bench.loop_limit_s and started + bench.loop_limit_s)
            killed = kill_engine(driver, run_dir, bench) if bench.kills_engine else None
        finally:
            end(driver)
    rows = step_rows(run_dir)
    if len(rows) <= NUM_WARMUP_STEPS:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise SystemExit(f"the run ended with status {driver.returncode} after {len(rows)} steps; {log}:\n{tail}")
    rows = rows[: bench.steps]
    measured = summarise_loop(rows)
    measured["launch_s"] = step_times(run_dir)[rows[0]["step"]]["issued"] - started
    if killed is not None:
        measured["killed"] = killed
    measured["gpu_peak_gib"] = memory_peaks(run_dir, rows, watch.gpu)
    if len(rows) > LEAK_STEPS[0]:
        measured["memory"] = leaks(run_dir, rows, watch.gpu, watch.host)
    return measured


def wait_for_steps(driver: "subprocess.Popen[bytes]", run_dir: Path, steps: int, until: float) -> None:
    """Until the run has reported so many steps, has ended, or (`until` above 0) that moment has come."""
    while driver.poll() is None and len(step_rows(run_dir)) < steps:
        if until and time.time() > until:
            print("--loop-limit-s is over; ending the run", flush=True)
            return
        time.sleep(0.2)


def kill_engine(driver: "subprocess.Popen[bytes]", run_dir: Path, bench: Bench) -> dict[str, Any] | None:
    """SIGKILL an engine while it generates; two more steps. What it cost, and the log-prob difference afterwards."""
    step = len(step_rows(run_dir))
    if driver.poll() is not None or step < bench.steps:
        return None
    while driver.poll() is None and "issued" not in step_times(run_dir).get(step, {}):
        time.sleep(0.02)
    time.sleep(KILL_AFTER * step_rows(run_dir)[-1]["time/generate_s"])  # into the middle of generation
    victim = generating_process(driver.pid)
    at = time.time()
    os.kill(victim, signal.SIGKILL)
    print(f"killed engine process {victim} in step {step}", flush=True)
    wait_for_steps(driver, run_dir, step + 2, at + KILL_LIMIT_S)
    rows = step_rows(run_dir)[step:]
    return {
        "step": step,
        "steps_s": [row["time/step_s"] for row in rows],
        "logprob_diff_max": [row["train/train_rollout_logprob_abs_diff_max"] for row in rows],
        "console": [line for line in driver_log(run_dir).splitlines() if "engine 0" in line],
    }


def driver_log(run_dir: Path) -> str:
    return run_dir.with_suffix(".log").read_text(errors="replace")


def end(driver: "subprocess.Popen[bytes]") -> None:
    """As Ctrl-C does: the run takes its processes along."""
    if driver.poll() is None:
        driver.send_signal(signal.SIGINT)
        try:
            driver.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


def run_floor(bench: Bench, part: str, rollout: Path) -> dict[str, Any]:
    out, log = bench.folder / f"floor_{part}.json", bench.folder / f"floor_{part}.log"
    command = [
        *(sys.executable, str(Path(__file__).parent / "gpu_floor.py"), part, str(out), str(rollout)),
        *(str(bench.rounds), "--", *bench.flags, "--num-rollout", str(bench.steps)),
    ]
    print(f"{part} alone: {log}", flush=True)
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment(), check=False).returncode
    if code:
        raise SystemExit(f"exit {code}; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-30:]))
    return json.loads(out.read_text())


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",  # as rlkit sets for its own processes on a CPU; nothing on a GPU
        "PYTHONPATH": os.pathsep.join(paths),
    }


# ---- telling ---------------------------------------------------------------------------------------------------------


def report(bench: Bench, result: dict[str, Any], *, leak_check: bool) -> int:
    """Print the table; the exit status says whether the verdict is a pass."""
    loop, floor = result.get("loop"), result.get("floor")
    if loop is None:
        print("the floor is measured; --parts loop measures the run")
        return 0
    by_phase = floors(loop, floor["generate"], floor["train"]) if floor else {}
    print()
    print("\n".join(phase_table(loop, by_phase)))
    print("\n".join(facts(loop)))
    if loop["num_counted"] < MIN_COUNTED_STEPS:
        print(f"note: only {loop['num_counted']} steps count, fewer than {MIN_COUNTED_STEPS}")
    if leak_check:
        print("\n".join(leak_table(loop["memory"])))
        return 1 if loop["memory"]["grew"] else 0
    if not floor:
        return 0
    alone = floor["train"]
    print(
        f"training alone: MFU {100 * alone['mfu']:.1f} % of {alone['matmul_flops_per_s'] / 1e12:,.0f} TFLOP/s, peak "
        f"{max(r['peak_gib'] for r in alone['rounds']):.1f} GiB; {alone['blocks']}"
    )
    if floor["invocation"] != loop["invocation"]:
        print("note: run and floor come from two invocations")
    result["floors"] = by_phase
    passed, sentence = verdict(loop["step"], sum(by_phase.values()))
    result["verdict"] = sentence
    (bench.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(sentence)
    return 0 if passed else 1


def facts(loop: dict[str, Any]) -> list[str]:
    """The other numbers, a line each."""
    peaks = [
        f"{phase} {max(gpus.values()):.1f}"
        for phase, gpus in loop["gpu_peak_gib"].items()
        if gpus  # none without an NVIDIA GPU
    ]
    first = ", ".join(f"{seconds:.1f}" for seconds in loop["first_steps"])
    told = []
    if killed := loop.get("killed"):
        steps = ", ".join(f"{seconds:.1f}" for seconds in killed["steps_s"])
        worst = ", ".join(f"{gap:.4f}" for gap in killed["logprob_diff_max"])
        told = [
            f"engine killed in step {killed['step']}: that step and the next took {steps} s; largest log-prob "
            f"difference {worst}",
            *killed["console"],
        ]
    return [
        *told,
        f"steps {loop['step_min']:.2f} to {loop['step_max']:.2f} s over {loop['num_counted']}; warm-up {first} s",
        f"{loop['response_tokens']:,.0f} response tokens a step: "
        f"{loop['response_tokens'] / loop['step']:,.0f} a second, generating "
        f"{loop['response_tokens'] / loop['phases']['generate']:,.0f}",
        f"launch to the first usable weights {loop['launch_s']:.1f} s",
        f"peak GiB: trainer {loop['train_peak_gib']:.1f}" + (f"; on the GPU: {', '.join(peaks)}" if peaks else ""),
        f"log-prob difference to the engine: mean {loop['logprob_diff']:.5f}, largest {loop['logprob_diff_max']:.4f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
