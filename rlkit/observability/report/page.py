"""`report.html`: one file without any network, from a `RunRecord`. Called by the driver, the supervisor and `rlkit
report`.
"""

import os
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rlkit.config.fields import flag_of
from rlkit.observability.ledger import LedgerEvent
from rlkit.observability.report.charts import Marker, Series, lanes, line_chart, number, short, stacked_bars
from rlkit.observability.report.findings import PHASES, Finding, accounted, findings
from rlkit.observability.report.parts import details, page_of, shown_value, table
from rlkit.observability.report.record import RunRecord, drop_counts, read_run
from rlkit.observability.report.sample_view import samples_section

NAME = "report.html"
MAX_BYTES = 4_500_000
MAX_TABLE_ROWS = 400
_SAMPLES = "\0samples\0"
"""Where the samples go, in the bytes that are left: no text of a run holds it."""
CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Reward", "", (("rollout/reward", "mean"), ("rollout/reward_max", "highest"), ("rollout/reward_min", "lowest"))),
    ("Response length", "tokens", (("rollout/response_length", "mean"), ("rollout/response_length_max", "longest"))),
    ("Cut off and alike", "share", (("rollout/truncated_ratio", "cut off"), ("rollout/zero_variance_share", "alike"))),
    ("Entropy", "nats", (("train/entropy", "entropy"),)),
    ("KL", "nats", (("train/ppo_kl", "to the old policy"), ("train/kl_loss", "to the reference"))),
    ("Clip fraction", "share of tokens", (("train/clip_fraction", "clipped"),)),
    (
        "Log-prob difference to engine",
        "nats",
        (("train/train_rollout_logprob_abs_diff", "mean"),),
    ),
    ("Largest difference to engine", "nats", (("train/train_rollout_logprob_abs_diff_max", "one token"),)),
    ("Loss", "", (("train/loss", "loss"),)),
    ("Gradient norm", "", (("train/grad_norm", "before clipping"),)),
    ("Learning rate", "", (("train/lr", "lr"),)),
    ("Generation", "tokens/s", (("rollout/tokens_per_s", "throughput"),)),
    ("Training", "tokens/s", (("derived/train_tokens_per_s", "throughput"),)),
    ("Step", "s", (("time/step_s", "whole step"),)),
    ("Trainer memory", "GiB", (("memory/train_peak_gib", "peak"),)),
)
COLUMNS = (
    "rollout/reward",
    "rollout/response_length",
    "rollout/truncated_ratio",
    "train/entropy",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
    "time/step_s",
)


def write_report(run_dir: Path) -> Path:
    """Write `report.html` whole or not at all; returns its path. FileNotFoundError when this is no run folder."""
    path = run_dir / NAME
    unfinished = run_dir / f".{NAME}.{os.getpid()}.tmp"
    unfinished.write_text(render(read_run(run_dir)), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def render(run: RunRecord) -> str:
    """The page."""
    suspicions = findings(run)
    markers = _markers(run)
    sections = [
        ("wrong", "What looks wrong", _findings(suspicions, run)),
        ("curves", "Curves", _curves(run, markers)),
        ("time", "Where the time goes", _timeline(run)),
        ("config", "Configuration", _configuration(run)),
        ("samples", "Samples", _SAMPLES),
        ("ledger", "Ledger", _ledger(run)),
        ("guards", "Guards and explanations", _guards(run)),
        ("updates", "Weight updates", _updates(run)),
        ("history", "Starts, resumes and saves", _history(run)),
    ]
    name = run.path.resolve().name
    page = page_of(name, _subtitle(run), sections, above=_tiles(run), footer=_footer(run))
    room = max(0, MAX_BYTES - len(page.encode()))
    return page.replace(_SAMPLES, samples_section(run.samples, max_bytes=room), 1)


def _subtitle(run: RunRecord) -> str:
    model = run.setting("hf_checkpoint")
    steps = len(run.steps)
    return f"{Path(str(model)).name or 'no model named'} · {steps} steps · {_state(run)}"


def _state(run: RunRecord) -> str:
    events = run.run_events
    if not events:
        return "no ledger"
    match events[-1].event:
        case LedgerEvent.FINISHED:
            return "finished"
        case LedgerEvent.FAILED:
            return "failed"
        case LedgerEvent.STOPPED:
            return f"stopped by {events[-1].fields['signal']}"
        case _:
            return "running, or killed without a word"


def _tiles(run: RunRecord) -> str:
    tiles = [("State", _state(run)), ("Steps", f"{len(run.steps)} of {run.setting('num_rollout') or '?'}")]
    for name, title in (("rollout/reward", "Reward"), ("rollout/response_length", "Length, tokens")):
        values = run.series(name)[1]
        if values:
            tiles.append((title, f"{short(values[0])} → {short(values[-1])}"))
    for name in run.eval_names[:2]:
        values = run.series(name)[1]
        if values:
            tiles.append((f"Eval {name.removeprefix('eval/')}", f"{short(values[0])} → {short(values[-1])}"))
    seconds = run.series("time/step_s")[1]
    if seconds:
        tiles.append(("Median step", f"{number(sorted(seconds)[len(seconds) // 2])} s"))
    if run.audit is not None:
        tiles.append(("Ledger", "proven" if run.audit.is_proven else "NOT PROVEN"))
    cells = "".join(f"<div><dt>{escape(title)}</dt><dd>{escape(value)}</dd></div>" for title, value in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _findings(found: Sequence[Finding], run: RunRecord) -> str:
    items = [
        f'<li class="{item.severity}"><p><b>{escape(item.title)}</b></p><p>{escape(item.evidence)}.</p>'
        f'<p class="remedy">{escape(item.remedy)}</p></li>'
        for item in found
    ]
    if not items:
        items = ['<li class="good"><p><b>Nothing stands out</b></p><p>No check of this list found anything.</p></li>']
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    unread = details("Files that could not be read", f"<ul>{notes}</ul>") if notes else ""
    return f'<ul class="findings">{"".join(items)}</ul>{unread}'


def _markers(run: RunRecord) -> list[Marker]:
    resumes = [
        Marker(step=record.fields["step"], label=f"resumed at step {record.fields['step']}")
        for record in run.run_events
        if record.event is LedgerEvent.RESUMED
    ]
    return resumes + [Marker(step=fired.step, label=f"guard {fired.guard}") for fired in run.guards]


def _curves(run: RunRecord, markers: Sequence[Marker]) -> str:
    for row in run.rows:
        if row.get("train/num_tokens") is not None and row.get("time/train_s"):
            row["derived/train_tokens_per_s"] = row["train/num_tokens"] / row["time/train_s"]
    charts = []
    evals = [_series(run, name, name.removeprefix("eval/"), has_dots=True) for name in run.eval_names]
    if evals:
        charts.append(line_chart("Evaluation", evals, markers=markers))
    for title, unit, names in CHARTS:
        series = [_series(run, name, label) for name, label in names]
        charts.append(line_chart(title, series, unit=unit, markers=markers))
    drawn = "".join(charts)
    if not drawn:
        return "<p>There are no metrics.</p>"
    rows = run.steps
    stride = -(-len(rows) // MAX_TABLE_ROWS) if rows else 1
    shown = [[row["step"], *(row.get(name) for name in COLUMNS)] for row in rows[::stride]]
    every = "" if stride == 1 else f", every {stride}th step"
    numbers = table(f"Metrics by step{every}", ["step", *COLUMNS], shown, numeric=range(len(COLUMNS) + 1))
    legend = "<p class='soft'>Dashed lines are resumes and guards.</p>" if markers else ""
    return f'{legend}<div class="charts">{drawn}</div>{details("The same as numbers", numbers)}'


def _series(run: RunRecord, name: str, label: str, *, has_dots: bool = False) -> Series:
    steps, values = run.series(name)
    return Series(label=label, steps=steps, values=values, has_dots=has_dots)


def _timeline(run: RunRecord) -> str:
    rows = [row for row in run.steps if row.get("time/step_s")]
    if not rows:
        return "<p>No step has ended.</p>"
    parts = {phase: [row.get(f"time/{phase}_s") or 0.0 for row in rows] for phase in PHASES if phase != "evaluate"}
    parts["other"] = [max(0.0, row["time/step_s"] - accounted(row)) for row in rows]
    colors = {phase: place for place, phase in enumerate(name for name, values in parts.items() if any(values))}
    overlaps = run.setting("async_mode") is not None
    title = "Phases of every step, which overlap" if overlaps else "Phases of every step"
    bars = stacked_bars(title, [row["step"] for row in rows], parts, unit="s")
    return bars + _one_step(rows, colors, overlaps=overlaps)


def _one_step(rows: Sequence[dict], colors: dict[str, int], *, overlaps: bool) -> str:
    """The step of median length, as two lanes in the order in which phases run."""
    row = sorted(rows, key=lambda row: row["time/step_s"])[len(rows) // 2]
    engines: list[tuple[str, float, float]] = []
    trainer: list[tuple[str, float, float]] = []
    clock = 0.0
    for phase in ("generate", "grade", "pack", "wake", "train", "save", "sleep", "sync"):
        seconds = row.get(f"time/{phase}_s") or 0.0
        if seconds <= 0 or phase not in colors:
            continue
        if overlaps and phase == "train":
            clock = 0.0  # beside the rollout of a later step
        elif phase in ("sleep", "sync"):
            clock = max([clock, *(stop for _, _, stop in engines)])
        block = (phase, clock, clock + seconds)
        if phase in ("generate", "sync", "sleep", "wake"):
            engines.append(block)
        if phase in ("train", "save", "sync", "sleep", "wake"):
            trainer.append(block)
        clock += seconds
    total = max(row["time/step_s"], clock)
    if total > clock and "other" in colors:
        engines.append(("other", clock, total))
        trainer.append(("other", clock, total))
    title = f"Step {row['step']}, of median length: who works and who waits"
    note = (
        '<p class="soft">Phases stand in the order in which a step runs them. Empty stretches are the bubble: one side '
        "waits for the other.</p>"
    )
    return lanes(title, {"engines": engines, "trainer": trainer}, colors) + note


def _configuration(run: RunRecord) -> str:
    changed = [item for item in run.settings if item.is_changed]
    rows = [
        [
            flag_of(item.name),
            shown_value(item.name, item.value),
            shown_value(item.name, item.default),
            item.origin,
        ]
        for item in changed
    ]
    everything = [[flag_of(item.name), shown_value(item.name, item.value), item.origin] for item in run.settings]
    environment = [[name, str(value)] for name, value in run.environment.items()]
    return (
        table("Settings that differ from their defaults", ["flag", "value", "default", "from"], rows)
        + details("All settings", table("All settings", ["flag", "value", "from"], everything))
        + details("Environment", table("Versions and devices", ["what", "value"], environment))
    )


def _ledger(run: RunRecord) -> str:
    report = run.audit
    if report is None:
        return "<p>There is no readable ledger.</p>"
    verdict = "proven: nothing skipped, nothing trained twice" if report.is_proven else "NOT PROVEN"
    totals = [
        ["attempts", report.attempts],
        ["automatic restarts", report.restarts],
        ["steps in the weights", report.num_steps],
        ["groups issued", report.num_groups],
        ["groups trained", report.num_trained],
        ["groups dropped", report.num_dropped],
        ["groups waiting", report.num_waiting],
        ["steps trained again after a resume", len(report.retrained)],
        ["metric rows taken back by resumes", run.num_superseded],
        ["lines torn by a killed process", len(report.torn_lines)],
        ["verdict", verdict],
    ]
    dropped = [[reason, count] for reason, count in drop_counts(run).most_common()]
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in report.problems[:50])
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes[:50])
    return (
        table("Totals over all attempts", ["what", "count"], totals, numeric=(1,))
        + (f"<h3>Problems</h3><ul>{problems}</ul>" if problems else "")
        + (details("Left out, by reason", table("Left out, by reason", ["reason", "count"], dropped, numeric=(1,))))
        + (details("Notes", f"<ul>{notes}</ul>") if notes else "")
    )


def _guards(run: RunRecord) -> str:
    rows = [[fired.step, fired.guard, fired.evidence, fired.remedy] for fired in run.guards[:200]]
    fired = table("Guards that fired", ["step", "guard", "evidence", "remedy"], rows) or "<p>No guard fired.</p>"
    explained = [
        [document["step"], document["cause"], document["evidence"], document.get("remedy", "")]
        for document in run.explanations
    ]
    return fired + table("Explained log-prob differences", ["step", "cause", "evidence", "remedy"], explained)


def _updates(run: RunRecord) -> str:
    rows = []
    for row in run.rows:
        if row.get("sync/num_bytes") is None:
            continue
        size, seconds = row["sync/num_bytes"], row.get("time/sync_s")
        rate = f"{size / seconds / 1e9:.2f}" if seconds else None
        rows.append(
            [row["step"], f"v{row['step'] + 1}", f"{size / 1e6:,.1f}", row.get("sync/num_buckets"), seconds, rate]
        )
    if not rows:
        return "<p>No weights were sent to engines.</p>"
    seconds = sorted(row[4] for row in rows if row[4] is not None)
    total = f"<p>{len(rows)} updates"
    if seconds:
        total += f", {number(seconds[len(seconds) // 2])} s in the median and {number(seconds[-1])} s at most"
    stride = -(-len(rows) // MAX_TABLE_ROWS)
    log = table(
        "Updates of the engines' weights",
        ["after step", "version", "MB", "buckets", "seconds", "GB/s"],
        rows[::stride],
        numeric=range(6),
    )
    return f"{total}.</p>{details('All updates', log)}"


def _history(run: RunRecord) -> str:
    rows = []
    for record in run.run_events:
        fields = record.fields
        match record.event:
            case LedgerEvent.STARTED:
                told = f"from --hf-checkpoint, at step {fields['step']}"
            case LedgerEvent.RESUMED:
                told = f"at step {fields['step']} from {fields['path']} (weights v{fields['weight_version']})"
            case LedgerEvent.SAVED:
                told = f"step {fields['step']} as {fields['path']}"
            case LedgerEvent.FINISHED:
                told = f"before step {fields['step']}"
            case LedgerEvent.STOPPED:
                told = f"by {fields['signal']} before step {fields['step']}{', saved' if fields['saved'] else ''}"
            case LedgerEvent.FAILED:
                told = f"{fields['error']}: {str(fields['message'])[:300]}"
            case _:
                told = ", ".join(f"{name} {value}" for name, value in fields.items())
        changed = fields.get("changed")
        if changed:
            told += f"; settings changed: {', '.join(changed)}"
        rows.append([_clock(record.time), str(record.event), told])
    return table("What happened to the run", ["when (UTC)", "what", "how"], rows) or "<p>There is no ledger.</p>"


def _footer(run: RunRecord) -> str:
    return f"Written {_clock(time.time())} UTC from {run.path.resolve()}. This file needs no network."


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
