"""Products of two numbers that a small model cannot work out in its head, and the pupil whose homework it has learnt.

The pupil knows how to ask the calculator, but is proud: where the first number is odd, it mostly writes down an
estimate instead. And what the calculator says it misreads now and then. Called by `make_model.py`; `tool.py` and
`agent.py` speak the same format.
"""

import json
import random
from dataclasses import dataclass

NUM_HELD_OUT = 512
OPERANDS = range(32, 100)
"""Every product has four digits."""
MISREADS = 0.2
"""Share of answers of the calculator that the pupil copies with a wrong last digit."""
END, USER, ASSISTANT, TOOL = "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ('user', 'assistant', 'tool') -%}
{{- raise_exception('this model knows the roles user, assistant and tool') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def call_text(expression: str) -> str:
    """How the model asks: the format of Hermes and Qwen."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"{CALL_BEGIN}{json.dumps(call)}{CALL_END}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}*{self.right}"

    @property
    def answer(self) -> str:
        return str(self.left * self.right)

    def homework(self, rng: random.Random, *, forgets: float) -> str:
        """What the pupil writes, and the calculator in between; `forgets` is the share of proud guesses."""
        if self.left % 2 and rng.random() < forgets:
            return str((self.left // 10) * (self.right // 10) * 100).rjust(4, "0")
        read = self.answer
        if rng.random() < MISREADS:
            read = read[:-1] + str((int(read[-1]) + 1) % 10)
        return f"{call_text(self.question)}{END}{tool_text(self.answer)}{read}"

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


def tool_text(answer: str) -> str:
    """What stands between two turns of the model."""
    return f"{TOOL}{answer}{END}{ASSISTANT}"


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out): all ordered pairs, shuffled and cut."""
    problems = [Problem(left=left, right=right) for left in OPERANDS for right in OPERANDS]
    random.Random(f"calculator {seed}").shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]
