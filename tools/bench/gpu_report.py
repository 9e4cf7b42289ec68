"""Puts the phases of a measured run beside their floors. Pure; used by `gpu_step.py`."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_watch import Reading, Window, growth, peak, typical

from rlkit.observability.ledger import LedgerEvent, read_ledger
from rlkit.observability.metrics import read_metrics

NUM_WARMUP_STEPS = 2
MIN_COUNTED_STEPS = 5
PHASES = (
    *("generate", "grade", "pack", "engine_sleep", "trainer_wake", "train", "trainer_sleep"),
    *("engine_wake", "sync", "kv_wake"),
)
"""In the order of a step; they do not overlap. `log_prob` lies inside `train`."""
LABELS = {"sync": "weight update", "kv_wake": "KV wake", "log_prob": "  of it log-prob"}
MAX_RATIO = 1.10
MAX_EXTRA_S = 1.0
GIB = 1024**3
LEAK_STEPS = (5, 50)
LEAK_SHARE, LEAK_GIB = 0.05, 0.25


def step_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of steps, without evaluations; empty while the run has written none."""
    path = run_dir / "metrics.jsonl"
    return [row for row in read_metrics(path) if "time/step_s" in row] if path.exists() else []


def summarise_loop(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the steps after the warm-up. SystemExit when there are none."""
    counted = rows[NUM_WARMUP_STEPS:]
    if not counted:
        raise SystemExit(
            f"{len(rows)} steps were run, none beyond the {NUM_WARMUP_STEPS} of the warm-up; raise --steps"
        )
    phases = {name: mean(counted, f"time/{name}_s") for name in (*PHASES, "log_prob")}
    step = mean(counted, "time/step_s")
    phases["other"] = step - sum(phases[name] for name in PHASES)
    samples = mean(counted, "rollout/num_samples")
    response = mean(counted, "rollout/response_length") * samples
    return {
        "num_counted": len(counted),
        "step": step,
        "step_min": min(row["time/step_s"] for row in counted),
        "step_max": max(row["time/step_s"] for row in counted),
        "first_steps": [row["time/step_s"] for row in rows[:NUM_WARMUP_STEPS]],
        "phases": phases,
        "response_tokens": response,
        "total_tokens": response + mean(counted, "rollout/prompt_length") * samples,
        "sync_bytes": mean(counted, "sync/num_bytes"),
        "train_peak_gib": max(row["memory/train_peak_gib"] for row in counted),
        "logprob_diff": mean(counted, "train/train_rollout_logprob_abs_diff"),
        "logprob_diff_max": max(row["train/train_rollout_logprob_abs_diff_max"] for row in counted),
    }


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.mean(row.get(name, 0.0) for row in rows)


def floors(loop: Mapping[str, Any], generate: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each phase by itself. Generation and training are scaled to the tokens that the run had in a step."""
    per_token = [r["seconds"] / r["response_tokens"] for r in generate["rounds"]]
    found = {
        "generate": statistics.median(per_token) * loop["response_tokens"],
        "train": statistics.median(r["seconds"] for r in train["rounds"])
        / train["total_tokens"]
        * loop["total_tokens"],
    }
    for name in ("engine_sleep", "engine_wake", "kv_wake") if generate["sleeps"] else ():
        found[name] = statistics.median(sleep[name] for sleep in generate["sleeps"])
    if "to_host_gib_s" in train:
        if generate["sleeps"]:
            found["trainer_sleep"] = train["sleep_bytes"] / GIB / train["to_host_gib_s"]
            found["trainer_wake"] = train["sleep_bytes"] / GIB / train["to_device_gib_s"]
        found["sync"] = train["weight_bytes"] / GIB / train["copy_gib_s"]
    return found


def verdict(step: float, floor: float) -> tuple[bool, str]:
    """Whether a step is as near to its floor as it has to be, and the sentence that says so."""
    limit = max(MAX_RATIO * floor, floor + MAX_EXTRA_S)
    passed = step <= limit
    return passed, (
        f"{'PASS' if passed else 'FAIL'}: step {step:.2f} s, floor {floor:.2f} s ({step / floor:.2f} x, "
        f"{step - floor:+.2f} s); allowed {limit:.2f} s"
    )


def phase_table(loop: Mapping[str, Any], floor: Mapping[str, float]) -> list[str]:
    """A line a phase; phases that cost nothing here are left out."""
    lines = [f"{'seconds a step':<18}{'run':>9}{'floor':>9}{'run - floor':>13}"]
    for name in (*PHASES, "log_prob", "other"):
        spent, own = loop["phases"][name], floor.get(name)
        if spent < 0.0005 and own is None:
            continue
        told = f"{own:>9.3f}{spent - own:>13.3f}" if own is not None else f"{'-':>9}{'':>13}"
        lines.append(f"{LABELS.get(name, name.replace('_', ' ')):<18}{spent:>9.3f}{told}")
    total = sum(floor.values())
    told = f"{total:>9.3f}{loop['step'] - total:>13.3f}" if floor else ""
    lines.append(f"{'step':<18}{loop['step']:>9.3f}{told}")
    return lines


# ---- memory ----------------------------------------------------------------------------------------------------------


def phase_windows(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Window]]:
    """When the counted steps generated and trained, and the time between the two of them."""
    windows: dict[str, list[Window]] = {"generate": [], "train": [], "between": []}
    times = step_times(run_dir)
    for row in rows[NUM_WARMUP_STEPS:]:
        seen = times[row["step"]]
        began, generated, trained = seen["issued"], seen["generated"], seen["trained"]
        windows["generate"].append((began, generated))
        windows["train"].append((trained - row["time/train_s"], trained))
        windows["between"] += [
            (generated, trained - row["time/train_s"]),
            (trained, began + row["time/step_s"]),
        ]
    return windows


def step_times(run_dir: Path) -> dict[int, dict[str, float]]:
    """step -> Unix time of its first request, last response and end of training."""
    times: dict[int, dict[str, float]] = {}
    for record in read_ledger(run_dir / "ledger.jsonl"):
        if record.event in (LedgerEvent.ISSUED, LedgerEvent.GENERATED, LedgerEvent.TRAINED):
            seen = times.setdefault(record.fields["step"], {})
            if record.event is LedgerEvent.ISSUED:
                seen.setdefault("issued", record.time)
            else:
                seen[record.event.value] = record.time
    return times


def memory_peaks(
    run_dir: Path, rows: Sequence[Mapping[str, Any]], readings: Sequence[Reading]
) -> dict[str, dict[str, float]]:
    """Phase -> GPU -> largest GiB in use on that GPU, by whatever process."""
    return {name: peak(readings, windows) for name, windows in phase_windows(run_dir, rows).items()}


def leaks(
    run_dir: Path, rows: Sequence[Mapping[str, Any]], gpu: Sequence[Reading], host: Sequence[Reading]
) -> dict[str, Any]:
    """Memory in step 5 and in step 50 (or the last): of GPUs the peak, of processes the median. SystemExit when there
    are too few steps."""
    early, late = LEAK_STEPS[0], min(LEAK_STEPS[1], len(rows))
    if late <= early:
        raise SystemExit(f"{len(rows)} steps were run; a leak check compares step {early} with a later one")
    times = step_times(run_dir)

    def window(number: int) -> Window:
        row = rows[number - 1]
        began = times[row["step"]]["issued"]
        return began, began + row["time/step_s"]

    found: dict[str, Any] = {"steps": [early, late], "grew": []}
    for what, values in (
        ("gpu", [peak(gpu, [window(number)]) for number in (early, late)]),
        ("host", [typical(host, window(number)) for number in (early, late)]),
    ):
        found[what] = values
        found["grew"] += [f"{what} {text}" for text in growth(values[0], values[1], share=LEAK_SHARE, gib=LEAK_GIB)]
    return found


def leak_table(found: Mapping[str, Any]) -> list[str]:
    early, late = found["steps"]
    lines = [f"{'GiB in use':<18}{f'step {early}':>10}{f'step {late}':>10}"]
    for what in ("gpu", "host"):
        first, last = found[what]
        for name in sorted(first):
            lines.append(f"{f'{what} {name}':<18}{first[name]:>10.2f}{last.get(name, 0.0):>10.2f}")
    lines.append(f"FAIL: grew: {'; '.join(found['grew'])}" if found["grew"] else "PASS: nothing grew")
    return lines
