"""Which few samples of a step are kept for people, and how: best, worst, median, longest and, once the step has
trained, those on which trainer and engine differ most. Called by `manager.py`.

Written twice: when the rollout is there, so that a step that fails in training leaves its samples behind, and again
with the differences of each token.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlkit.data.tokenizer import Tokenizer
from rlkit.observability.replay_files import batch_path, digest, keep_newest, note_groups
from rlkit.observability.sample_files import (
    HEAD_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_TEXT,
    TAIL_TOKENS,
    RecordedSample,
    StepSamples,
    TokenRun,
    thin_out,
    write_samples,
)
from rlkit.rollout.debug_data import save_rollout
from rlkit.rollout.training_batch import flatten
from rlkit.types.gaps import TokenGaps, gaps_by_sample
from rlkit.types.samples import Sample, SampleGroup

MAX_AHEAD = 2
"""Steps whose groups are held for `trained`, which a run that only generates never calls."""
THIN_OUT_EVERY = 20
"""Steps between two looks at the size of the folder."""
_PARTIAL = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes, and so at most tokens, of one character."""


class SampleRecorder:
    """Keeps at most `num_samples` samples of the step that is being made."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer, *, num_samples: int) -> None:
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._num_samples = num_samples
        self._groups: dict[int, list[SampleGroup]] = {}
        """By step: a rollout may be made while the step before it trains."""

    def generated(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Write what can be said before training. Keeps the groups until `trained`."""
        if self._num_samples == 0:
            return
        self._groups = {number: kept for number, kept in self._groups.items() if number >= step - MAX_AHEAD}
        self._groups[step] = list(groups)
        self._write(step, {})
        if step % THIN_OUT_EVERY == 0:
            thin_out(self._run_dir)

    def trained(self, step: int, ranks: Sequence[TokenGaps]) -> None:
        """Write again, with the differences that the training ranks saw."""
        gaps = gaps_by_sample(ranks)
        if step in self._groups and gaps:
            self._write(step, gaps)
        self._groups.pop(step, None)

    def _write(self, step: int, gaps: Mapping[int, np.ndarray]) -> None:
        groups = self._groups[step]
        samples = flatten(groups)
        prompts = [group.prompt.text for group in groups for _ in group.samples]
        chosen = choose(samples, gaps, self._num_samples)
        recorded = [
            self._recorded(samples[place], prompts[place], kinds, gaps.get(place)) for place, kinds in chosen.items()
        ]
        write_samples(self._run_dir, StepSamples(step=step, samples=recorded))

    def _recorded(self, sample: Sample, prompt: str, kinds: list[str], gaps_T: np.ndarray | None) -> RecordedSample:
        response_gaps = None if gaps_T is None else np.asarray(gaps_T[sample.prompt_length :], dtype=np.float32)
        trained = [] if response_gaps is None else np.abs(response_gaps)[np.asarray(sample.loss_mask, dtype=bool)]
        length = sample.response_length
        head = min(length, HEAD_TOKENS)
        tail = max(head, length - TAIL_TOKENS)
        return RecordedSample(
            group=sample.group_id,
            index=sample.index,
            seed=sample.seed,
            kinds=kinds,
            prompt=shortened(prompt),
            prompt_ids=sample.tokens[: sample.prompt_length] if sample.prompt_length <= MAX_PROMPT_TOKENS else [],
            label=shortened("" if sample.label is None else str(sample.label)),
            response_length=length,
            reward=sample.reward,
            status=str(sample.status),
            weight_versions=list(sample.weight_versions),
            mean_gap=float(np.mean(trained)) if len(trained) else None,
            max_gap=float(np.max(trained)) if len(trained) else None,
            head=self._run(sample, 0, head, response_gaps),
            tail=self._run(sample, tail, length, response_gaps) if tail < length else None,
        )

    def _run(self, sample: Sample, start: int, end: int, gaps: np.ndarray | None) -> TokenRun:
        ids = sample.tokens[sample.prompt_length + start : sample.prompt_length + end]
        return TokenRun(
            start=start,
            ids=ids,
            pieces=pieces(self._tokenizer, ids),
            rollout_logprobs=[round(value, 5) for value in sample.rollout_logprobs[start:end]],
            gaps=[] if gaps is None else [round(float(value), 4) for value in gaps[start:end]],
        )


def record_batch(run_dir: Path, step: int, groups: Sequence[SampleGroup], *, keep: int) -> None:
    """The whole batch of a step for `rlkit replay`, with a digest of each group; batches before the last `keep` steps
    go."""
    save_rollout(batch_path(run_dir, step), step, list(groups))
    note_groups(run_dir, step, {group.group_id: digest(group) for group in groups})
    keep_newest(run_dir, step, keep)


def choose(samples: Sequence[Sample], gaps: Mapping[int, np.ndarray], limit: int) -> dict[int, list[str]]:
    """Place in `samples` -> why it is kept; at most `limit` of them, those that tell most first."""
    chosen: dict[int, list[str]] = {}

    def take(place: int, kind: str) -> None:
        if place in chosen or len(chosen) < limit:
            kinds = chosen.setdefault(place, [])
            if kind not in kinds:
                kinds.append(kind)

    present = [place for place, sample in enumerate(samples) if sample.response_length > 0]
    scored = sorted(
        (place for place in present if samples[place].reward is not None), key=lambda i: (samples[i].reward, -i)
    )
    by_gap = sorted(gaps, key=lambda place: float(np.abs(gaps[place]).max(initial=0.0)), reverse=True)
    by_gap = [place for place in by_gap if place < len(samples)]
    if scored:
        take(scored[-1], "best")
        take(scored[0], "worst")
        take(scored[len(scored) // 2], "median")
    for place in by_gap[:1]:
        take(place, "largest gap")
    if present:
        take(max(present, key=lambda i: samples[i].response_length), "longest")
    for rank in range(1, limit):
        if rank < len(by_gap):
            take(by_gap[rank], "large gap")
        if rank < len(scored):
            take(scored[-1 - rank], "high reward")
            take(scored[rank], "low reward")
        if rank < len(present):
            take(present[rank], "another")
    return chosen


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Text of each token. Where several tokens make one character, it stands at the last of them."""
    told: list[str] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if text.endswith(_PARTIAL) and len(waiting) < _LONGEST_CHARACTER:
            told.append("")
            continue
        told.append(text)
        waiting = []
    if waiting and told and told[-1] == "":
        told[-1] = tokenizer.decode(waiting)
    return told


def shortened(text: str) -> str:
    """Both ends of a long text."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]} [...] {text[-MAX_TEXT // 2 :]}"
