"""Which samples of a step are kept, what is written of them, and that the differences belong to the right tokens."""

from pathlib import Path

import numpy as np
import torch

from rlkit.algo.batching import pack
from rlkit.algo.gap_record import GapRecord
from rlkit.observability.sample_files import HEAD_TOKENS, TAIL_TOKENS, read_samples, samples_path
from rlkit.rollout.sample_record import SampleRecorder, choose, pieces
from rlkit.types.gaps import TokenGaps, gaps_by_sample
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus

PROMPT = [7, 8]


class ByteTokenizer:
    """Ids below 256 are bytes of UTF-8."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def sample(index: int, *, reward: float | None, length: int = 3, mask: list[int] | None = None) -> Sample:
    return Sample(
        group_id=index // 2, index=index % 2, seed=index, tokens=[*PROMPT, *range(65, 65 + length)][: 2 + length],
        prompt_length=2, response="x", loss_mask=mask or [1] * length, rollout_logprobs=[-0.5] * length,
        status=SampleStatus.COMPLETED, reward=reward, weight_versions=[3], label="42",
    )  # fmt: skip


def groups_of(samples: list[Sample]) -> list[SampleGroup]:
    numbers = sorted({s.group_id for s in samples})
    prompt = Prompt(position=0, epoch=0, token_ids=PROMPT, text="6 * 7")
    return [SampleGroup(group_id=n, prompt=prompt, samples=[s for s in samples if s.group_id == n]) for n in numbers]


def test_those_that_tell_most_come_first():
    samples = [sample(i, reward=reward) for i, reward in enumerate([0.0, 0.5, 1.0, 0.7, None, 0.2])]
    samples[4].tokens += [1] * 9
    gaps = {1: np.array([0.1]), 5: np.array([-3.0]), 2: np.array([0.2])}
    chosen = choose(samples, gaps, 8)
    assert chosen[2][0] == "best" and chosen[0][0] == "worst" and "median" in chosen[1]
    assert chosen[5][0] == "largest gap" and chosen[4][0] == "longest"
    assert list(choose(samples, gaps, 2)) == [2, 0]
    assert choose([], {}, 8) == {}


def test_pieces_stand_where_their_character_ends():
    text = "aé→😀b"
    told = pieces(ByteTokenizer(), list(text.encode()))  # type: ignore[arg-type]
    assert len(told) == len(text.encode()) and "".join(told) == text
    assert told[0] == "a" and told[1:3] == ["", "é"]
    assert "".join(pieces(ByteTokenizer(), [0xC3])) != ""  # type: ignore[arg-type]


def test_a_text_that_is_no_unicode_is_written_with_a_question_mark(tmp_path: Path):
    odd = sample(0, reward=1.0)
    odd.label = "a\ud800é"
    recorder = SampleRecorder(tmp_path, ByteTokenizer(), num_samples=1)  # type: ignore[arg-type]
    recorder.generated(0, groups_of([odd]))
    assert read_samples(samples_path(tmp_path, 0)).samples[0].label == "a?é"


def test_a_step_is_written_before_and_after_training(tmp_path: Path):
    samples = [sample(i, reward=float(i), length=3) for i in range(4)]
    samples[3] = sample(3, reward=3.0, length=HEAD_TOKENS + TAIL_TOKENS + 5, mask=[1, 0, 1] * 1000)
    samples[3].tokens = [*PROMPT, *[65] * (HEAD_TOKENS + TAIL_TOKENS + 5)]
    samples[3].loss_mask = [1, 0] * 300
    samples[3].loss_mask = samples[3].loss_mask[: samples[3].response_length]
    samples[3].rollout_logprobs = [-0.5] * samples[3].response_length
    recorder = SampleRecorder(tmp_path, ByteTokenizer(), num_samples=8)  # type: ignore[arg-type]
    recorder.generated(5, groups_of(samples))
    before = read_samples(samples_path(tmp_path, 5))
    assert {s.max_gap for s in before.samples} == {None}
    values = np.zeros(samples[3].total_length, dtype=np.float16)
    values[2] = -2.0
    recorder.trained(5, [TokenGaps(sample_ids=[3, -1], ends=[len(values), len(values)], values=values)])
    best = read_samples(samples_path(tmp_path, 5)).samples[0]
    assert best.key == (1, 1) and best.kinds[:2] == ["best", "largest gap"]
    assert best.max_gap == 2.0 and best.head.gaps[:2] == [-2.0, 0.0]
    assert len(best.head.ids) == HEAD_TOKENS and best.tail is not None and len(best.tail.ids) == TAIL_TOKENS
    assert best.tail.start + TAIL_TOKENS == best.response_length
    assert samples_path(tmp_path, 5).stat().st_size < 40_000


def test_nothing_is_written_when_nothing_is_wanted(tmp_path: Path):
    recorder = SampleRecorder(tmp_path, ByteTokenizer(), num_samples=0)  # type: ignore[arg-type]
    recorder.generated(0, groups_of([sample(0, reward=1.0)]))
    recorder.trained(0, [])
    assert list(tmp_path.iterdir()) == []


def test_differences_belong_to_their_tokens_whatever_the_packing():
    samples = [sample(i, reward=1.0, length=2 + i) for i in range(3)]
    batch = pack(
        samples, sample_ids=[4, 1, 7], advantages=[0.0] * 3, token_weights=[1.0] * 3, with_rollout_logprobs=True
    )
    logp_T = torch.where(batch.loss_mask_T, batch.rollout_logp_T + torch.arange(batch.num_tokens) / 8, 0.0)
    record = GapRecord()
    record.add(batch, logp_T)
    empty = pack([], sample_ids=[], advantages=[], token_weights=[], with_rollout_logprobs=True)
    record.add(empty, torch.zeros(0))
    found = gaps_by_sample([record.read()])
    assert list(found) == [4, 1, 7]
    starts = batch.cu_seqlens.tolist()
    for place, number in enumerate([4, 1, 7]):
        positions = np.arange(starts[place], starts[place + 1])
        expected = np.where(positions - starts[place] >= 2, positions / 8, 0.0)
        assert np.allclose(found[number], expected, atol=1e-2), number
    record.clear()
    assert gaps_by_sample([record.read()]) == {}
