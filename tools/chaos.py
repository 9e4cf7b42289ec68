"""Kills a training run again and again, and looks at what it says it did.

    python tools/chaos.py --kills 100 --model MODEL --output runs/chaos        the quick start's task, hours on 2 cores
    python tools/chaos.py --kills 3 --steps 8 --pace 1 --model MODEL --output ...          what a slow test does

MODEL comes from `make_tiny_model.py`. One process of the run (driver, rank, engine or router) is killed by SIGKILL at a
random moment, while it starts or while it works; the same command is started again, until the run is complete; then
the next run begins, in the next layout. After every kill: no process and no shared memory is left, unless the run goes
on by itself; the ledger shows nothing skipped, nothing trained twice; and of every completed run each step is in
`metrics.jsonl` once and the history is proven. At the end the held-out accuracies stand beside those of runs that
nobody disturbed. The last line says PASS or FAIL, and the exit status agrees. `chaos.jsonl` has a line a kill.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from process_family import VICTIMS, command_of, family, shared_memory, wait_until_gone

from rlkit.observability.audit import audit
from rlkit.observability.ledger import read_ledger
from rlkit.observability.metrics import metric_series, read_metrics

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "1", "--colocate"),
    ("--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "2", "--rollout-num-gpus", "1"),
    ("--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "2", "--colocate", "--max-restarts", "1"),
    ("--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "2", "--rollout-num-gpus", "1", "--use-fault-tolerance"),
)
GONE_WITHIN_S = 20.0
START_S = 20.0
"""About what a start takes on two cores."""
SETTLE_S = 600.0
"""Longest time for a run to start, to end, or to recover from a kill by itself."""
MAX_LOSS = 0.1
"""Of accuracy against undisturbed runs of the same seeds: several times what two seeds differ by."""


@dataclass(kw_only=True)
class Trial:
    """One training run, in as many lives as it takes."""

    folder: Path
    seed: int
    layout: tuple[str, ...]
    model: Path
    steps: int
    num_lives: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self) -> "subprocess.Popen[bytes]":
        self.num_lives += 1
        data = self.model / "data"
        command = [
            *(sys.executable, "train.py", "--hf-checkpoint", self.model, "--prompt-data", data / "train.jsonl"),
            *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
            *("--rollout-seed", self.seed, "--device", "cpu", "--rm-type", "exact", "--num-rollout", self.steps),
            *("--rollout-batch-size", 64, "--n-samples-per-prompt", 8, "--num-steps-per-rollout", 2),
            *(
                "--rollout-max-response-len",
                8,
                "--lr",
                "1e-3",
                "--lr-warmup-iters",
                min(10, self.steps),
                "--lr-decay-style",
                "linear",
            ),
            *("--min-lr", "1e-4", "--eps-clip-high", "0.28", "--embedded-max-running-requests", 256),
            *("--eval-interval", self.steps, "--eval-prompt-data", "heldout", data / "heldout.jsonl"),
            *("--eval-temperature", 0, "--save-interval", 1, "--keep-checkpoints", 2),
            *("--output-dir", self.run_dir, *self.layout),
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "console.txt").open("ab") as console:
            return subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=console, stderr=console)

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [row for row in read_metrics(path) if "time/step_s" in row] if path.exists() else []

    def ended_before(self) -> bool:
        """Whether the last start found every step done: the kill had come between the last save and the end."""
        console = (self.folder / "console.txt").read_text(errors="replace")
        return f"nothing to do: the next step is {self.steps} " in console

    def accuracy(self) -> float | None:
        """None when the run was killed between its last step and the evaluation that follows it."""
        path = self.run_dir / "metrics.jsonl"
        steps, values = metric_series(path, "eval/heldout")
        return values[-1] if steps and steps[-1] >= self.steps else None


def main() -> int:
    args = parse()
    rng = random.Random(args.seed)
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    wrong: list[str] = []
    finished: list[Trial] = []
    killed: Counter[str] = Counter()
    while killed.total() < args.kills and not wrong:
        number = len(finished)
        trial = new_trial(args, number, f"chaos-{number}")
        wrong += torment(trial, rng, killed, args)
        finished.append(trial)
    wrong += [] if wrong else compare(args, finished)
    told = ", ".join(f"{count} x {name}" for name, count in sorted(killed.items()))
    lives = sum(trial.num_lives for trial in finished)
    summary = f"{killed.total()} kills ({told}) in {len(finished)} runs and {lives} starts"
    print("\n".join([*wrong, f"{'FAIL' if wrong else 'PASS'}: {summary}"]), flush=True)
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder made by tools/make_tiny_model.py")
    parser.add_argument("--output", type=Path, required=True, help="is emptied")
    parser.add_argument("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--pace", type=float, default=8.0, help="a kill comes at most so many seconds after a step")
    parser.add_argument("--without-reference", action="store_true", help="do not compare with undisturbed runs")
    return parser.parse_args()


def new_trial(args: argparse.Namespace, number: int, name: str) -> Trial:
    return Trial(
        folder=args.output.resolve() / name,
        seed=number,
        layout=LAYOUTS[number % len(LAYOUTS)],
        model=args.model.resolve(),
        steps=args.steps,
    )


def torment(trial: Trial, rng: random.Random, killed: Counter[str], args: argparse.Namespace) -> list[str]:
    """Kill and start again until the run is complete. What is wrong, empty when nothing is."""
    memory = shared_memory()
    while True:
        driver = trial.start()
        seen: list[psutil.Process] = []
        was_killed = False
        try:
            while driver.poll() is None and killed.total() < args.kills:
                record = kill_one(trial, driver, rng, seen, pace=args.pace)
                if record is None:
                    break
                was_killed = True
                killed[record["victim"]] += 1
                trial.kills[record["victim"]] += 1
                wrong = settle(trial, driver, record, seen, memory)
                with (args.output / "chaos.jsonl").open("a") as file:
                    file.write(json.dumps({**record, "run": trial.folder.name, "wrong": wrong}) + "\n")
                print(f"{killed.total():>4} {trial.folder.name}: {record['victim']} {record['when']}", flush=True)
                if wrong:
                    return [f"{trial.folder.name}: {problem}" for problem in wrong]
            status = driver.wait(SETTLE_S * 4)
        except subprocess.TimeoutExpired:
            return [f"{trial.folder.name}: the run neither ended nor moved; see {trial.folder / 'console.txt'}"]
        finally:
            if driver.poll() is None:
                driver.kill()
        if status == 0 or trial.ended_before():
            return check_complete(trial, is_finished=status == 0)
        if not was_killed:
            return [f"{trial.folder.name}: ended with status {status} though nothing was killed"]


def kill_one(
    trial: Trial, driver: "subprocess.Popen[bytes]", rng: random.Random, seen: list[psutil.Process], *, pace: float
) -> dict[str, Any] | None:
    """Wait for a random moment and kill a random process; None when the run has ended by itself before. `seen` gets
    every process that the run had."""
    began, before = time.monotonic(), len(trial.rows())
    while_starting = rng.random() < 0.25
    delay = rng.uniform(0.0, START_S if while_starting else pace)
    if not while_starting:
        while driver.poll() is None and len(trial.rows()) == before:
            if time.monotonic() - began > SETTLE_S:
                driver.kill()
                raise subprocess.TimeoutExpired("train.py", SETTLE_S)
            time.sleep(0.1)
    time.sleep(delay)
    names = list(VICTIMS)
    rng.shuffle(names)
    processes = family(driver)
    seen[:] = processes
    for name in names:  # early in a start there may be nothing but the driver
        for process in processes:
            if VICTIMS[name](command_of(process)) and driver.poll() is None:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
                when = (
                    f"{delay:.1f} s after its {'start' if while_starting else 'step'}, {len(trial.rows())} steps done"
                )
                return {"victim": name, "when": when, "life": trial.num_lives, "time": time.time()}
    return None


def settle(
    trial: Trial,
    driver: "subprocess.Popen[bytes]",
    record: dict[str, Any],
    seen: list[psutil.Process],
    memory: set[str],
) -> list[str]:
    """Wait until the run has ended, or goes on by itself where it may; then look at what it left."""
    may_recover = ("--use-fault-tolerance" in trial.layout and record["victim"] == "engine") or (
        "--max-restarts" in trial.layout and record["victim"] in ("rank", "engine", "router")
    )
    rows, deadline = len(trial.rows()), time.monotonic() + (SETTLE_S if may_recover else GONE_WITHIN_S)
    while driver.poll() is None and time.monotonic() < deadline:
        if may_recover and len(trial.rows()) > rows + 1:
            record["recovered"] = True
            return []
        time.sleep(0.1)
    wrong: list[str] = []
    if driver.poll() is None:
        wrong.append(f"{record['victim']} was killed and the driver still waits")
    if left := wait_until_gone(seen, GONE_WITHIN_S):
        wrong.append(f"{record['victim']} was killed and processes are left: {left}")
    if leaked := shared_memory() - memory:
        wrong.append(f"shared memory is left: {sorted(leaked)}")
    ledger = trial.run_dir / "ledger.jsonl"
    if ledger.exists():
        torn: list[int] = []
        wrong += audit(read_ledger(ledger, torn=torn), torn_lines=torn).problems
    return wrong


def check_complete(trial: Trial, *, is_finished: bool) -> list[str]:
    """What is wrong with a run that has done its steps. `is_finished`: it has also said so."""
    torn: list[int] = []
    report = audit(read_ledger(trial.run_dir / "ledger.jsonl", torn=torn), torn_lines=torn)
    wrong = [] if report.is_proven and report.is_finished >= is_finished else [f"not proven: {report.problems}"]
    steps = [row["step"] for row in trial.rows()]
    if steps != list(range(trial.steps)):
        wrong.append(f"metrics.jsonl has the steps {steps}, expected 0 to {trial.steps - 1}, each once")
    return [f"{trial.folder.name}: {problem}" for problem in wrong]


def compare(args: argparse.Namespace, finished: list[Trial]) -> list[str]:
    """Held-out accuracy of killed runs beside undisturbed ones, one a layout."""
    if args.without_reference:
        return []
    calm: list[float] = []
    for number in range(min(len(finished), 2)):
        trial = new_trial(args, number, f"calm-{number}")
        if trial.start().wait() != 0:
            return [f"the undisturbed run failed; see {trial.folder / 'console.txt'}"]
        score = trial.accuracy()
        assert score is not None
        calm.append(score)
    scores = [score for trial in finished if (score := trial.accuracy()) is not None]
    print(f"held-out accuracy, undisturbed: {' '.join(f'{score:.3f}' for score in calm)}")
    print(f"held-out accuracy, killed:      {' '.join(f'{score:.3f}' for score in scores)}", flush=True)
    low = [score for score in scores if score < min(calm) - MAX_LOSS]
    return [f"accuracies {low} are lower than {min(calm):.3f} - {MAX_LOSS}"] if low else []


if __name__ == "__main__":
    sys.exit(main())
