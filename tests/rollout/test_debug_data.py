import json
import math
import random
from pathlib import Path

import pytest

from rlkit.rollout.debug_data import load_rollout, rollout_path, save_rollout
from rlkit.types.errors import DataError
from rlkit.types.samples import Prompt, Sample, SampleGroup, SampleStatus


def random_groups(*, seed: int = 0) -> list[SampleGroup]:
    """Groups with every field in use and floats of all magnitudes."""
    dice = random.Random(seed)
    groups = []
    for group_id in range(3):
        prompt = Prompt(
            position=group_id,
            epoch=1,
            token_ids=[dice.randrange(50_000) for _ in range(4)],
            text="wie viel ist 3\u2028× 4?\n",
            label={"answer": 12, "parts": [1.5, None, "x"]},
            metadata={"level": 3, "nested": {"a": [True, False]}},
        )
        samples = []
        for index, status in enumerate(SampleStatus):
            length = index * 2
            samples.append(
                Sample(
                    group_id=group_id,
                    index=index,
                    seed=dice.randrange(2**63),
                    tokens=[*prompt.token_ids, *(dice.randrange(50_000) for _ in range(length))],
                    prompt_length=4,
                    response="12 \ud7ff 🙂",
                    loss_mask=[dice.randrange(2) for _ in range(length)],
                    rollout_logprobs=[-dice.random() * 10 ** dice.randrange(-300, 3) for _ in range(length)],
                    status=status,
                    reward=dice.choice([None, 1 / 3, 0.1 + 0.2, -0.0]),
                    reward_detail={"score": math.pi, "why": "because"} if index % 2 else None,
                    weight_versions=[3, 4],
                    label=prompt.label,
                    metadata=prompt.metadata,
                )
            )
        groups.append(SampleGroup(group_id=group_id, prompt=prompt, samples=samples))
    return groups


def test_a_rollout_reads_back_equal_to_the_last_bit(tmp_path: Path):
    groups = random_groups()
    path = tmp_path / "deep" / "rollout_7.jsonl"
    save_rollout(path, 7, groups)
    step, loaded = load_rollout(path)
    assert step == 7 and loaded == groups
    exact = [[lp.hex() for s in group.samples for lp in s.rollout_logprobs] for group in groups]
    assert [[lp.hex() for s in group.samples for lp in s.rollout_logprobs] for group in loaded] == exact
    assert [p.name for p in path.parent.iterdir()] == ["rollout_7.jsonl"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [("d/r_{rollout_id}.jsonl", "d/r_12.jsonl"), ("fixed.jsonl", "fixed.jsonl"), ("{x}/{rollout_id}", "{x}/12")],
)
def test_the_step_goes_into_the_path(template: str, expected: str):
    assert rollout_path(template, 12) == Path(expected)


def test_values_that_json_lacks_become_text(tmp_path: Path):
    group = random_groups()[0]
    group.samples[1].reward_detail = {"set": {1}, 2: "key"}
    save_rollout(tmp_path / "r", 0, [group])
    assert load_rollout(tmp_path / "r")[1][0].samples[1].reward_detail == {"set": "{1}", "2": "key"}


def test_lone_surrogates_of_a_custom_function_become_question_marks(tmp_path: Path):
    group = random_groups()[0]
    group.samples[1].response = "a\ud800é"
    group.samples[1].reward_detail = {"\udfff": ["\ud800"]}
    save_rollout(tmp_path / "r", 0, [group])
    sample = load_rollout(tmp_path / "r")[1][0].samples[1]
    assert (sample.response, sample.reward_detail) == ("a?é", {"?": ["?"]})


def test_a_number_that_json_cannot_keep_is_refused_by_name(tmp_path: Path):
    group = random_groups()[0]
    group.samples[0].label = 2**70
    with pytest.raises(DataError, match=r"group 0 \(row 0"):
        save_rollout(tmp_path / "r", 0, [group])
    assert not (tmp_path / "r").exists()


def _break(path: Path, how: str) -> None:
    lines = path.read_bytes().split(b"\n")[:-1]
    if how == "cut-off":
        lines.pop()
    elif how == "torn-line":
        lines[-1] = lines[-1][:50]
    elif how == "other-format":
        lines[0] = b'{"format": "something"}'
    elif how == "missing-field":
        fields = json.loads(lines[2])
        del fields["samples"][0]["seed"]
        lines[2] = json.dumps(fields).encode()
    elif how == "unknown-status":
        lines[2] = lines[2].replace(b'"pending"', b'"lost"')
    elif how == "mask-too-short":
        fields = json.loads(lines[2])
        fields["samples"][4]["loss_mask"].pop()
        lines[2] = json.dumps(fields).encode()
    elif how == "head-is-a-list":
        lines[0] = b"[]"
    elif how == "group-is-a-list":
        lines[2] = b"[1]"
    elif how.startswith("head-without-"):
        head = json.loads(lines[0])
        del head[how.removeprefix("head-without-")]
        lines[0] = json.dumps(head).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut-off", "2 groups, but the head line says 3"),
        ("torn-line", "r.jsonl:4: not JSON"),
        ("other-format", "not a rollout of format"),
        ("missing-field", r"r.jsonl:3: not a sample group: .*seed"),
        ("unknown-status", r"r.jsonl:3: .*lost"),
        ("head-is-a-list", r"r.jsonl:1: not a JSON object: \[\]"),
        ("group-is-a-list", r"r.jsonl:3: not a JSON object: \[1\]"),
        ("head-without-num_groups", r"r.jsonl:1: num_groups is None"),
        ("head-without-step", r"r.jsonl:1: step is None"),
        ("mask-too-short", r"r.jsonl:3: sample 1/4 has 8 response tokens, 7 mask entries"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, how: str, message: str):
    path = tmp_path / "r.jsonl"
    save_rollout(path, 0, random_groups())
    _break(path, how)
    with pytest.raises(DataError, match=message):
        load_rollout(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", -5, r"tokens\[2\] is -5, not a token id below 50000"),
        ("tokens", 10_000_000, r"tokens\[2\] is 10000000, not a token id below 50000"),
        ("tokens", 1.5, r"tokens\[2\] is 1.5, not a token id"),
        ("loss_mask", 2, r"loss_mask\[2\] is 2, not 0 or 1"),
        ("loss_mask", -1, r"loss_mask\[2\] is -1, not 0 or 1"),
        ("rollout_logprobs", "a", r"rollout_logprobs\[2\] is 'a', not a finite number"),
        ("rollout_logprobs", None, r"rollout_logprobs\[2\] is None, not a finite number"),
        ("reward", "1", "reward is '1', not a finite number or null"),
        ("prompt_length", 99, r"prompt_length is 99, not an integer from 0 to 12"),
    ],
)
def test_a_value_that_cannot_be_trained_on_is_named(tmp_path: Path, field: str, value: object, message: str):
    path = tmp_path / "r.jsonl"
    save_rollout(path, 0, random_groups())
    lines = path.read_bytes().splitlines()
    fields = json.loads(lines[2])
    sample = fields["samples"][4]
    if isinstance(sample[field], list):
        sample[field][2] = value
    else:
        sample[field] = value
    lines[2] = json.dumps(fields).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match=rf"r\.jsonl:3: sample 1/4: {message}"):
        load_rollout(path, vocab_size=50_000)


def test_a_missing_file_names_the_flag(tmp_path: Path):
    with pytest.raises(DataError, match="--load-debug-rollout-data"):
        load_rollout(tmp_path / "nothing")
