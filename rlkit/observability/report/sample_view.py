"""The browser of recorded samples: one fold a step, the tokens shaded by how far trainer and engine are apart.

Plain HTML without a script. Neighbouring tokens of the same shade are one element, so a healthy run costs little more
than its text. Steps are left out evenly when the budget of bytes is spent; the first and the last stay.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from rlkit.observability.report.charts import number
from rlkit.observability.sample_files import RecordedSample, StepSamples, TokenRun

SHADES = (0.02, 0.1, 0.3, 1.0)
"""|log-prob difference| from which a token gets the next darker shade."""
MAX_PROMPT = 600
"""Characters of a prompt that the report shows."""
MAX_LABEL = 300


def samples_section(steps: Sequence[StepSamples], *, max_bytes: int) -> str:
    """Folds for the newest step (open) and the others, or a sentence when there is nothing."""
    if not steps:
        return "<p>No samples were recorded (<code>--report-samples 0</code>, or nothing was generated).</p>"
    folds = {record.step: _fold(record, is_open=record is steps[-1]) for record in steps}
    kept = _fit([(step, len(fold.encode())) for step, fold in folds.items()], max_bytes)
    left_out = len(folds) - len(kept)
    note = ""
    if left_out:
        note = (
            f"<p>{left_out} of {len(folds)} recorded steps are left out to keep this file small; they are in "
            "<code>samples/</code> of the run folder.</p>"
        )
    legend = " ".join(
        f'<span class="tokens"><i class="g{place}">&nbsp;{bound:g}&nbsp;</i></span>'
        for place, bound in enumerate(SHADES, start=1)
    )
    intro = (
        "<p>A few samples of each step: best, worst and median reward, the longest response, and those with the "
        f"largest log-prob difference between trainer and engine. Tokens are shaded from a difference of {legend} on; "
        "hold the pointer over a shaded one for its number.</p>"
    )
    return intro + note + "".join(folds[step] for step in reversed(kept))


def _fit(sizes: Sequence[tuple[int, int]], max_bytes: int) -> list[int]:
    """Steps that fit, evenly spread, always with the first and the last where those fit."""
    stride = 1
    while True:
        steps = [item for place, item in enumerate(sizes[:-1]) if place % stride == 0] + [sizes[-1]]
        if sum(size for _, size in steps) <= max_bytes or len(steps) <= 2:
            break
        stride *= 2
    kept: list[int] = []
    room = max_bytes
    for step, size in [steps[-1], *steps[:-1]]:
        if size <= room:
            kept.append(step)
            room -= size
    return sorted(kept)


def _fold(record: StepSamples, *, is_open: bool) -> str:
    rewards = [sample.reward for sample in record.samples if sample.reward is not None]
    spread = f", rewards {number(min(rewards))} to {number(max(rewards))}" if rewards else ""
    gaps = [sample.max_gap for sample in record.samples if sample.max_gap is not None]
    worst = f", largest log-prob difference {number(max(gaps))}" if gaps else ""
    opened = " open" if is_open else ""
    body = "".join(_sample(sample) for sample in record.samples)
    return (
        f'<details class="step"{opened}><summary>Step {record.step}: {len(record.samples)} samples{spread}{worst}'
        f"</summary>{body}</details>"
    )


def _sample(sample: RecordedSample) -> str:
    reward = "no reward" if sample.reward is None else f"reward {number(sample.reward)}"
    facts = [
        reward,
        sample.status,
        f"{sample.response_length} tokens",
        f"weights v{', v'.join(map(str, sample.weight_versions))}" if sample.weight_versions else "weights unknown",
    ]
    if sample.mean_gap is not None and sample.max_gap is not None:
        facts.append(f"log-prob difference {number(sample.mean_gap)} mean, {number(sample.max_gap)} largest")
    label = f"<p><b>Label</b> {escape(sample.label[:MAX_LABEL])}</p>" if sample.label else ""
    response = _tokens(sample.head)
    if sample.tail is not None:
        between = sample.tail.start - sample.head.start - len(sample.head.ids)
        response += f"<b> […{between} tokens…] </b>" if between else ""
        response += _tokens(sample.tail)
    return (
        f'<div class="sample"><h3>Group {sample.group}, sample {sample.index}: {escape(", ".join(sample.kinds))}</h3>'
        f'<p class="soft">{escape(" · ".join(facts))}</p>{label}'
        f'<p><b>Prompt</b></p><div class="tokens">{escape(_cut(sample.prompt))}</div>'
        f'<p><b>Response</b></p><div class="tokens">{response}</div></div>'
    )


def _tokens(run: TokenRun) -> str:
    if not run.gaps:
        return escape("".join(run.pieces))
    shaded = [(_shade(gap), piece, gap) for piece, gap in zip(run.pieces, run.gaps, strict=True)]
    parts = []
    for shade, items in groupby(shaded, key=lambda item: item[0]):
        members = list(items)
        if shade == 0:
            parts.append(escape("".join(piece for _, piece, _ in members)))
            continue
        text = "".join(piece for _, piece, _ in members)
        told = ", ".join(f"{gap:+.2f}" for _, _, gap in members[:6]) + (" …" if len(members) > 6 else "")
        parts.append(f'<i class="g{shade}" title="{told}">{escape(text) or "·"}</i>')
    return "".join(parts)


def _shade(gap: float) -> int:
    return sum(abs(gap) >= bound for bound in SHADES)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PROMPT else f"{text[: MAX_PROMPT // 2]} […] {text[-MAX_PROMPT // 2 :]}"
