"""A model of a million parameters that half-knows how to ask a calculator, made in about two minutes on two cores.

    python examples/calculator/make_model.py --output runs/calculator/model --seed 0

`--output` becomes a Hugging Face checkpoint that also holds `data/train.jsonl` and `data/heldout.jsonl`: products of
two numbers. The model is warmed up on the homework of the pupil of `task.py` until it answers about half of the
held-out problems greedily. Tokens that the calculator says are masked then, too.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from task import ASSISTANT, CHAT_TEMPLATE, END, TOOL, Problem, split_problems, tool_text
from tool import CALL, calculate

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import make_tiny_model  # pyright: ignore[reportMissingImports]
import tiny_task  # pyright: ignore[reportMissingImports]

NUM_CALL_TOKENS = 12
"""Of a call with room to spare."""
NUM_ANSWER_TOKENS = 5
RECIPE = make_tiny_model.WarmUp(forgets=0.62, aim_low=0.35, aim_high=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the split and the homework")
    parser.add_argument("--num-threads", type=int, default=1, help="threads of the warm-up (default: %(default)s)")
    args = parser.parse_args()
    output: Path = args.output.resolve()
    made_from = {"seed": args.seed, "recipe": asdict(RECIPE), "example": "calculator 1"}
    if make_tiny_model.is_made(output, made_from):
        print(f"{output} is there already, made from the same seed and settings; nothing to do")
        return
    make_tiny_model.refuse_foreign(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        model, measured = build(Path(scratch), seed=args.seed, num_threads=args.num_threads)
        marker = {"made_from": made_from, "measured": measured}
        (model / make_tiny_model.MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        shutil.rmtree(output, ignore_errors=True)
        model.rename(output)
    told = f"greedy accuracy {measured['greedy_accuracy']:.3f} ({measured['num_held_out']} held-out problems)"
    print(f"wrote {output}: {told}, {time.perf_counter() - start:.0f} s")


def build(scratch: Path, *, seed: int, num_threads: int) -> tuple[Path, dict[str, float]]:
    """Make everything below `scratch`; returns the finished folder and what was measured."""
    import torch
    import transformers

    torch.set_num_threads(num_threads)
    transformers.utils.logging.disable_progress_bar()
    train, held_out = split_problems(seed)
    blank, finished = scratch / "blank", scratch / "model"
    num_params = make_tiny_model.write_blank_model(blank, seed=seed, tokenizer=tool_tokenizer())
    print(f"warming up a model of {num_params:,} parameters (seed {seed}) by supervised training", flush=True)
    with ToolPupil(blank, RECIPE, train, held_out, seed=seed, num_threads=num_threads) as pupil:  # pyright: ignore[reportArgumentType]
        accuracy = make_tiny_model.warm_up(pupil, RECIPE)
        pupil.export(finished, scratch / "checkpoint")
    tiny_task.write_prompts(finished / "data" / "train.jsonl", train)  # pyright: ignore[reportArgumentType]
    tiny_task.write_prompts(finished / "data" / "heldout.jsonl", held_out)  # pyright: ignore[reportArgumentType]
    return finished, {"num_held_out": len(held_out), "num_params": num_params, "greedy_accuracy": accuracy}


def tool_tokenizer() -> Any:
    """One token a character, one each for the markers, and two for the fixed parts of a call."""
    from tokenizers import AddedToken

    tokenizer = make_tiny_model.character_tokenizer()
    tokenizer.add_tokens([AddedToken(TOOL, special=True, normalized=False)], special_tokens=True)
    parts = ("<tool_call>", '{"name": "calculator", "arguments": {"expression": "', '"}}', "</tool_call>")
    tokenizer.add_tokens([AddedToken(part, special=False, normalized=False) for part in parts])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class ToolPupil(make_tiny_model.Pupil):
    """The model in rlkit's trainer. Its homework has turns of the calculator, and so has its examination."""

    def _sample(self, problem: Any, answer: str) -> Any:
        sample = super()._sample(problem, answer)
        tokenizer = self._tokenizer
        tool, assistant = tokenizer.convert_tokens_to_ids([TOOL, ASSISTANT])
        said_by_tool = False
        for place, token in enumerate(sample.tokens[sample.prompt_length :]):
            said_by_tool = said_by_tool or token == tool
            sample.loss_mask[place] = int(not said_by_tool)
            said_by_tool = said_by_tool and token != assistant
        return sample

    def greedy_accuracy(self) -> float:
        """Share of held-out problems that are answered right, with a calculator at hand."""
        import torch

        with torch.no_grad():
            parameters = dict(self._twin.named_parameters())
            for bucket in self._backend.weights.buckets(1 << 30):
                for name, tensor in bucket.tensors():
                    parameters[name].copy_(tensor)
        prompts = [self._prompt_ids(problem) for problem in self._held_out]
        first = self._continue(prompts, NUM_CALL_TOKENS)
        num_right = sum(said == problem.answer for said, problem in zip(first, self._held_out, strict=True))
        asked: dict[int, list[tuple[list[int], Problem]]] = {}  # by length, so that no padding is needed
        for prompt, said, problem in zip(prompts, first, self._held_out, strict=True):
            if (call := CALL.search(said)) is not None:
                text = f"{said}{END}{tool_text(calculate(call[1]))}"
                ids = [*prompt, *self._tokenizer.encode(text, add_special_tokens=False)]
                asked.setdefault(len(ids), []).append((ids, problem))  # pyright: ignore[reportArgumentType]
        for members in asked.values():
            answers = self._continue([ids for ids, _ in members], NUM_ANSWER_TOKENS)
            num_right += sum(said == problem.answer for said, (_, problem) in zip(answers, members, strict=True))
        return num_right / len(self._held_out)

    def _continue(self, prompts: Sequence[list[int]], num_tokens: int) -> list[str]:
        """What the model says greedily behind prompts of one length, up to its end of turn."""
        import torch

        outputs = self._twin.generate(torch.tensor(list(prompts)), do_sample=False, max_new_tokens=num_tokens)
        texts = self._tokenizer.batch_decode(outputs[:, len(prompts[0]) :], skip_special_tokens=False)
        return [text.partition(END)[0] for text in texts]


if __name__ == "__main__":
    random.seed(0)
    main()
