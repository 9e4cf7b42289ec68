"""Generating, grading and evaluating."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """What is generated in one step."""

    num_rollout: int | None = None
    """Steps of the run (one rollout each). This or `--num-epoch` is required; 0 evaluates only."""
    num_epoch: int | None = None
    """Passes over the prompt file, when `--num-rollout` is unset."""
    rollout_batch_size: int = 0
    """Prompts per rollout. Required."""
    n_samples_per_prompt: int = 1
    """Responses per prompt; GRPO needs at least 2."""
    rollout_temperature: float = 1.0
    """Sampling temperature; the trainer scores log-probs at the same one."""
    rollout_top_p: float = 1.0
    """Nucleus sampling. Below 1 the policy that samples is not the one that is trained: warned about."""
    rollout_top_k: int = -1
    """Top-k sampling; -1 is the whole vocabulary. The same warning holds."""
    rollout_max_response_len: int = 1024
    """Most tokens of one response; longer ones are marked truncated."""
    rollout_max_context_len: int | None = None
    """Most tokens of prompt and response together; unset means the model's own limit."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, beside the model's end-of-sequence ids."""
    rollout_skip_special_tokens: bool = False
    """Leave special tokens out of the response text that graders see."""
    start_rollout_id: int | None = None
    """First step; unset continues after the loaded checkpoint, or starts at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How responses are graded."""

    rm_type: str | None = None
    """Built-in grader: `math`, `exact`, `deepscaler`, `dapo`, `f1`, `gpqa` or `random`; `boxed_` in front grades what
    \\boxed{} holds. A row's metadata may name another (`rm_type`)."""
    custom_rm_path: str | None = None
    """`package.module.function` or `file.py:function`: `(response, label, metadata) -> float | dict | None`, or the
    same as a coroutine. Instead of `--rm-type`."""
    reward_key: str | None = None
    """Key of the number to train on, where the grader returns a dict."""
    eval_reward_key: str | None = None
    """The same for evaluation; unset means `--reward-key`."""
    rm_timeout_s: float = 10.0
    """Seconds one grading may take; then its process is replaced and the sample counts as unscored."""
    rm_num_workers: int = 2
    """Grader processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out evaluation."""

    eval_interval: int | None = None
    """Evaluate after every so many steps, before the first and after the last. Unset: never."""
    eval_prompt_data: tuple[str, ...] = ()
    """Pairs `name path [name path ...]`; paths may be sliced."""
    n_samples_per_eval_prompt: int = 1
    """Responses per evaluation prompt."""
    eval_temperature: float | None = None
    """Unset takes the rollout's; 0 is greedy."""
    eval_top_p: float | None = None
    """Unset takes the rollout's."""
    eval_top_k: int | None = None
    """Unset takes the rollout's."""
    eval_max_response_len: int | None = None
    """Unset takes the rollout's."""
    eval_input_key: str | None = None
    """Unset takes `--input-key`."""
    eval_label_key: str | None = None
    """Unset takes `--label-key`."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first step."""
