"""A reward model with random weights in the embedded server, asked by a rollout."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_setup import VOCABULARY, chat_tokenizer
from fake_engine_server import FakeEngine
from managed_rollouts import managed

from rlkit.config.rules import check
from rlkit.config.schema import RunConfig
from rlkit.rollout.debug_data import load_rollout

CONTEXT = 128


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a head of one number, whose tokenizer pads with the id that ends its template."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<end>\n", "<end>")
    tokenizer.pad_token = "<end>"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.num_labels = 1
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(reward_model: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rlkit.engines.embedded.reward_server", "--model-path", str(reward_model)]
    process = subprocess.Popen([*command, "--port", str(port), "--num-threads", "1", "--max-prefill-tokens", "200"])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except urllib.error.URLError:
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def classify(url: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/classify", data=json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def expected(reward_model: Path, ids: list[int]) -> float:
    """The head at the last token, by itself and without padding."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        return model.score(hidden).item()


def test_padding_and_batches_do_not_change_a_score(server: str, reward_model: Path):
    rows = [[10 + i % 60 for i in range(length)] + [1] * (length % 3) for length in (3, 60, 7, 1, 100, 12, 5)]
    status, answer = classify(server, {"input_ids": rows})
    assert status == 200 and [item["meta_info"]["prompt_tokens"] for item in answer] == [len(row) for row in rows]
    assert [item["embedding"][0] for item in answer] == pytest.approx(
        [expected(reward_model, row) for row in rows], abs=1e-5
    )
    status, single = classify(server, {"input_ids": rows[0]})
    assert status == 200 and single["embedding"][0] == pytest.approx(answer[0]["embedding"][0], abs=1e-5)
    status, (text,) = classify(server, {"text": ["abc"]})
    assert text["embedding"][0] == pytest.approx(expected(reward_model, chat_tokenizer().encode("abc")), abs=1e-5)


def test_the_tool_that_compares_servers_agrees(
    server: str, reward_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import check_reward_model  # pyright: ignore[reportMissingImports]

    argv = ["--model-path", str(reward_model), "--url", server, "--tolerance"]
    assert check_reward_model.main([*argv, "1e-4"]) == 0 and "PASS" in capsys.readouterr().out
    assert check_reward_model.main([*argv, "0"]) == 1 and "FAIL" in capsys.readouterr().out
    made = reward_model.parent / "made"
    assert check_reward_model.main(["--make-random", str(made), "--tokenizer", str(reward_model)]) == 0
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {file.name for file in made.iterdir()}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "send input_ids or text"),
        ({"input_ids": []}, "input_ids must be"),
        ({"input_ids": [[]]}, "at least one"),
        ({"input_ids": [[1] * (CONTEXT + 1)]}, f"the model takes {CONTEXT}"),
        ({"input_ids": [[len(VOCABULARY)]]}, "outside the vocabulary"),
    ],
)
def test_what_cannot_be_scored_is_refused(server: str, body: Any, told: str):
    status, answer = classify(server, body)
    assert status == 400 and told in answer["error"]["message"]


def test_a_rollout_is_scored_by_the_reward_model(
    server: str, reward_model: Path, make_run: Callable[..., RunConfig], tmp_path: Path
):
    dump = tmp_path / "r.jsonl"
    reward = {"rm_type": "reward_model", "rm_url": server, "rm_model": str(reward_model)}
    cfg = make_run(reward=reward, debug={"save_debug_rollout_data": str(dump)}, data={"label_key": None})
    assert not [problem for problem in check(cfg) if "rm_" in problem]
    turns = iter(range(10**6))
    engine = FakeEngine(speech=lambda body: speaks_short(next(turns)))

    async def main() -> dict[str, float]:
        async with managed(cfg, tmp_path, engine) as manager:
            return (await manager.generate(0)).metrics

    metrics = asyncio.run(asyncio.wait_for(main(), 60))
    assert metrics["grader/graded"] == 12
    groups = load_rollout(dump)[1]
    tokenizer = chat_tokenizer()
    for sample in (s for group in groups for s in group.samples):
        asked = groups[sample.group_id].prompt.text
        ids = tokenizer.encode(f"<user>{asked}<end><assistant>{sample.response}<end>", add_special_tokens=False)
        assert sample.reward == pytest.approx(expected(reward_model, ids), abs=1e-5)
    assert len({sample.reward for group in groups for sample in group.samples}) > 4


def speaks_short(number: int) -> tuple[list[int], str]:
    """Digits in the tokens of the rollout's own tokenizer, then its end."""
    text = str(number * 37)
    return [*(int(digit) + 2 for digit in text), 1], text
