"""The whole loop with an agent at the endpoint, and with a learned reward model behind a server."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.rollout.debug_data import load_rollout, rollout_path

pytestmark = pytest.mark.loop

AGENT = '''
"""Two turns over plain HTTP; the reward is the share of digits in what the model said."""
import json, urllib.request

def run(base_url, api_key, task):
    messages = list(task["prompt"])
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    for question in ("and now ?", None):
        body = json.dumps({"messages": messages, "max_tokens": 6}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", data=body, headers=headers)
        with urllib.request.urlopen(request) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        if question:
            messages.append({"role": "user", "content": question})
    said = messages[-3]["content"] + messages[-1]["content"]
    return sum(character.isdigit() for character in said) / max(1, len(said))
'''
TEMPLATE = (
    "{%- for m in messages -%}{{- '-' + m['content'] + '<eos>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '=' -}}{%- endif -%}"
)


@pytest.fixture(scope="module")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    import shutil

    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model, path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def test_an_agent_is_trained_through_its_base_url(run_training: Callable[..., Any], chat_model: Path, tmp_path: Path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    dump = str(tmp_path / "rollout_{rollout_id}.jsonl")
    run = run_training(
        *("--hf-checkpoint", chat_model, "--apply-chat-template", "--rollout-max-response-len", 40),
        *("--custom-agent-path", f"{agent}:run", "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1),
        *("--num-rollout", 4, "--save-debug-rollout-data", dump),
    )
    assert run.series("agent/turns") == [2.0] * 4 and run.series("agent/rewritten") == [0.0] * 4
    assert run.series("agent/episodes") == [32.0] * 4 and run.series("agent/failed_raised") == [0.0] * 4
    differences = run.series("train/train_rollout_logprob_abs_diff")
    assert len(differences) == 4 and max(differences) < 1e-3, "the trainer scores the very tokens that were sampled"
    for step in range(4):
        for sample in (s for group in load_rollout(rollout_path(dump, step))[1] for s in group.samples):
            assert sample.weight_versions == [step] and 0 in sample.loss_mask and sample.loss_mask[0] == 1
    rewards = run.series("rollout/reward")
    assert len(rewards) == 4 and all(0 < reward < 1 for reward in rewards)


@pytest.mark.slow
def test_a_reward_model_scores_what_is_trained(run_training: Callable[..., Any], tiny_model: Path, tmp_path: Path):
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    folder = tmp_path / "reward_model"
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    torch.manual_seed(1)
    config = Qwen3Config.from_pretrained(tiny_model, num_labels=1, initializer_range=0.3)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rlkit.engines.embedded.reward_server", "--model-path", str(folder)]
    server = subprocess.Popen([*command, "--port", str(port), "--num-threads", "1"])
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except urllib.error.URLError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.3)
        import train

        directory = tmp_path / "run"
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(f'{{"input": "{number} + 1 ="}}\n' for number in range(16)))
        flags = {
            "--hf-checkpoint": tiny_model,
            "--prompt-data": data,
            "--rm-type": "reward_model",
            "--rm-url": f"http://127.0.0.1:{port}",
            "--rm-model": folder,
            "--num-rollout": 2,
            "--rollout-batch-size": 4,
            "--n-samples-per-prompt": 4,
            "--rollout-max-response-len": 12,
            "--actor-num-gpus-per-node": 1,
            "--rollout-num-gpus": 1,
            "--num-gpus-per-node": 4,
            "--device": "cpu",
            "--lr": 1e-3,
            "--output-dir": directory,
        }
        train.main([str(part) for item in flags.items() for part in item])
    finally:
        server.terminate()
        server.wait(20)
    import orjson

    rows = [orjson.loads(line) for line in (directory / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["grader/graded"] for row in rows if "grader/graded" in row] == [16.0, 16.0]
    assert all(row["rollout/reward_std"] > 0 for row in rows if "rollout/reward_std" in row)
