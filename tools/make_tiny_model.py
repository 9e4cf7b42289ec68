"""A Qwen3-shaped model of about a million parameters that half-knows how to add, made in about a minute on two cores.

    python tools/make_tiny_model.py --output runs/tiny --seed 1

`--output` becomes a Hugging Face checkpoint (weights, character tokenizer, chat template) that also holds
`data/train.jsonl` and `data/heldout.jsonl`. The model is warmed up by rlkit's own supervised training on a careless
pupil's homework (`tiny_task.py`) until its measured greedy accuracy on the held-out prompts is that of half-knowledge;
if it cannot be brought there, the tool fails. Complete output is not made again.
"""

import argparse
import contextlib
import json
import random
import shutil
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tiny_task import Problem, split_problems, write_prompts

USER, ASSISTANT, END, PAD, UNKNOWN = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "<|unknown|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ('user', 'assistant') -%}
{{- raise_exception('this model knows the roles user and assistant') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
MAX_ANSWER_TOKENS = 4  # three digits and the end of the turn
MARKER = ".tiny.json"
"""What the folder was made from and what was measured; written last, and hidden so that exports do not copy it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """How the model is brought to half-knowledge. Accuracies are greedy, on all held-out prompts."""

    batch_size: int = 64
    num_steps: int = 300
    """Optimizer steps before the accuracy is looked at."""
    lr: float = 3e-3
    """Peak; falls linearly to a tenth."""
    lr_warmup_steps: int = 20
    forgets: float = 0.62
    """Share of carries that the pupil leaves out."""
    aim_low: float = 0.37
    aim_high: float = 0.47
    """Where the warm-up stops; narrower than the band of 35 to 50 %, so that a run measures the same within it."""
    nudge_steps: int = 4
    """Optimizer steps between two looks, outside that range; the pupil is more attentive or more careless meanwhile."""
    nudge: float = 0.15
    max_nudges: int = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the checkpoint; replaced if it holds another one"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights, the split and the homework (default: %(default)s)"
    )
    parser.add_argument(
        "--untrained",
        action="store_true",
        help="leave the warm-up out: a model whose long, senseless answers suit benchmarks",
    )
    parser.add_argument("--num-threads", type=int, default=1, help="threads of the warm-up (default: %(default)s)")
    args = parser.parse_args()
    output: Path = args.output.resolve()
    recipe = None if args.untrained else WarmUp()
    made_from = {"seed": args.seed, "recipe": asdict(recipe) if recipe else None, "tool": 1}
    if is_made(output, made_from):
        print(f"{output} is there already, made from the same seed and settings; nothing to do")
        return
    refuse_foreign(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        model, measured = build(Path(scratch), recipe, seed=args.seed, num_threads=args.num_threads)
        (model / MARKER).write_text(json.dumps({"made_from": made_from, "measured": measured}, indent=2) + "\n")
        shutil.rmtree(output, ignore_errors=True)
        model.rename(output)
    accuracy = measured.get("greedy_accuracy")
    knows = "untrained" if accuracy is None else f"greedy accuracy {accuracy:.3f}"
    seconds = time.perf_counter() - start
    print(f"wrote {output}: {knows} ({measured['num_held_out']} held-out prompts), {seconds:.0f} s")


def is_made(output: Path, made_from: dict[str, Any]) -> bool:
    marker = output / MARKER
    return marker.exists() and json.loads(marker.read_text())["made_from"] == made_from


def refuse_foreign(output: Path) -> None:
    """Only a folder that this tool made is replaced."""
    if output.exists() and any(output.iterdir()) and not (output / MARKER).exists():
        raise SystemExit(f"{output} is not empty and was not made by this tool; choose another --output")


def build(scratch: Path, recipe: WarmUp | None, *, seed: int, num_threads: int) -> tuple[Path, dict[str, float]]:
    """Make everything below `scratch`; returns the finished folder and what was measured. No recipe, no warm-up."""
    import torch
    import transformers

    torch.set_num_threads(num_threads)
    transformers.utils.logging.disable_progress_bar()
    train, held_out = split_problems(seed)
    blank, finished = scratch / "blank", scratch / "model"
    num_params = write_blank_model(blank, seed=seed)
    measured: dict[str, float] = {"num_held_out": len(held_out), "num_params": num_params}
    if recipe is None:
        shutil.copytree(blank, finished)
    else:
        print(f"warming up a model of {num_params:,} parameters (seed {seed}) by supervised training", flush=True)
        with Pupil(blank, recipe, train, held_out, seed=seed, num_threads=num_threads) as pupil:
            measured["greedy_accuracy"] = warm_up(pupil, recipe)
            pupil.export(finished, scratch / "checkpoint")
    write_prompts(finished / "data" / "train.jsonl", train)
    write_prompts(finished / "data" / "heldout.jsonl", held_out)
    return finished, measured


def write_blank_model(directory: Path, *, seed: int, tokenizer: Any = None) -> int:
    """An untrained checkpoint; returns its number of parameters. `tokenizer` unset: one token a character.

    A rotary base of 30 and weights of 0.1 let so small and short-sighted a model learn sums in a few hundred steps
    instead of thousands.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer or character_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            num_hidden_layers=2,
            intermediate_size=640,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 30.0},
            initializer_range=0.1,
            tie_word_embeddings=True,
            bos_token_id=None,
            dtype=torch.float32,
            **ids,
        )
    )
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def character_tokenizer() -> Any:
    """One token a printable ASCII character, and the markers of the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    markers = [PAD, UNKNOWN, END, USER, ASSISTANT]
    characters = [*string.digits, *sorted(set(string.printable) - set(string.digits) - set("\r\x0b\x0c"))]
    vocab = {token: number for number, token in enumerate([*markers, *characters])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))  # BPE without a merge: single characters
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def warm_up(pupil: "Pupil", recipe: WarmUp) -> float:
    """Train until the greedy accuracy lies where the recipe aims; returns it. SystemExit when that does not happen."""
    pupil.learn(recipe.num_steps, forgets=recipe.forgets)
    accuracy = pupil.greedy_accuracy()
    for _ in range(recipe.max_nudges):
        print(f"  after {pupil.num_steps} steps: greedy accuracy {accuracy:.3f}", flush=True)
        if recipe.aim_low <= accuracy <= recipe.aim_high:
            return accuracy
        forgets = recipe.forgets + (recipe.nudge if accuracy > recipe.aim_high else -recipe.nudge)
        pupil.learn(recipe.nudge_steps, forgets=forgets)
        accuracy = pupil.greedy_accuracy()
    raise SystemExit(
        f"the warm-up left the model at a greedy accuracy of {accuracy:.3f} after {pupil.num_steps} steps, "
        f"not between {recipe.aim_low} and {recipe.aim_high}; another --seed may do, and this one is worth a bug report"
    )


class Pupil:
    """The model in rlkit's trainer (one rank on the CPU), and its held-out accuracy."""

    def __init__(
        self,
        checkpoint: Path,
        recipe: WarmUp,
        train: Sequence[Problem],
        held_out: Sequence[Problem],
        *,
        seed: int,
        num_threads: int,
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rlkit.backends.fsdp.backend import FsdpBackend
        from rlkit.types.ranks import RankInfo

        self.num_steps = 0
        self._recipe = recipe
        self._train = train
        self._held_out = held_out
        self._rng = random.Random(f"homework {seed}")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        # generates; the trainer's weights are copied into it before each measurement
        self._twin: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._backend = FsdpBackend()
        rank = RankInfo(
            rank=0,
            world_size=1,
            local_rank=0,
            master_addr="127.0.0.1",
            master_port=0,
            device="cpu",
            num_threads=num_threads,
        )
        self._backend.init(trainer_config(checkpoint, recipe, seed), rank, resume_from=None)

    def __enter__(self) -> "Pupil":
        return self

    def __exit__(self, *_: object) -> None:
        from rlkit.dist.groups import destroy_process_group

        destroy_process_group()

    def learn(self, num_steps: int, *, forgets: float) -> None:
        """Optimizer steps on fresh homework."""
        from rlkit.algo.batching import build_updates

        for _ in range(num_steps):
            problems = self._rng.sample(self._train, self._recipe.batch_size)
            samples = [self._sample(problem, problem.homework(self._rng, forgets=forgets)) for problem in problems]
            updates = build_updates(
                samples,
                [1.0] * len(samples),
                dp=1,
                batch_size=len(samples),
                max_tokens=8192,
                per_token_loss=True,
                with_rollout_logprobs=False,
                require_reward=False,
            )
            self._backend.train(self.num_steps, updates[0])
            self.num_steps += 1

    def _sample(self, problem: Problem, answer: str) -> Any:
        from rlkit.types.samples import Sample, SampleStatus

        prompt_ids = self._prompt_ids(problem)
        response_ids = [*self._tokenizer.encode(answer, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Sample(
            group_id=0,
            index=0,
            seed=0,
            tokens=[*prompt_ids, *response_ids],
            prompt_length=len(prompt_ids),
            response=answer,
            loss_mask=[1] * len(response_ids),
            status=SampleStatus.COMPLETED,
        )

    def _prompt_ids(self, problem: Problem) -> list[int]:
        text = self._tokenizer.apply_chat_template(problem.messages(), add_generation_prompt=True, tokenize=False)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def greedy_accuracy(self) -> float:
        """Share of held-out problems whose greedy answer is right."""
        import torch

        with torch.no_grad():
            parameters = dict(self._twin.named_parameters())
            for bucket in self._backend.weights.buckets(1 << 30):
                for name, tensor in bucket.tensors():
                    parameters[name].copy_(tensor)
        prompts = [self._prompt_ids(problem) for problem in self._held_out]
        # every prompt has the same length, so no padding is needed
        outputs = self._twin.generate(torch.tensor(prompts), do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
        answers = self._tokenizer.batch_decode(outputs[:, len(prompts[0]) :], skip_special_tokens=True)
        right = [answer == problem.answer for answer, problem in zip(answers, self._held_out, strict=True)]
        return sum(right) / len(right)

    def export(self, directory: Path, checkpoint: Path) -> None:
        """Write the Hugging Face checkpoint; `checkpoint` takes the trainer's own, which nobody needs."""
        self._backend.save(self.num_steps, checkpoint, hf_directory=directory)


def trainer_config(checkpoint: Path, recipe: WarmUp, seed: int) -> Any:
    """The run configuration of the warm-up, as far as a training rank looks at it."""
    from rlkit.config.schema import ClusterConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig

    base = RunConfig()
    return replace(
        base,
        cluster=ClusterConfig(actor_num_gpus_per_node=1, device="cpu"),
        model=ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"),
        rollout=RolloutConfig(num_rollout=recipe.num_steps, rollout_batch_size=recipe.batch_size),
        train=TrainConfig(seed=seed),
        algo=replace(base.algo, loss_type="sft_loss", calculate_per_token_loss=True),
        optimizer=replace(
            base.optimizer,
            lr=recipe.lr,
            min_lr=recipe.lr / 10,
            lr_decay_style="linear",
            lr_warmup_iters=recipe.lr_warmup_steps,
            lr_decay_iters=recipe.num_steps,
        ),
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
        sys.exit(0)
    sys.exit(130)
