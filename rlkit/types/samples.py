"""What travels from a prompt file to a training batch: `Prompt`, `Sample`, `SampleGroup`.

Made by `data/` and `rollout/`, graded by `rewards/`, packed by `algo/batching.py`. No tensors: these are lists,
cheap to log and to write as JSON. Invariant of a finished sample: `len(loss_mask) == len(rollout_logprobs) ==
response_length == len(tokens) - prompt_length`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SampleStatus(StrEnum):
    PENDING = "pending"
    """Not generated yet."""
    COMPLETED = "completed"
    """Ended by an end-of-sequence id or a stop string."""
    TRUNCATED = "truncated"
    """Ended by a length limit."""
    ABORTED = "aborted"
    """Stopped from outside; tokens so far are kept."""
    FAILED = "failed"
    """The engine answered with an error and no tokens can be trusted."""
    TOO_LONG = "too_long"
    """A response of the data that does not fit into the context; it is left out, never cut."""

    @property
    def is_trainable(self) -> bool:
        return self in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a prompt file, tokenised."""

    position: int
    """0-based row number in the (sliced) file; with `epoch` it names the row for the ledger."""
    epoch: int
    token_ids: list[int]
    text: str
    """The rendered text that `token_ids` encode."""
    label: Any = None
    """Whatever the label column holds; graders convert it. None when no label key is set."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    messages: list[dict[str, Any]] | None = None
    """The conversation that `text` renders, where responses are given or an agent makes them; None otherwise."""


@dataclass(kw_only=True, slots=True)
class Sample:
    """One response to one prompt; filled in while it is generated and graded."""

    group_id: int
    """Number of the prompt group inside the run: monotonic, never reused, also across resumes."""
    index: int
    """0-based position inside the group. Samples that one rollout fans out into share it."""
    seed: int
    tokens: list[int]
    """Prompt ids followed by response ids."""
    prompt_length: int
    response: str = ""
    loss_mask: list[int] = field(default_factory=list[int])
    """1 where a response token was sampled by the policy and is trained on, else 0; one entry a response token."""
    rollout_logprobs: list[float] = field(default_factory=list[float])
    """Engine log-probs of the response tokens at the sampling temperature."""
    status: SampleStatus = SampleStatus.PENDING
    reward: float | None = None
    """None when the sample could not be scored; it is then left out of group statistics and of the loss."""
    reward_detail: dict[str, Any] | None = None
    """The whole dict of a grader that returned one; `reward` is its `--reward-key`."""
    weight_versions: list[int] = field(default_factory=list[int])
    """Weight version(s) that produced the response, in order."""
    version_starts: list[int] = field(default_factory=list[int])
    """For each of them the index of its first response token."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def total_length(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, slots=True)
class SampleGroup:
    """All samples of one prompt. Advantages are centred inside it, whatever its size."""

    group_id: int
    prompt: Prompt
    samples: list[Sample]
