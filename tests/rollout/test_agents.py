"""Agents at the endpoint: token ids that only grow, segments, failures, commands, the API."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_setup import (
    CALL,
    END,
    calculating,
    chat_tokenizer,
    letters,
    speaks,
    spell,
    write_checkpoint,
)
from fake_engine_server import FakeEngine
from managed_rollouts import managed

from rlkit.config.rules import check_paths
from rlkit.config.schema import RunConfig
from rlkit.rollout.debug_data import load_rollout
from rlkit.rollout.hooks import HookError
from rlkit.types.errors import ConfigError
from rlkit.types.samples import Sample

MakeRun = Callable[..., RunConfig]
AGENT = Path(__file__).parents[2] / "examples" / "calculator" / "agent.py"
CLIENT = """
import asyncio, json, time, urllib.error, urllib.request

def post(base_url, api_key, messages, **body):
    body = json.dumps({"messages": messages, **body}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}
"""


def run(work: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, timeout=60)

    return asyncio.run(bounded())


@pytest.fixture
def make_agent_run(make_run: MakeRun, tmp_path: Path) -> MakeRun:
    """A config over a chat model: 2 prompts x 2 samples."""

    def make(*, agent: dict[str, Any], template: str | None = None, context: int = 1024, **sections: Any) -> RunConfig:
        folder = tmp_path / "chat"
        write_checkpoint(folder, context=context, **({} if template is None else {"template": template}))
        prompts = tmp_path / "chats.jsonl"
        prompts.write_text("".join(json.dumps({"input": "6*7", "label": "42"}) + "\n" for _ in range(4)))
        sections["rollout"] = {
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 512,
            **sections.get("rollout", {}),
        }
        data = {"prompt_data": str(prompts), "apply_chat_template": True}
        dump = {"save_debug_rollout_data": str(tmp_path / "r.jsonl")}
        base = {"model": {"hf_checkpoint": str(folder)}, "data": data, "debug": dump, "agent": agent}
        cfg = make_run(**base, train={"max_tokens_per_gpu": 4096}, **sections)
        assert check_paths(cfg) == []
        return cfg

    return make


def write_agent(tmp_path: Path, source: str) -> str:
    path = tmp_path / f"agent_{sum(map(ord, source))}.py"
    path.write_text(CLIENT + source)
    return f"{path}:run"


def one_step(cfg: RunConfig, tmp_path: Path, engine: FakeEngine) -> tuple[list[Sample], dict[str, float], Any]:
    async def main() -> Any:
        async with managed(cfg, tmp_path, engine) as manager:
            return await manager.generate(0)

    batch = run(main())
    groups = load_rollout(tmp_path / "r.jsonl")[1]
    return [sample for group in groups for sample in group.samples], batch.metrics, batch


# ---- what is trained on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["function", "command"])
def test_the_trained_tokens_are_those_that_the_engine_saw_and_said(make_agent_run: MakeRun, tmp_path: Path, by: str):
    engine = FakeEngine(speech=speaks(calculating))
    engine.weight_version = 0
    agent = {"custom_agent_path": f"{AGENT}:run"} if by == "function" else {"agent_command": f"python3 {AGENT}"}
    cfg = make_agent_run(agent=agent, reward={"rm_type": None})
    samples, metrics, batch = one_step(cfg, tmp_path, engine)
    assert len(samples) == 4 and all(sample.reward == 1.0 and sample.status == "completed" for sample in samples)
    between = chat_tokenizer().encode("\n<tool>42<end>\n<assistant>", add_special_tokens=False)
    assert len(between) == len(spell(between)) - len("<tool><end><assistant>") - 1 + 3, "the tool's 42 is one token"
    prompt = chat_tokenizer().encode("<user>6*7<end>\n<assistant>", add_special_tokens=False)
    call, answer = [*letters(CALL), END], [*letters("42"), END]
    for sample in samples:
        assert sample.tokens == prompt + call + between + answer, "what was sampled is kept letter by letter"
        assert sample.loss_mask == [1] * len(call) + [0] * len(between) + [1] * len(answer)
        logprobs = sample.rollout_logprobs
        assert all((value < 0) == bool(mask) for value, mask in zip(logprobs, sample.loss_mask, strict=True))
        assert sample.weight_versions == [0] and sample.response == "42"
    seen = [body["input_ids"] for body in engine.requests if len(body["input_ids"]) > len(prompt)]
    assert seen == [prompt + call + between] * 4
    (update,) = batch.shards[0]
    trained = [
        packed.tokens_T[packed.cu_seqlens[i] : packed.cu_seqlens[i + 1]].tolist()
        for packed in update.micro_batches
        for i in range(len(packed.cu_seqlens) - 1)
    ]
    assert trained == [ids + answer for ids in seen], "from the engine to the trainer without another tokenisation"
    assert metrics["agent/episodes"] == 4 and metrics["agent/turns"] == 2 and metrics["agent/conversations"] == 1
    assert metrics["agent/rewritten"] == metrics["agent/branches"] == metrics["agent/failed_raised"] == 0


def test_the_grader_scores_the_last_reply_where_the_agent_gives_none(make_agent_run: MakeRun, tmp_path: Path):
    source = "def run(base_url, api_key, task):\n    post(base_url, api_key, [user('x')])\n"
    cfg = make_agent_run(agent={"custom_agent_path": write_agent(tmp_path, source)}, reward={"rm_type": "exact"})
    samples, _, _ = one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "42")))
    assert [sample.reward for sample in samples] == [1.0] * 4


REWRITES = """
def run(base_url, api_key, task):
    messages = list(task["prompt"])
    messages.append(post(base_url, api_key, messages))
    messages.append(user("1"))
    messages.append(post(base_url, api_key, messages))
    messages[1] = {"role": "assistant", "content": "9"}
    post(base_url, api_key, [*messages, user("2")])
    return 0.5
"""


def test_rewritten_history_begins_another_segment(make_agent_run: MakeRun, tmp_path: Path):
    cfg = make_agent_run(agent={"custom_agent_path": write_agent(tmp_path, REWRITES)})
    samples, metrics, batch = one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "42")))
    assert [sample.index for sample in samples] == [0, 0, 1, 1] * 2 and {s.reward for s in samples} == {0.5}
    first, second = samples[:2]
    assert sum(first.loss_mask) == 6 and sum(second.loss_mask) == 3 and second.loss_mask == [1, 1, 1]
    assert spell(second.tokens[: second.prompt_length]).startswith("<user>6*7<end>\n<assistant>9<end>\n<user>1")
    assert metrics["agent/rewritten"] == 1 and metrics["agent/conversations"] == 1
    assert batch.shards[0][0].num_rollouts == 4, "segments of one episode share its weight"


BRANCHES = """
def run(base_url, api_key, task):
    messages = list(task["prompt"])
    messages.append(post(base_url, api_key, messages))
    post(base_url, api_key, [*messages, user("1")])
    post(base_url, api_key, [*messages, user("2")])
    return 1
"""


def test_a_branch_keeps_the_ids_of_what_it_shares_and_trains_them_once(make_agent_run: MakeRun, tmp_path: Path):
    cfg = make_agent_run(agent={"custom_agent_path": write_agent(tmp_path, BRANCHES)})
    samples, metrics, _ = one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "42")))
    first, branch = samples[:2]
    shared = first.tokens[: first.prompt_length + 3]
    assert shared[-3:] == [*letters("42"), END] and branch.tokens[: len(shared)] == shared
    assert sum(first.loss_mask) == 6 and branch.loss_mask == [1, 1, 1] and branch.prompt_length > len(shared)
    assert metrics["agent/branches"] == 1 and metrics["agent/rewritten"] == 0


def test_parallel_requests_make_conversations_of_their_own(make_agent_run: MakeRun, tmp_path: Path):
    source = (
        "async def run(base_url, api_key, task):\n"
        "    ask = lambda text: asyncio.to_thread(post, base_url, api_key, [user(text)])\n"
        "    await asyncio.gather(ask('1'), ask('2'), ask('1'))\n    return 1\n"
    )
    engine = FakeEngine(speech=speaks(lambda said: "7"))
    engine.hang_s = 0.05
    cfg = make_agent_run(agent={"custom_agent_path": write_agent(tmp_path, source)})
    samples, metrics, _ = one_step(cfg, tmp_path, engine)
    assert len(samples) == 12 and metrics["agent/conversations"] == 3 and metrics["agent/branches"] == 0
    seeds = {body["sampling_params"]["sampling_seed"] for body in engine.requests}
    assert len(seeds) == 12, "equal requests do not get equal answers"


# ---- what goes wrong -------------------------------------------------------------------------------------------------

FAILING = {
    "raised": "    ask()\n    raise ValueError('oops')\n",
    "timeout": "    time.sleep(5)\n",
    "no_request": "    return 1.0\n",
}


@pytest.mark.parametrize("failure", FAILING)
def test_an_agent_that_fails_costs_its_sample(make_agent_run: MakeRun, tmp_path: Path, failure: str):
    source = (
        "def run(base_url, api_key, task):\n    ask = lambda: post(base_url, api_key, [user('x')])\n"
        "    if task['metadata']['fails']:\n        return fails(ask)\n    ask()\n    return 1.0\n"
        f"def fails(ask):\n{FAILING[failure]}"
    )
    cfg = make_agent_run(agent={"custom_agent_path": write_agent(tmp_path, source), "agent_timeout_s": 2.0})
    rows = [{"input": "6*7", "label": "42", "metadata": {"fails": number == 0}} for number in range(2)]
    Path(str(cfg.data.prompt_data)).write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples, metrics, batch = one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "1")))
    failed, calm_ones = samples[:2], samples[2:]
    details = [sample.reward_detail for sample in failed]
    assert all(detail is not None and detail["agent_failure"] == failure for detail in details)
    assert all(sample.status == "completed" and sample.reward == 1.0 for sample in calm_ones)
    assert metrics[f"agent/failed_{failure}"] == 2 and batch.shards[0][0].num_samples == 2


def test_a_context_that_is_full_truncates(make_agent_run: MakeRun, tmp_path: Path):
    source = (
        "def run(base_url, api_key, task):\n    messages = [user('x')]\n    while True:\n"
        "        messages += [post(base_url, api_key, messages), user('more')]\n"
    )
    cfg = make_agent_run(agent={"custom_agent_path": write_agent(tmp_path, source)}, context=100)
    samples, metrics, _ = one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "1")))
    for sample in samples:
        assert len(sample.tokens) <= 100 and sample.loss_mask[-1] == 1, "nothing stands behind the last reply"
        assert sample.reward == 0.0 and sample.status == "truncated"
    assert metrics["agent/failed_raised"] == 0


def test_replies_are_bounded(make_agent_run: MakeRun, tmp_path: Path):
    source = (
        "def run(base_url, api_key, task):\n    for number in range(9):\n        try:\n"
        "            post(base_url, api_key, [user('x')])\n"
        "        except urllib.error.HTTPError as error:\n"
        "            assert number == 3 and error.code == 429 and error.headers['x-should-retry'] == 'false'\n"
        "            return 1\n"
    )
    cfg = make_agent_run(agent={"custom_agent_path": write_agent(tmp_path, source), "agent_max_turns": 3})
    samples, metrics, _ = one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "1")))
    assert len(samples) == 12 and metrics["agent/turns"] == 3


def test_a_reward_that_is_no_number_ends_the_run(make_agent_run: MakeRun, tmp_path: Path):
    source = "def run(base_url, api_key, task):\n    post(base_url, api_key, [user('x')])\n    return 'good'\n"
    cfg = make_agent_run(agent={"custom_agent_path": write_agent(tmp_path, source)})
    with pytest.raises(HookError, match="must give a reward or None, it gave 'good'"):
        one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "1")))


def test_episodes_that_are_cut_off_start_anew(make_agent_run: MakeRun, tmp_path: Path):
    source = "def run(base_url, api_key, task):\n    post(base_url, api_key, [user(task['label'])])\n    return 1.0\n"
    agent = {"custom_agent_path": write_agent(tmp_path, source)}
    cfg = make_agent_run(agent=agent, rollout={"over_sampling_batch_size": 3, "n_samples_per_prompt": 1})
    rows = [{"input": "6*7", "label": str(number)} for number in range(3)]
    Path(str(cfg.data.prompt_data)).write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = FakeEngine(speech=speaks(lambda said: "1"))
    engine.holds = lambda body: "<user>0<" in spell(body["input_ids"])

    async def main() -> list[int]:
        async with managed(cfg, tmp_path, engine) as manager:
            await manager.generate(0)
            engine.holds = lambda body: "<user>1<" in spell(body["input_ids"])
            await manager.generate(1)
        return [group.group_id for group in load_rollout(tmp_path / "r.jsonl")[1]]

    assert run(main()) == [0, 3]


# ---- commands --------------------------------------------------------------------------------------------------------


def test_a_command_gets_its_task_and_is_ended_with_all_that_it_started(make_agent_run: MakeRun, tmp_path: Path):
    script = tmp_path / "slow.sh"
    script.write_text('#!/bin/sh\necho "$1 $2" >> "$3/seen"\nsleep 300 &\necho $! >> "$3/pids"\nwait\n')
    agent = {"agent_command": f"sh {script} {{prompt}} '{{{{braces}}}}' {tmp_path}", "agent_timeout_s": 2.0}
    cfg = make_agent_run(agent=agent)
    with pytest.raises(Exception, match="none of 4 samples can be trained on"):
        one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "1")))
    assert (tmp_path / "seen").read_text().splitlines() == ["6*7 {braces}"] * 4
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_command_does_not_see_the_secret_of_the_engines(
    make_agent_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RLKIT_ENGINE_TOKEN", "a-secret-of-the-run")
    monkeypatch.setenv("OWN_SETTING", "kept")
    cfg = make_agent_run(agent={"agent_command": f"sh -c 'env > {tmp_path}/seen; exit 3'"})
    with pytest.raises(Exception, match="ended with status 3"):
        one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "1")))
    seen = (tmp_path / "seen").read_text()
    assert "a-secret-of-the-run" not in seen and "OWN_SETTING=kept" in seen and "OPENAI_API_KEY=" in seen


def test_a_command_that_fails_says_why(make_agent_run: MakeRun, tmp_path: Path):
    cfg = make_agent_run(agent={"agent_command": "python3 -c 'raise SystemExit(\"no luck\")'"})
    with pytest.raises(Exception, match="no luck"):
        one_step(cfg, tmp_path, FakeEngine(speech=speaks(lambda said: "1")))


# ---- the API ---------------------------------------------------------------------------------------------------------


def test_what_the_endpoint_answers(make_agent_run: MakeRun, tmp_path: Path):
    """Streams, refusals and usage, seen by a client that is no agent's."""
    seen: dict[str, Any] = {}

    async def run_agent(base_url: str, api_key: str, task: dict[str, Any]) -> float:
        head = {"Authorization": f"Bearer {api_key}"}
        hello = [{"role": "user", "content": "hello"}]
        async with aiohttp.ClientSession() as session:

            async def post(body: Any, headers: dict[str, str] | None = None) -> tuple[int, str]:
                sent = head if headers is None else headers
                async with session.post(f"{base_url}/chat/completions", json=body, headers=sent) as answer:
                    return answer.status, await answer.text()

            seen["key"] = await post({"messages": hello}, {})
            seen["n"] = await post({"messages": hello, "n": 2})
            seen["empty"] = await post({"messages": []})
            seen["list"] = await post([])
            seen["short"] = await post({"messages": hello, "max_tokens": 2})
            seen["plain"] = await post({"messages": hello, "temperature": 0.1})
            options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [{"type": "function"}]}
            seen["stream"] = await post({"messages": hello, **options})
            async with session.get(f"{base_url}/models", headers=head) as answer:
                seen["models"] = answer.status, await answer.text()
        seen["url"] = base_url, api_key
        return 1.0

    import sys
    from types import ModuleType

    module = ModuleType("agent_of_the_api_test")
    module.run = run_agent  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    engine = FakeEngine(speech=speaks(lambda said: CALL))
    cfg = make_agent_run(
        agent={"custom_agent_path": f"{module.__name__}.run"},
        rollout={"rollout_batch_size": 1, "n_samples_per_prompt": 1},
    )

    async def main() -> int:
        async with managed(cfg, tmp_path, engine) as manager:
            await manager.generate(0)
            url, key = seen["url"]
            async with aiohttp.ClientSession() as session:
                head = {"Authorization": f"Bearer {key}"}
                async with session.post(f"{url}/chat/completions", json={}, headers=head) as answer:
                    return answer.status

    assert run(main()) == 404, "an episode that is over has no address"
    assert seen["key"][0] == 401 and seen["n"][0] == seen["empty"][0] == seen["list"][0] == 400
    assert json.loads(seen["n"][1])["error"]["code"] == "invalid_request"
    short, plain = json.loads(seen["short"][1]), json.loads(seen["plain"][1])
    assert short["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": short["choices"][0]["message"]["content"]},
        "finish_reason": "length",
    }
    assert short["usage"]["completion_tokens"] == 2
    assert plain["choices"][0]["message"]["content"] == CALL and plain["choices"][0]["finish_reason"] == "stop"
    assert all(body["sampling_params"]["temperature"] == 1.0 for body in engine.requests)
    events = [line.removeprefix("data: ") for line in seen["stream"][1].splitlines() if line]
    assert events.pop() == "[DONE]"
    first, last, usage = map(json.loads, events)
    call = first["choices"][0]["delta"]["tool_calls"][0]
    assert call["function"]["name"] == "calculator" and first["choices"][0]["delta"]["content"] is None
    assert last["choices"][0]["finish_reason"] == "tool_calls" and usage["usage"]["total_tokens"] > 0
    assert json.loads(seen["models"][1])["data"][0]["id"] == "policy"


def test_a_function_of_another_signature_is_refused(make_agent_run: MakeRun, tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text("f = lambda base_url: 1\n")
    cfg = make_agent_run(agent={"custom_agent_path": f"{path}:f"})
    with pytest.raises(ConfigError, match="cannot be called with three arguments"):
        one_step(cfg, tmp_path, FakeEngine())
