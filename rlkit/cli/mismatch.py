"""Which condition explains the log-probs that an engine reported: each hypothesis predicts them, the best one wins.

A hypothesis is a way to score the recorded tokens again. Its residual is the mean difference between what it predicts
and what the engine said. What the trainer would say is the first one; another one is the cause when its residual is a
fraction of that. Called by `explain.py`; knows nothing of files.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from rlkit.backends.fsdp.rescoring import Scoring

EXPLAINED = 0.25
"""Share of the trainer's residual that may be left when a hypothesis is the cause."""
FITTED = 0.1
"""The same for a condition with a free number, which fits a little of anything."""
AGREES = 2e-3
"""Mean difference that rounding in float32 and short sums explain: nothing is wrong below it."""
REMEDIES = {
    "none": "",
    "stale weights": "The engine did not get the last update: see the weight updates of the report; "
    "--check-weight-update-equal compares every tensor.",
    "tokens": "Hand the engine's own token ids through: a custom generate function must not encode text again.",
    "temperature": "Trainer and engine must divide logits by the same temperature; SGLang reports log-probs of "
    "the scaled logits only with its return_original_logprob off.",
    "top-p or top-k": "The engine reports log-probs inside the nucleus. Use --rollout-top-p 1.0 and --rollout-top-k "
    "-1, or have it report those of the whole vocabulary.",
    "precision": "Rounding in the engine's precision. --use-tis corrects what is left; --dtype and the engine's own "
    "dtype should be the same.",
    "padding": "Padding in front of a prompt is attended to: an attention mask is missing.",
    "routing": "Tokens reach other experts in the engine than in the trainer.",
    "trainer": "The trainer's own log-probs are not those of its weights and these tokens: look at packing and masks.",
    "unknown": "None of the tried conditions explains it.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One recorded sample: tokens, and what both sides said of those after the prompt."""

    tokens: list[int]
    num_prompt: int
    engine: list[float]
    trainer: list[float] | None
    """None where the step was not trained on."""
    versions: list[int] = field(default_factory=list[int])
    """Weight versions that the engine named."""
    other_prompts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """What the prompt may have been instead -> its ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Something that can be loaded into the scorer."""

    name: str
    load: Callable[[], None]
    is_current: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    cause: str
    what: str
    residual: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The verdict, and everything that was tried."""

    cause: str
    evidence: str
    remedy: str
    difference: float
    """Mean difference between the scorer, under the trainer's conditions, and the engine."""
    tried: list[Tried]

    def document(self) -> dict[str, Any]:
        return asdict(self)


Score = Callable[[Sequence[int], int, Scoring], list[float]]
"""`Rescorer.score`."""


def explain(
    samples: Sequence[Evidence],
    score: Score,
    weights: Sequence[Weights],
    base: Scoring,
    *,
    sampling: Scoring,
    has_experts: bool,
) -> Explanation:
    """`weights` holds the current ones first. `base`: how the trainer scores. `sampling`: how the engine samples, with
    temperature, top-p and top-k of the run.
    """
    weights[0].load()
    start = _residual(samples, score, base)
    tried = [Tried(cause="none", what="the trainer's conditions", residual=start)]
    if start <= AGREES:
        return _verdict(_trainer_is_off(samples, score, base, start), tried)
    own = _trainer_residual(samples, score, base)
    tried += [_try(samples, score, how, cause, what) for cause, what, how in conditions(base, sampling, has_experts)]
    tried += _token_hypotheses(samples, score, base)
    tried += _fitted_temperature(samples, score, base)
    tried += _precision(samples, score, base)
    for item in weights[1:]:
        item.load()
        tried.append(_try(samples, score, base, "stale weights", f"weights of {item.name}"))
    weights[0].load()
    if own is not None and own > max(AGREES, 0.5 * start):
        tried.append(Tried(cause="trainer", what="the trainer differs from its own weights", residual=0.0))
    return _verdict(_best(tried, start), tried)


def conditions(base: Scoring, sampling: Scoring, has_experts: bool) -> list[tuple[str, str, Scoring]]:
    """(cause, what, how) of everything that is one other way to score the same tokens with the same weights."""
    found = [
        ("temperature", f"temperature {value:g}", replace(base, temperature=value))
        for value in dict.fromkeys((1.0, sampling.temperature))
        if value != base.temperature
    ]
    for top_p in dict.fromkeys((sampling.top_p, 0.95, 0.9, 0.8, 0.7, 0.5)):
        if top_p < 1:
            found.append(("top-p or top-k", f"inside the nucleus of {top_p:g}", replace(base, top_p=top_p)))
    for top_k in dict.fromkeys((sampling.top_k, 50, 20, 10, 5)):
        if top_k > 0:
            found.append(("top-p or top-k", f"inside the {top_k} likeliest", replace(base, top_k=top_k)))
    if sampling.top_p < 1 and sampling.top_k > 0:
        how = replace(base, top_p=sampling.top_p, top_k=sampling.top_k)
        found.append(("top-p or top-k", f"inside top-p {sampling.top_p:g} of the {sampling.top_k} likeliest", how))
    for count in (1, 2, 4, 8, 16):
        found.append(("padding", f"{count} padding tokens in front", replace(base, num_padding=count)))
    if has_experts:
        for change in (-1, 1):
            found.append(("routing", f"{change:+d} expert a token", replace(base, expert_change=change)))
        found.append(("routing", "a router in bfloat16", replace(base, router_dtype=torch.bfloat16)))
    return found


def _try(samples: Sequence[Evidence], score: Score, how: Scoring, cause: str, what: str) -> Tried:
    return Tried(cause=cause, what=what, residual=_residual(samples, score, how))


def _token_hypotheses(samples: Sequence[Evidence], score: Score, base: Scoring) -> list[Tried]:
    tried = []
    for name in dict.fromkeys(name for sample in samples for name in sample.other_prompts):
        changed = []
        for sample in samples:
            prompt = sample.other_prompts.get(name, sample.tokens[: sample.num_prompt])
            response = sample.tokens[sample.num_prompt :]
            changed.append(replace(sample, tokens=[*prompt, *response], num_prompt=len(prompt)))
        tried.append(_try(changed, score, base, "tokens", name))
    for offset in (-1, 1):
        pairs = []
        for sample in samples:
            predicted = score(sample.tokens, sample.num_prompt, base)
            count = len(predicted) - 1
            engine = sample.engine[1:] if offset > 0 else sample.engine[:count]
            pairs += zip(predicted[:count] if offset > 0 else predicted[1:], engine, strict=True)
        if pairs:
            what = f"log-probs that belong to the token {'before' if offset > 0 else 'behind'}"
            tried.append(Tried(cause="tokens", what=what, residual=_mean_gap(pairs)))
    return tried


def _fitted_temperature(samples: Sequence[Evidence], score: Score, base: Scoring) -> list[Tried]:
    """The temperature that fits best, found by halving steps of its logarithm."""
    best, found = 0.0, math.inf
    for width in (0.4, 0.2, 0.1, 0.05, 0.025):
        for shift in [best + width * i for i in (-2, -1, 0, 1, 2)]:
            residual = _residual(samples, score, replace(base, temperature=base.temperature * math.exp(shift)))
            if residual < found:
                best, found = shift, residual
    if abs(best) < 0.02:
        return []
    if found > FITTED * _residual(samples, score, base):
        return []
    value = base.temperature * math.exp(best)
    return [Tried(cause="temperature", what=f"temperature {value:.3g}, which fits best", residual=found)]


def _precision(samples: Sequence[Evidence], score: Score, base: Scoring) -> list[Tried]:
    """Rounding leaves noise that no other machine repeats to the bit. So the residual in another precision is not
    asked to vanish: the difference has to be as small as rounding makes it.
    """
    tried = []
    plain = [score(sample.tokens, sample.num_prompt, base) for sample in samples]
    start = _residual(samples, score, base)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        if dtype == base.dtype:
            continue
        rounded = [score(sample.tokens, sample.num_prompt, replace(base, dtype=dtype)) for sample in samples]
        noise = _mean_gap([pair for a, b in zip(plain, rounded, strict=True) for pair in zip(a, b, strict=True)])
        residual = _mean_gap(
            [pair for a, sample in zip(rounded, samples, strict=True) for pair in zip(a, sample.engine, strict=True)]
        )
        if start <= 2.0 * noise:
            residual = min(residual, 0.5 * EXPLAINED * start)
        tried.append(Tried(cause="precision", what=f"{name}, whose rounding makes {noise:.2g}", residual=residual))
    return tried


def _best(tried: Sequence[Tried], start: float) -> Tried:
    """The smallest residual, where it explains enough; of causes that do so alike, the first of `_ORDER`."""
    enough = [item for item in tried if item.cause != "none" and item.residual <= EXPLAINED * start]
    if not enough:
        best = min(tried, key=lambda item: item.residual)
        return Tried(cause="unknown", what=f"the nearest is {best.what}", residual=best.residual)
    least = min(item.residual for item in enough)
    alike = [item for item in enough if item.residual <= max(1.5 * least, AGREES)]
    return min(alike, key=lambda item: (_ORDER.index(item.cause), item.residual))


_ORDER = ("trainer", "stale weights", "tokens", "temperature", "top-p or top-k", "padding", "routing", "precision")


def _trainer_is_off(samples: Sequence[Evidence], score: Score, base: Scoring, start: float) -> Tried:
    """The engine agrees with weights and tokens. Then a difference, if there was one, is the trainer's."""
    own = _trainer_residual(samples, score, base)
    if own is not None and own > 10 * max(AGREES, start):
        return Tried(cause="trainer", what="the trainer differs from its own weights", residual=own)
    return Tried(cause="none", what="the engine agrees with the weights and the tokens", residual=start)


def _verdict(best: Tried, tried: list[Tried]) -> Explanation:
    start = tried[0].residual
    if best.cause in ("none", "unknown"):
        evidence = f"{best.what}; mean difference {start:.3g}"
    else:
        evidence = f"{best.what}: the mean difference of {start:.3g} falls to {best.residual:.2g}"
    return Explanation(cause=best.cause, evidence=evidence, remedy=REMEDIES[best.cause], difference=start, tried=tried)


def _residual(samples: Sequence[Evidence], score: Score, how: Scoring) -> float:
    return _mean_gap(
        [
            pair
            for sample in samples
            for pair in zip(score(sample.tokens, sample.num_prompt, how), sample.engine, strict=True)
        ]
    )


def _trainer_residual(samples: Sequence[Evidence], score: Score, how: Scoring) -> float | None:
    known = [sample for sample in samples if sample.trainer is not None]
    if not known:
        return None
    pairs: list[tuple[float, float]] = []
    for sample in known:
        assert sample.trainer is not None
        pairs += zip(score(sample.tokens, sample.num_prompt, how), sample.trainer, strict=True)
    return _mean_gap(pairs)


def _mean_gap(pairs: Sequence[tuple[float, float]]) -> float:
    return math.fsum(abs(a - b) for a, b in pairs) / max(1, len(pairs))
