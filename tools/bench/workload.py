"""What the CPU benchmark runs: one description for rlkit and for TRL. Imported by both sides; standard library only."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Identical GRPO steps: one optimizer step each, float32, temperature 1, no KL, no reference model."""

    name: str
    model: str
    """Folder of a Hugging Face checkpoint."""
    prompts: str
    """JSONL with `prompt` (chat messages) and `label`; taken in file order, without shuffling."""
    num_prompts: int
    """A step."""
    samples_per_prompt: int
    max_response_len: int
    num_steps: int
    num_warmup_steps: int
    """First steps that are run and not counted."""
    num_threads: int
    lr: float = 1e-6
    """Small on purpose: the responses of all steps, and of both sides, stay comparable."""

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.samples_per_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of one step, and what it produced."""

    total: float
    generate: float
    train: float
    """Forward, backward and optimizer."""
    response_tokens: float


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number_equals(response: str, label: str) -> float:
    """The reward of both sides: 1.0 where the last number of the response is the label. Next to free, so that the
    comparison is not one of graders.
    """
    found = NUMBER.findall(response.replace(",", ""))
    return float(bool(found) and float(found[-1]) == float(label))


def reward(response: str, label: object, metadata: dict[str, object]) -> float:
    """The same, as `--custom-rm-path` calls it."""
    return last_number_equals(response, str(label))
