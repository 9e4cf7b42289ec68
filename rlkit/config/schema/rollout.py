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
    rollout_ignore_eos: bool = False
    """Responses run on to their length limit, past end-of-sequence and stop ids; for timing, where every step must hold
    the same number of tokens. Evaluation is not touched."""
    rollout_skip_special_tokens: bool = False
    """Leave special tokens out of the response text that graders see."""
    start_rollout_id: int | None = None
    """First step; unset continues after the loaded checkpoint, or starts at 0. It numbers steps and does not move the
    position in the prompt file: that is the loaded checkpoint's, or the start."""
    over_sampling_batch_size: int | None = None
    """Prompts started at once, and again whenever those running cannot fill the batch any more; unset means
    `--rollout-batch-size`. Generation ends the moment that many groups are kept."""
    dynamic_sampling_filter_path: str | None = None
    """Which finished groups are kept: `check_reward_nonzero_std` (rewards differ), the same `_with_fallback` (takes
    groups of equal rewards rather than sample another round), or a function `(group) -> bool | FilterVerdict`."""
    dynamic_sampling_max_groups: int | None = None
    """Groups that one step may try before it gives up with an error; unset means ten times `--rollout-batch-size`, at
    least `--over-sampling-batch-size`."""
    partial_rollout: bool = False
    """Keep the tokens of groups that are cut off when enough are kept, and continue them in the next step. Without it
    their prompts are started anew."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Train only on the tokens that the newest weights sampled: tokens of earlier steps are masked."""
    partial_rollout_max_continuations: int | None = None
    """A group that was continued so often is not cut off again: its step waits for it. Unset: no limit."""
    buffer_filter_path: str | None = None
    """Which waiting groups a step takes first: `pop_first` (the oldest, also when unset), or a function
    `(waiting, num_groups, step) -> list`."""
    custom_generate_function_path: str | None = None
    """Coroutine function `(turns, sample, sampling) -> None | list[Sample]` that makes one response: several turns,
    tools, or several samples. Evaluation calls it too."""
    rollout_function_path: str | None = None
    """Coroutine function `(job) -> list[SampleGroup]` that makes the batch of a step, instead of dynamic sampling."""
    log_passrate: bool = False
    """Also report `rollout/pass@k` of training rollouts, for powers of two; evaluation always does."""
    rollout_sample_filter_path: str | None = None
    """Function `(groups) -> Iterable[Sample]`: samples of the batch to leave out of the loss; their rewards still count
    in their groups."""
    rollout_all_samples_process_path: str | None = None
    """Function `(groups, step) -> None` that sees every finished group of a step, the filtered ones too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How responses are graded."""

    rm_type: str | None = None
    """Built-in grader: `math`, `exact`, `deepscaler`, `dapo`, `f1`, `gpqa`, `ifbench`, `code`, `remote_rm`,
    `reward_model` or `random`; `boxed_` in front grades what \\boxed{} holds. A row's metadata may name another
    (`rm_type`)."""
    custom_rm_path: str | None = None
    """`package.module.function` or `file.py:function`: `(response, label, metadata) -> float | dict | None`, or the
    same as a coroutine. Instead of `--rm-type`."""
    group_rm: bool = False
    """The function of `--custom-rm-path` gets all responses to a prompt at once, a list, and returns a list. Evaluation
    calls it with lists of one."""
    rm_url: str | None = None
    """Address of the reward server of `remote_rm`: it gets `{"prompt", "response", "label", "metadata"}` as JSON and
    answers with a number, or an object for `--reward-key`. For `reward_model` the root of a server that has
    `/classify`: SGLang with `--is-embedding`, or `rlkit.engines.embedded.reward_server`."""
    rm_model: str | None = None
    """Folder of the model that `reward_model` asks at `--rm-url`: its tokenizer and chat template render what is
    scored."""
    rm_batch_size: int = 32
    """Most responses of one request to the reward model."""
    rm_max_retries: int = 10
    """How often a request to the server is sent again, with pauses of up to 30 s, before its sample is unscored."""
    custom_reward_post_process_path: str | None = None
    """Function `(groups) -> list[list[float | None]]` that replaces the rewards of a batch before advantages are
    computed; the metrics of rewards are those of the grader."""
    reward_key: str | None = None
    """Key of the number to train on, where the grader returns a dict."""
    eval_reward_key: str | None = None
    """The same for evaluation; unset means `--reward-key`."""
    rm_timeout_s: float = 10.0
    """Seconds one grading may take; then its process is replaced and the sample counts as unscored. For `code` seconds
    of one test, for `remote_rm` of one request."""
    rm_num_workers: int = 2
    """Grader processes; for `code` programs at once."""
    rm_code_memory_bytes: int = 1024 * 1024 * 1024
    """Address space of a program that `code` runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Held-out evaluation."""

    eval_interval: int | None = None
    """Evaluate after every so many steps, before the first and after the last. Unset: never."""
    eval_prompt_data: tuple[str, ...] = ()
    """Pairs `name path [name path ...]`; paths may be sliced."""
    eval_config: str | None = None
    """YAML or TOML file of evaluation sets, each with its own keys, sampling and grader; instead of
    `--eval-prompt-data`."""
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
    eval_tool_key: str | None = None
    """Unset takes `--tool-key`."""
    eval_max_prompt_len: int | None = None
    """Longer prompts (tokens) are left out and counted; unset takes `--rollout-max-prompt-len`."""
    eval_min_new_tokens: int = 0
    """Least tokens of a response, before which it cannot end."""
    eval_category_key: str | None = None
    """Key of the metadata by which scores are also told apart: `eval/<name>/by/<category>`."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first step."""
