"""Several turns with a calculator. The model asks by writing `a+b=`; the sum comes back behind it, and it goes on.

    --custom-generate-function-path examples/hooks/calculator_tool.py:generate

Tokens that the tool added are masked: the policy is trained on what it sampled, the asking included.
"""

import re
from dataclasses import replace

from rlkit.rollout.turns import Turns
from rlkit.types.generation import SamplingParams
from rlkit.types.samples import Sample

MAX_CALLS = 3
CALL = re.compile(r"(\d+)\+(\d+)=?$")


async def generate(turns: Turns, sample: Sample, sampling: SamplingParams) -> None:
    """Up to three calls, then a turn that has to end by itself."""
    asking = replace(sampling, stop=(*sampling.stop, "="))
    for call_number in range(MAX_CALLS + 1):
        if not await turns.generate(sample, asking if call_number < MAX_CALLS else sampling):
            return
        call = CALL.search(sample.response)
        if call is None or not is_call(turns, sample):
            return
        total = int(call[1]) + int(call[2])
        if not turns.append(sample, f"{total} "):
            return


def is_call(turns: Turns, sample: Sample) -> bool:
    """Whether the turn ended with the equals sign: engines cut a stop string from the text, the tokens have it."""
    return turns.tokenizer.decode(sample.tokens[-1:]).strip().endswith("=")
