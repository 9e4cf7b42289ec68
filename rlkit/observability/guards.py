"""Guards against runs that go on and learn nothing: looked at after every rollout and after every step, on by default.

A guard reads the metrics of steps, fires when its evidence is complete, and says it with numbers and the likely remedy:
on the console, in `guards.jsonl`, in the report. With `--strict-guards` it is an error. Called by the session.

Evidence about samples comes as metrics from `rollout/guard_facts.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlkit.config.errors import GuardError
from rlkit.config.schema import RunConfig
from rlkit.observability.guard_log import FiredGuard, append_guard

GAP = "train/train_rollout_logprob_abs_diff"
CONSTANT_STEPS = 3
"""Steps in a row that make a constant reward, groups without difference, or a gradient of zero suspicious."""
QUICK_STEPS = 2
"""Steps in a row for what a healthy run shows at no step."""
MIN_SAMPLES = 4
"""A rollout of fewer samples may be anything by chance."""
REPEAT_EVERY = 50
"""Steps until a guard that still holds is said again."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """`holds` says for one step whether it looks wrong: True, False, or None when the metrics do not tell."""

    name: str
    when: Literal["rollout", "step"]
    """Whether the evidence is there once a rollout is made, before it is trained on."""
    steps: int
    """Steps in a row."""
    holds: Callable[[Metrics, RunConfig], bool | None]
    evidence: Callable[[Metrics, RunConfig], str]
    remedy: Callable[[RunConfig], str]


class Guards:
    """Counts for every guard the steps in a row for which it holds."""

    def __init__(
        self, cfg: RunConfig, run_dir: Path, say: Callable[[str], None], *, guards: tuple[Guard, ...] | None = None
    ) -> None:
        self._cfg = cfg
        self._run_dir = run_dir
        self._say = say
        self._guards = GUARDS if guards is None else guards
        self._in_a_row: dict[str, int] = {}

    def look(self, when: Literal["rollout", "step"], step: int, metrics: Metrics) -> list[FiredGuard]:
        """Those that fire now, written down and said. GuardError with `--strict-guards`."""
        fired = [item for guard in self._guards if guard.when == when if (item := self._ask(guard, step, metrics))]
        for item in fired:
            append_guard(self._run_dir, item)
        if fired and self._cfg.report.strict_guards:
            raise GuardError(f"step {step}: {' '.join(item.message for item in fired)} (--strict-guards)")
        for item in fired:
            self._say(f"guard {item.message}")
        return fired

    def _ask(self, guard: Guard, step: int, metrics: Metrics) -> FiredGuard | None:
        holds = guard.holds(metrics, self._cfg)
        if holds is None:
            return None
        count = self._in_a_row.get(guard.name, 0) + 1 if holds else 0
        self._in_a_row[guard.name] = count
        if count < guard.steps or (count - guard.steps) % REPEAT_EVERY:
            return None
        evidence = guard.evidence(metrics, self._cfg)
        if count > 1:
            evidence = f"for {count} steps in a row {evidence}"
        return FiredGuard(step=step, guard=guard.name, evidence=evidence, remedy=guard.remedy(self._cfg))


def _share_is(name: str, at_least: float) -> Callable[[Metrics, RunConfig], bool | None]:
    def holds(metrics: Metrics, cfg: RunConfig) -> bool | None:
        if name not in metrics or metrics.get("rollout/num_samples", MIN_SAMPLES) < MIN_SAMPLES:
            return None
        return metrics[name] >= at_least

    return holds


def _share_is_zero(name: str) -> Callable[[Metrics, RunConfig], bool | None]:
    def holds(metrics: Metrics, cfg: RunConfig) -> bool | None:
        if name not in metrics or metrics.get("rollout/num_samples", MIN_SAMPLES) < MIN_SAMPLES:
            return None
        return metrics[name] == 0

    return holds


def _all_truncated(metrics: Metrics, cfg: RunConfig) -> bool | None:
    if cfg.rollout.rollout_ignore_eos:
        return None
    return _share_is("rollout/truncated_ratio", 1.0)(metrics, cfg)


def _constant_reward(metrics: Metrics, cfg: RunConfig) -> bool | None:
    if "rollout/reward_min" not in metrics or metrics.get("rollout/num_samples", MIN_SAMPLES) < MIN_SAMPLES:
        return None
    return metrics["rollout/reward_min"] == metrics["rollout/reward_max"]


def _placeholder_logprobs(metrics: Metrics, cfg: RunConfig) -> bool | None:
    """A policy that is certain of every token has log-probs of 0 too; then the trainer agrees."""
    if "rollout/placeholder_logprob_share" not in metrics or GAP not in metrics:
        return None
    return metrics["rollout/placeholder_logprob_share"] >= 0.5 and metrics[GAP] > 1e-3


def gap_is_large(metrics: Metrics, cfg: RunConfig) -> bool | None:
    """None also where older weights made some of the samples: those differ by right."""
    if GAP not in metrics or metrics.get("staleness/max", 0.0) > 0:
        return None
    return metrics[GAP] > cfg.report.mismatch_bound


def _zero_gradient(metrics: Metrics, cfg: RunConfig) -> bool | None:
    return None if "train/grad_norm" not in metrics else metrics["train/grad_norm"] == 0


GUARDS: tuple[Guard, ...] = (
    Guard(
        name="all_truncated",
        when="rollout",
        steps=QUICK_STEPS,
        holds=_all_truncated,
        evidence=lambda m, c: (
            f"every one of {m.get('rollout/num_samples', 0):.0f} responses was cut off by a length limit "
            f"(mean {m.get('rollout/response_length', 0):.0f} tokens, --rollout-max-response-len "
            f"{c.rollout.rollout_max_response_len})"
        ),
        remedy=lambda c: (
            "Raise --rollout-max-response-len, or look for what keeps responses from ending: the chat template "
            "(--apply-chat-template), the end-of-sequence ids in generation_config.json"
        ),
    ),
    Guard(
        name="eos_never_sampled",
        when="rollout",
        steps=CONSTANT_STEPS,
        holds=_share_is_zero("rollout/eos_share"),
        evidence=lambda m, c: "no response held an end-of-sequence or stop id anywhere",
        remedy=lambda c: (
            "The model may end its turns with another id than generation_config.json says "
            "(--rollout-stop-token-ids adds one), or a base model gets a prompt that it would never end"
        ),
    ),
    Guard(
        name="constant_reward",
        when="rollout",
        steps=CONSTANT_STEPS,
        holds=_constant_reward,
        evidence=lambda m, c: f"every sample had the reward {m['rollout/reward_min']:.4g}",
        remedy=lambda c: (
            "A grader that always says the same does not see the answers: look at the samples, at --rm-type, "
            "--label-key and --reward-key"
        ),
    ),
    Guard(
        name="zero_variance",
        when="rollout",
        steps=CONSTANT_STEPS,
        holds=_share_is("rollout/zero_variance_share", 1.0),
        evidence=lambda m, c: (
            f"nothing is learned: all samples of every prompt had the same reward "
            f"(mean {m.get('rollout/reward', float('nan')):.3g}), so every advantage was zero"
        ),
        remedy=lambda c: (
            "Look at the samples in the report, the prompt's form and chat template, the grader and its labels; "
            "easier or harder prompts, or --dynamic-sampling-filter-path check_reward_nonzero_std"
        ),
    ),
    Guard(
        name="nothing_selected",
        when="rollout",
        steps=QUICK_STEPS,
        holds=_share_is("rollout/masked_share", 0.5),
        evidence=lambda m, c: (
            f"the loss mask selects no token of {m['rollout/masked_share']:.0%} of the finished samples"
        ),
        remedy=lambda c: (
            "Look at the masks that --custom-generate-function-path sets, at --rollout-sample-filter-path and "
            "--mask-offpolicy-in-partial-rollout"
        ),
    ),
    Guard(
        name="grader_never_fires",
        when="rollout",
        steps=QUICK_STEPS,
        holds=_share_is_zero("rollout/answer_found_share"),
        evidence=lambda m, c: f"no response stated an answer in the form that --rm-type {c.reward.rm_type} looks for",
        remedy=lambda c: (
            "Ask for that form in the prompt (\\boxed{...} for math, `Answer: ...` for dapo), or take a grader that "
            "reads what the model writes"
        ),
    ),
    Guard(
        name="thinking_never_closed",
        when="rollout",
        steps=QUICK_STEPS,
        holds=_share_is_zero("rollout/closed_thinking_share"),
        evidence=lambda m, c: "thinking is expected and no response held </think>",
        remedy=lambda c: (
            "Give --rollout-max-response-len room for the thinking, check that the chat template opens <think>, and "
            "that --rollout-skip-special-tokens does not remove it; deepscaler gives 0 without it"
        ),
    ),
    Guard(
        name="placeholder_logprobs",
        when="step",
        steps=QUICK_STEPS,
        holds=_placeholder_logprobs,
        evidence=lambda m, c: (
            f"{m['rollout/placeholder_logprob_share']:.0%} of the responses came with one and the same log-prob for "
            f"every token, while the trainer's differ by {m[GAP]:.3g} in the mean"
        ),
        remedy=lambda c: (
            "The engine did not compute them, or a custom generate function fills them in; importance weights and "
            "--use-rollout-logprobs are wrong with them"
        ),
    ),
    Guard(
        name="mismatch",
        when="step",
        steps=1,
        holds=gap_is_large,
        evidence=lambda m, c: (
            f"trainer and engine differ by {m[GAP]:.3g} in the mean log-prob of a token "
            f"(--mismatch-bound {c.report.mismatch_bound:g})"
        ),
        remedy=lambda c: "rlkit explain RUN --step N names the cause: stale weights, other tokens, sampling, precision",
    ),
    Guard(
        name="zero_gradient",
        when="step",
        steps=CONSTANT_STEPS,
        holds=_zero_gradient,
        evidence=lambda m, c: "the gradient norm was exactly 0, so the weights did not move",
        remedy=lambda c: "Groups without difference in reward, a mask without tokens, or a loss coefficient of 0",
    ),
)
