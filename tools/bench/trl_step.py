"""TRL's side of the benchmark: `GRPOTrainer` on the CPU, timed step by step.

    python tools/bench/trl_step.py workload.json times.json

Run by `cpu_step.py` with the Python of TRL's own environment. The trainer is stock; the subclass only reads the clock.
"""

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
from workload import StepTimes, Workload, last_number_equals


class TimedTrainer(GRPOTrainer):
    """Adds up, until `take` is called, the seconds of generation and of all that precedes the loss."""

    generate_s = 0.0
    rollout_s = 0.0
    """Generation, decoding, rewards and advantages."""
    response_tokens = 0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = super()._generate_single_turn(*args, **kwargs)
        self.generate_s += time.perf_counter() - start
        self.response_tokens += sum(len(ids) for ids in output[0])
        return output

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = super()._generate_and_score_completions(*args, **kwargs)
        self.rollout_s += time.perf_counter() - start
        return output

    def take(self, total_s: float) -> StepTimes:
        """The times of a step that took `total_s`; the next one starts at zero."""
        taken = StepTimes(
            total=total_s,
            generate=self.generate_s,
            train=total_s - self.rollout_s,
            response_tokens=self.response_tokens,
        )
        self.generate_s = self.rollout_s = 0.0
        self.response_tokens = 0
        return taken


class Clock(TrainerCallback):
    """From the begin of a step to its end, the optimizer included."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self.steps: list[StepTimes] = []
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.steps.append(self.trainer.take(time.perf_counter() - self._start))


def rewards(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    return [last_number_equals(done[0]["content"], right) for done, right in zip(completions, label, strict=True)]


def run(load: Workload) -> list[StepTimes]:
    """Train `load.num_steps` steps; the times of each."""
    rows = [json.loads(line) for line in Path(load.prompts).read_text().splitlines()]
    rows = rows[: load.num_prompts * load.num_steps]
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(load.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(load.model, padding_side="left"),
            reward_funcs=[rewards],
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows]),
            callbacks=[clock],
            args=settings(load, scratch),
        )
        clock.trainer = trainer
        trainer.train()
    return clock.steps


def settings(load: Workload, output_dir: str) -> GRPOConfig:
    """What rlkit's run does, in TRL's terms: the whole rollout in one optimizer step, nothing recomputed."""
    return GRPOConfig(
        output_dir=output_dir,
        max_steps=load.num_steps,
        per_device_train_batch_size=load.num_samples,
        gradient_accumulation_steps=1,
        num_generations=load.samples_per_prompt,
        max_completion_length=load.max_response_len,
        temperature=1.0,
        learning_rate=load.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.98,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def main(workload_path: str, times_path: str) -> None:
    load = Workload(**json.loads(Path(workload_path).read_text()))
    torch.set_num_threads(load.num_threads)
    Path(times_path).write_text(json.dumps([asdict(step) for step in run(load)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
