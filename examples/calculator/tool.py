"""Several turns with a calculator, by a generate function. The model asks in the format of Hermes and Qwen; the answer
comes back as a message of the role `tool`, and the model goes on.

    --custom-generate-function-path examples/calculator/tool.py:generate
    --custom-rm-path examples/calculator/tool.py:reward

The response grows at its end only. What the calculator says is masked; what the model says, its calls included, is
trained on with the very ids that the engine sampled.
"""

import operator
import re

from rlkit.rollout.turns import Turns
from rlkit.types.generation import SamplingParams
from rlkit.types.samples import Sample

MAX_CALLS = 2
CALL = re.compile(r'<tool_call>{"name": "calculator", "arguments": {"expression": "([^"]*)"}}</tool_call>')
EXPRESSION = re.compile(r"(\d{1,9})([*+-])(\d{1,9})")
OPERATORS = {"*": operator.mul, "+": operator.add, "-": operator.sub}
END, ASSISTANT, TOOL = "<|end|>", "<|assistant|>", "<|tool|>"


async def generate(turns: Turns, sample: Sample, sampling: SamplingParams) -> None:
    """Up to two calls, then a turn that has to be the answer."""
    for _ in range(MAX_CALLS):
        begin = len(sample.tokens)
        if not await turns.generate(sample):
            return
        call = CALL.search(turns.tokenizer.decode(sample.tokens[begin:]))
        if call is None:
            return
        if not turns.append(sample, f"{TOOL}{calculate(call[1])}{END}{ASSISTANT}"):
            return
    await turns.generate(sample)


def calculate(expression: str) -> str:
    """The tool itself."""
    parts = EXPRESSION.fullmatch(expression)
    return "error" if parts is None else str(OPERATORS[parts[2]](int(parts[1]), int(parts[3])))


def reward(response: str, label: str, metadata: dict) -> float:
    """1 where the last turn is the right number and nothing else."""
    return float(response.rpartition(ASSISTANT)[2].strip() == label)
