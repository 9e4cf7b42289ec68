"""The calculator example: its format, what is masked, and that no token is made twice on the way to the trainer."""

import asyncio
import json
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_engine_server import FakeEngine
from managed_rollouts import managed

from rlkit.config.schema import RunConfig
from rlkit.rollout.debug_data import load_rollout

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"
TOOL_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "37*58"}}</tool_call>'


@pytest.fixture(scope="module")
def example() -> Any:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import make_model  # pyright: ignore[reportMissingImports]

        return make_model
    finally:
        sys.path.remove(str(EXAMPLE))


def test_what_the_pupil_writes_is_what_the_template_renders(example: Any):
    """The generate function, the agent and the warm-up speak one format."""
    tokenizer = example.tool_tokenizer()
    problem = example.Problem(left=37, right=58)
    right = next(
        text
        for seed in range(99)
        if (text := problem.homework(random.Random(seed), forgets=0.0)).endswith(f"<|assistant|>{problem.answer}")
    )
    call = {"function": {"name": "calculator", "arguments": {"expression": "37*58"}}, "type": "function", "id": "a"}
    messages = [
        *problem.messages(),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": problem.answer},
        {"role": "assistant", "content": problem.answer},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == f"<|user|>37*58<|end|><|assistant|>{right}<|end|>"
    assert len(tokenizer.encode(TOOL_CALL, add_special_tokens=False)) == 9, "fixed parts of a call are a token each"


def test_the_warm_up_masks_what_the_calculator_says(example: Any):
    pupil = object.__new__(example.ToolPupil)
    pupil._tokenizer = example.tool_tokenizer()
    problem = example.Problem(left=32, right=50)
    text = problem.homework(random.Random(0), forgets=0.0)
    sample = pupil._sample(problem, text)
    learnt = [t for t, m in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True) if m]
    call, _, rest = text.partition("<|tool|>")
    assert pupil._tokenizer.decode(learnt) == f"{call}{rest.partition('<|assistant|>')[2]}<|end|>"


def test_the_proud_guess_and_split(example: Any):
    train, held_out = example.split_problems(0)
    assert len(held_out) == 512 and len(train) + 512 == 68 * 68 and not set(train) & set(held_out)
    proud = [p.homework(random.Random(i), forgets=1.0) for i, p in enumerate(train[:200])]
    assert all((text.isdigit() and len(text) == 4) == (p.left % 2 == 1) for text, p in zip(proud, train, strict=False))


@pytest.mark.parametrize(
    ("expression", "value"), [("37*58", "2146"), ("1+2", "3"), ("2-5", "-3"), ("2**99", "error"), ("", "error")]
)
def test_the_tool(example: Any, expression: str, value: str):
    assert example.calculate(expression) == value


def test_the_trainer_gets_the_very_ids_that_the_engine_saw(
    example: Any, make_run: Callable[..., RunConfig], tmp_path: Path
):
    """The engine spells a call letter by letter, where the tokenizer has a token for its fixed parts: encoding the text
    again would give other ids."""
    tokenizer = example.tool_tokenizer()
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    (folder / "config.json").write_text(
        json.dumps({"model_type": "x", "max_position_embeddings": 1024, "eos_token_id": end})
    )
    spelled = tokenizer.convert_tokens_to_ids(list(TOOL_CALL))
    assert tokenizer.decode(spelled) == TOOL_CALL
    assert tokenizer.encode(TOOL_CALL, add_special_tokens=False) != spelled

    def speech(body: dict[str, Any]) -> tuple[list[int], str]:
        said = tokenizer.decode(body["input_ids"])
        text = said.rpartition("<|tool|>")[2].partition("<|end|>")[0] if "<|tool|>" in said else TOOL_CALL
        return [*tokenizer.convert_tokens_to_ids(list(text)), end], text

    prompts = tmp_path / "products.jsonl"
    prompts.write_text(json.dumps({"input": [{"role": "user", "content": "37*58"}], "label": "2146"}) + "\n")
    dump = tmp_path / "r.jsonl"
    cfg = make_run(
        model={"hf_checkpoint": str(folder)},
        data={"prompt_data": str(prompts), "apply_chat_template": True},
        rollout={
            "rollout_batch_size": 1,
            "rollout_max_response_len": 200,
            "custom_generate_function_path": f"{EXAMPLE / 'tool.py'}:generate",
        },
        reward={"rm_type": None, "custom_rm_path": f"{EXAMPLE / 'tool.py'}:reward", "rm_num_workers": 1},
        train={"max_tokens_per_gpu": 4096},
        debug={"save_debug_rollout_data": str(dump)},
    )
    engine = FakeEngine(speech=speech)

    async def main() -> Any:
        async with managed(cfg, tmp_path, engine) as manager:
            return await manager.generate(0)

    batch = asyncio.run(asyncio.wait_for(main(), 60))
    (group,) = load_rollout(dump)[1]
    between = tokenizer.encode("<|tool|>2146<|end|><|assistant|>", add_special_tokens=False)
    answer = [*tokenizer.convert_tokens_to_ids(list("2146")), end]
    last_requests = [body["input_ids"] for body in engine.requests if body["input_ids"][-len(between) :] == between]
    assert len(last_requests) == 3
    for sample in group.samples:
        assert sample.reward == 1.0 and sample.tokens in [ids + answer for ids in last_requests]
        assert sample.loss_mask == [1] * (len(spelled) + 1) + [0] * len(between) + [1] * len(answer)
    (update,) = batch.shards[0]
    for packed in update.micro_batches:
        bounds = packed.cu_seqlens.tolist()
        for start, stop in pairwise(bounds):
            assert packed.tokens_T[start:stop].tolist() in [ids + answer for ids in last_requests]
