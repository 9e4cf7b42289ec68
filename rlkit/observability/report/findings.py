"""What looks wrong with a run, drawn from what it left behind: one function a suspicion, each with its evidence.

A finding is a reason to look, not a verdict; its sentence says the numbers that it rests on. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlkit.config.schema.asynchronous import DEFAULT_MAX_STALENESS
from rlkit.observability.ledger import LedgerEvent
from rlkit.observability.report.record import Row, RunRecord
from rlkit.observability.report.trends import correlation, ends, mean, since

GAP = "train/train_rollout_logprob_abs_diff"
ALIKE = 0.98
"""Share from which `nearly all` is said."""
MIN_STEPS = 6
"""Steps below which no trend is read out of a curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the list on top."""

    severity: Literal["error", "warning"]
    title: str
    evidence: str
    remedy: str


def findings(run: RunRecord) -> list[Finding]:
    """Errors first, then warnings, each in the order of `CHECKS`."""
    found = [finding for check in CHECKS for finding in check(run)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def ended_badly(run: RunRecord) -> list[Finding]:
    events = run.run_events
    if not events:
        return []
    last = events[-1]
    if last.event is LedgerEvent.FAILED:
        message = str(last.fields["message"]).strip()
        first = message.splitlines()[0] if message else "no message"
        return [
            Finding(
                severity="error",
                title=f"The run failed: {last.fields['error']}",
                evidence=first[:500],
                remedy="The whole message is in logs/driver.log; the same command continues from the last checkpoint.",
            )
        ]
    if last.event is LedgerEvent.RESTARTED:
        return [
            Finding(
                severity="warning",
                title="An attempt ended and its successor has not started",
                evidence=f"exit status {last.fields['exit_status']}, restart {last.fields['attempt']}",
                remedy="Look at the end of logs/driver.log.",
            )
        ]
    return []


def ledger_disagrees(run: RunRecord) -> list[Finding]:
    if run.audit is None or run.audit.is_proven:
        return []
    problems = run.audit.problems
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return [
        Finding(
            severity="error",
            title="Prompts were skipped or trained twice",
            evidence=problems[0] + more,
            remedy="rlkit audit lists all of it.",
        )
    ]


def guards_fired(run: RunRecord) -> list[Finding]:
    found = []
    for name in dict.fromkeys(fired.guard for fired in run.guards):
        fired = [item for item in run.guards if item.guard == name]
        times = f", and {len(fired) - 1} more times up to step {fired[-1].step}" if len(fired) > 1 else ""
        found.append(
            Finding(
                severity="error",
                title=f"Guard {name} fired at step {fired[0].step}{times}",
                evidence=fired[0].evidence,
                remedy=fired[0].remedy,
            )
        )
    return found


def stale_engine_weights(run: RunRecord) -> list[Finding]:
    """Versions that lag, or a difference between trainer and engine that begins small and grows."""
    lag = [
        (record.fields["step"], record.fields["step"] - min(versions))
        for record in run.ledger
        if record.event is LedgerEvent.GENERATED
        for versions in record.fields["versions"]
        if versions and min(versions) >= 0
    ]
    allowed = allowed_staleness(run)
    if allowed is None:
        allowed = max((steps for _, steps in lag), default=0)
    late = [(step, steps) for step, steps in lag if steps > allowed]
    if late:
        step, steps = max(late, key=lambda item: item[1])
        return [
            Finding(
                severity="error",
                title="Engines generate with stale weights",
                evidence=f"{len(late)} responses are older than the {allowed} steps that the settings allow; the "
                f"oldest is {steps} versions behind, in step {step}",
                remedy="Look at the weight updates below and at logs/engine*.log; "
                "--check-weight-update-equal compares every tensor.",
            )
        ]
    steps, gaps = run.series(GAP)
    if len(gaps) < MIN_STEPS or any(age > 0 for _, age in lag):  # older weights differ, and are allowed to
        return []
    start, end = max(gaps[0], 1e-6), mean(gaps[-3:])
    rank = correlation(list(range(len(gaps))), gaps)
    if end > 0.03 and end > 8 * start and rank > 0.7:
        return [
            Finding(
                severity="error",
                title="The engines seem to hold old weights",
                evidence=f"the log-prob difference between trainer and engine grew steadily from {gaps[0]:.2g} at step "
                f"{steps[0]} to {end:.2g}, although every response names the newest version",
                remedy="An update that reports success without reaching the weights looks like this: "
                "--check-weight-update-equal compares every tensor, rlkit explain tells which weights were used.",
            )
        ]
    if end > 0.1:
        return [
            Finding(
                severity="warning",
                title="Trainer and engine disagree",
                evidence=f"mean log-prob difference {end:.2g} over the last steps",
                remedy="rlkit explain RUN --step N names the cause.",
            )
        ]
    return []


def allowed_staleness(run: RunRecord) -> int | None:
    """Weight versions that a response may lie behind the step that trains on it; None where nothing bounds it."""
    late = int(run.setting("update_weights_interval")) - 1
    mode = run.setting("async_mode")
    if run.setting("partial_rollout") or (mode == "full" and run.setting("stale_groups") == "downweight"):
        return None
    if mode == "full":
        limit = run.setting("max_staleness")
        return late + (DEFAULT_MAX_STALENESS if limit is None else int(limit))
    return late + (mode == "one-step")


def reward_by_length(run: RunRecord) -> list[Finding]:
    """Rewards that grow with the length of the response, within groups and over the run."""
    lengths, rewards = run.series("rollout/response_length")[1], run.series("rollout/reward")[1]
    if len(lengths) < MIN_STEPS or len(rewards) != len(lengths):
        return []
    (early_length, late_length), (early, late) = ends(lengths), ends(rewards)
    inside = _within_group_correlation(run)
    if not (late_length >= 1.5 * early_length and late > early and inside is not None and inside >= 0.6):
        return []
    evidence = (
        f"mean length went from {early_length:.0f} to {late_length:.0f} tokens while the reward went from {early:.3g} "
        f"to {late:.3g}; inside a group longer responses get more (correlation {inside:.2f})"
    )
    for name in run.eval_names:
        scores = run.series(name)[1]
        if len(scores) > 1:
            evidence += f"; {name.removeprefix('eval/')} went from {scores[0]:.3g} to {scores[-1]:.3g}"
    return [
        Finding(
            severity="error",
            title="The reward is paid for length",
            evidence=evidence,
            remedy="Read the best samples below. --overlong-buffer-len punishes length, --loss-constant-length takes "
            "the loss's own bias towards length away, and the grader may count what is easy to repeat.",
        )
    ]


def everything_is_cut(run: RunRecord) -> list[Finding]:
    steps, shares = run.series("rollout/truncated_ratio")
    late = shares[-max(3, len(shares) // 4) :]
    if not late or mean(late) < 0.95:
        return []
    begin = since(steps, shares, lambda share: share >= 0.95)
    limit = run.setting("rollout_max_response_len")
    return [
        Finding(
            severity="error" if mean(late) >= ALIKE else "warning",
            title="All responses are cut off",
            evidence=f"since step {begin} {mean(late):.0%} of the responses reach --rollout-max-response-len {limit}, "
            "so nobody sees their ends",
            remedy="Raise --rollout-max-response-len, or find out why no response ends: the chat template, the "
            "end-of-sequence ids in generation_config.json, --rollout-ignore-eos.",
        )
    ]


def groups_without_difference(run: RunRecord) -> list[Finding]:
    steps, shares = run.series("rollout/zero_variance_share")
    late = shares[-max(3, len(shares) // 4) :]
    if not late or mean(late) < 0.9:
        return []
    begin = since(steps, shares, lambda share: share >= 0.9)
    reward = run.series("rollout/reward")[1]
    return [
        Finding(
            severity="error" if mean(late) >= ALIKE else "warning",
            title="Groups have no difference in reward, so nothing is learned",
            evidence=f"since step {begin} {mean(late):.0%} of the groups are of equal rewards"
            + (f" (mean reward {mean(reward[-3:]):.3g})" if reward else ""),
            remedy="At reward 0 the task is too hard or the grader does not see the answer; at reward 1 it is solved. "
            "--dynamic-sampling-filter-path check_reward_nonzero_std leaves such groups out.",
        )
    ]


def entropy_collapsed(run: RunRecord) -> list[Finding]:
    steps, values = run.series("train/entropy")
    if len(values) < MIN_STEPS:
        return []
    early, late = ends(values)
    if late > 0.1 * early or late > 0.1:
        return []
    begin = since(steps, values, lambda value: value <= 0.1 * early)
    return [
        Finding(
            severity="warning",
            title="The policy's entropy collapsed",
            evidence=f"from {early:.3g} to {late:.3g}, below a tenth since step {begin}",
            remedy="All samples of a prompt become alike. --eps-clip-high (clip-higher), --entropy-coef or a lower "
            "--lr keep them apart.",
        )
    ]


def not_finite(run: RunRecord) -> list[Finding]:
    bad = [(row["step"], name) for row in run.rows for name, value in row.items() if value is None]
    if not bad:
        return []
    names = sorted({name for _, name in bad})
    return [
        Finding(
            severity="error",
            title="Numbers that are not finite",
            evidence=f"{', '.join(names[:4])}{' ...' if len(names) > 4 else ''}, first at step {bad[0][0]}",
            remedy="Look at the steps before it: gradient norm, log-prob difference, ppo_kl.",
        )
    ]


def updates_are_violent(run: RunRecord) -> list[Finding]:
    found = []
    steps, clipped = run.series("train/clip_fraction")
    if clipped and mean(clipped[-5:]) > 0.3:
        found.append(
            Finding(
                severity="warning",
                title="Many tokens are clipped",
                evidence=f"{mean(clipped[-5:]):.0%} of the tokens over the last steps up to step {steps[-1]}",
                remedy="Fewer optimizer steps a rollout, or a lower --lr.",
            )
        )
    steps, norms = run.series("train/grad_norm")
    if len(norms) >= MIN_STEPS:
        middle = sorted(norms)[len(norms) // 2]
        place = max(range(len(norms)), key=norms.__getitem__)
        if middle > 0 and norms[place] > 50 * middle:
            found.append(
                Finding(
                    severity="warning",
                    title="The gradient norm jumped",
                    evidence=f"{norms[place]:.3g} at step {steps[place]}, the median is {middle:.3g}",
                    remedy="--clip-grad bounds it; look at the samples of that step.",
                )
            )
        if max(norms) == 0:
            found.append(
                Finding(
                    severity="error",
                    title="The gradient is zero",
                    evidence=f"in all {len(norms)} steps",
                    remedy="Rewards without difference, a mask that selects nothing, or a coefficient of 0.",
                )
            )
    return found


def grader_gives_up(run: RunRecord) -> list[Finding]:
    unscored, samples = run.series("rollout/unscored")[1], run.series("rollout/num_samples")[1]
    total = sum(samples)
    if not unscored or not total or sum(unscored) / total < 0.05:
        return []
    reasons = {
        name: sum(run.series(f"grader/{name}")[1]) for name in ("timeout", "crash", "error", "none", "not_finite")
    }
    told = ", ".join(f"{count:.0f} {name}" for name, count in reasons.items() if count) or "no reason counted"
    return [
        Finding(
            severity="warning",
            title="The grader leaves samples without a reward",
            evidence=f"{sum(unscored):.0f} of {total:.0f} ({told})",
            remedy="They train nothing. See logs/rollout.log; --rm-timeout-s bounds a grading.",
        )
    ]


def time_is_lost(run: RunRecord) -> list[Finding]:
    """Overhead that no phase explains."""
    steps = [row for row in run.steps if row.get("time/step_s")]
    if len(steps) < MIN_STEPS:
        return []
    share = mean([1 - min(1.0, accounted(row) / row["time/step_s"]) for row in steps[1:]])
    if share < 0.2:
        return []
    return [
        Finding(
            severity="warning",
            title="Time that no phase explains",
            evidence=f"{share:.0%} of a step",
            remedy="See the timeline; a slow disk, a busy machine and large batches of text show up here.",
        )
    ]


PHASES = ("generate", "grade", "pack", "train", "sync", "sleep", "wake", "save", "evaluate")
"""Spans that do not contain each other, in the order in which a step runs them."""


def accounted(row: Row) -> float:
    """Seconds of a step that belong to a phase."""
    return sum(row.get(f"time/{phase}_s") or 0.0 for phase in PHASES)


CHECKS: tuple[Callable[[RunRecord], list[Finding]], ...] = (
    ended_badly,
    ledger_disagrees,
    stale_engine_weights,
    reward_by_length,
    everything_is_cut,
    groups_without_difference,
    not_finite,
    guards_fired,
    entropy_collapsed,
    updates_are_violent,
    grader_gives_up,
    time_is_lost,
)


def _within_group_correlation(run: RunRecord) -> float | None:
    """Between length and reward over samples of the later half, each less the mean of its group."""
    lengths = {r.fields["group"]: r.fields["lengths"] for r in run.ledger if r.event is LedgerEvent.GENERATED}
    graded = [r.fields for r in run.ledger if r.event is LedgerEvent.GRADED]
    pairs: list[tuple[float, float]] = []
    for fields in graded[len(graded) // 2 :]:
        known = [
            (float(length), reward)
            for length, reward in zip(lengths.get(fields["group"], ()), fields["rewards"], strict=False)
            if reward is not None
        ]
        if len(known) > 1:
            mean_length, mean_reward = mean([length for length, _ in known]), mean([reward for _, reward in known])
            pairs += [(length - mean_length, reward - mean_reward) for length, reward in known]
    if len(pairs) < 16:
        return None
    return correlation([length for length, _ in pairs], [reward for _, reward in pairs])
