"""TRL's side of the benchmark: `GRPOTrainer` on the CPU, timed step by step. Run by `cpu_step.py` with the Python of
TRL's own environment.

    python tools/bench/trl_step.py workload.json times.json

The trainer is stock; the subclass only reads the clock around generation.
"""

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workload import StepTimes, Workload, last_number_equals


def main(workload_path: str, times_path: str) -> None:
    load = Workload(**json.loads(Path(workload_path).read_text()))
    import torch

    torch.set_num_threads(load.num_threads)
    Path(times_path).write_text(json.dumps([asdict(step) for step in run(load)]))


def run(load: Workload) -> list[StepTimes]:
    """Train `load.num_steps` steps; the times of each."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    steps: list[StepTimes] = []

    class TimedTrainer(GRPOTrainer):
        generate_s = 0.0
        response_tokens = 0

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            output = super()._generate_single_turn(*args, **kwargs)
            self.generate_s += time.perf_counter() - start
            self.response_tokens += sum(len(ids) for ids in output[0])
            return output

        prepare_s = 0.0

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            output = super()._generate_and_score_completions(*args, **kwargs)
            self.prepare_s += time.perf_counter() - start
            return output

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            total = time.perf_counter() - self.start
            trained = total - trainer.prepare_s  # everything that is not generation, scoring and preparation
            steps.append(
                StepTimes(
                    total=total, generate=trainer.generate_s, train=trained, response_tokens=trainer.response_tokens
                )
            )
            trainer.generate_s = trainer.prepare_s = 0.0
            trainer.response_tokens = 0

    def rewards(completions: list[Any], label: list[str], **_: Any) -> list[float]:
        return [last_number_equals(done[0]["content"], right) for done, right in zip(completions, label, strict=True)]

    rows = [json.loads(line) for line in Path(load.prompts).read_text().splitlines()][
        : load.num_prompts * load.num_steps
    ]
    tokenizer = AutoTokenizer.from_pretrained(load.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(load.model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TimedTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[rewards],
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows]),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=scratch,
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
            ),
        )
        trainer.train()
    return steps


if __name__ == "__main__":
    main(*sys.argv[1:])
