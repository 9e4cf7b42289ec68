"""What each field may hold by itself: numbers in a range, strings that are not empty. Checked before the rules that
compute with them."""

import math
from dataclasses import dataclass
from typing import Any, cast

from rlkit.config.fields import all_fields
from rlkit.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A rule about one number, or every number of a list. `None` (unset) is always allowed; NaN and infinity never."""

    field: str
    low: float
    """Smallest allowed value."""
    low_open: bool = False
    """`low` itself is not allowed."""
    high: float = math.inf
    """Largest allowed value."""
    high_open: bool = False
    also: tuple[float, ...] = ()
    """Allowed outside the range, e.g. -1 for "no limit"."""
    why: str = ""

    @property
    def __name__(self) -> str:
        return f"{self.field}_is_in_range"

    def __call__(self, cfg: RunConfig) -> str | None:
        value = _value(cfg, self.field)
        for number in _numbers(value):
            if problem := self.problem(number):
                return f"{self.field} = {problem}; set {all_fields()[self.field].flag}"
        return None

    def problem(self, number: float) -> str | None:
        """`0 must be at least 1` where the number is not allowed."""
        if self._allows(number):
            return None
        finite = "" if math.isfinite(number) else "finite, and "
        return f"{number} must be {finite}{self._range()}{f': {self.why}' if self.why else ''}"

    def _allows(self, number: float) -> bool:
        if number in self.also:
            return True
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        return math.isfinite(number) and above and below

    def _range(self) -> str:
        low = f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = "" if self.high == math.inf else f" and {'below' if self.high_open else 'at most'} {self.high:g}"
        also = "".join(f", or {number:g}" for number in self.also)
        return f"{low}{high}{also}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NotEmpty:
    """A rule about one string, or every string of a list."""

    field: str

    @property
    def __name__(self) -> str:
        return f"{self.field}_is_not_empty"

    def __call__(self, cfg: RunConfig) -> str | None:
        value = _value(cfg, self.field)
        if value != "" and not (isinstance(value, tuple) and "" in value):
            return None
        flag = all_fields()[self.field].flag
        return (
            f"{self.field} holds an empty string, perhaps from an unset shell variable; give {flag} a value or drop it"
        )


def _value(cfg: RunConfig, name: str) -> Any:
    return getattr(getattr(cfg, all_fields()[name].section), name)


def _numbers(value: Any) -> tuple[float, ...]:
    if value is None:
        return ()
    return cast("tuple[float, ...]", value) if isinstance(value, tuple) else (value,)


def _counts(*names: str) -> tuple[Bound, ...]:
    return tuple(Bound(field=name, low=1) for name in names)


def _positive(*names: str) -> tuple[Bound, ...]:
    return tuple(Bound(field=name, low=0, low_open=True) for name in names)


def _not_negative(*names: str) -> tuple[Bound, ...]:
    return tuple(Bound(field=name, low=0) for name in names)


_WHOLE_VOCABULARY = "-1 is the whole vocabulary"
_LARGEST_SEED = 2**63 - 1

BOUNDS: tuple[Bound, ...] = (
    *_counts("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine"),
    *_counts("num_gpus_per_node", "rollout_max_prompt_len", "num_epoch", "rollout_max_response_len"),
    *_counts("rm_num_workers", "eval_interval", "n_samples_per_eval_prompt", "eval_max_response_len"),
    *_counts("sglang_server_concurrency", "embedded_max_running_requests", "lr_decay_iters", "global_batch_size"),
    *_counts("context_parallel_size", "num_steps_per_rollout", "max_tokens_per_gpu", "log_probs_chunk_size"),
    *_counts("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *_counts("expert_tensor_parallel_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *_counts("num_virtual_stages_per_pipeline_rank", "recompute_num_layers"),
    *_counts("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *_counts("vocab_size", "num_experts", "moe_ffn_hidden_size", "moe_router_topk"),
    *_positive("rotary_base", "norm_epsilon"),
    *_counts("update_weight_buffer_size", "update_weights_interval"),
    *_counts("save_interval", "keep_checkpoints", "distributed_timeout_minutes"),
    *_counts("rm_code_memory_bytes", "rm_batch_size", "eval_max_prompt_len"),
    *_not_negative("rm_max_retries", "eval_min_new_tokens"),
    *_counts("over_sampling_batch_size", "dynamic_sampling_max_groups", "partial_rollout_max_continuations"),
    *_counts("agent_concurrency", "agent_max_turns"),
    *_counts("profile_step_end", "memory_snapshot_num_steps"),
    *_counts(
        "check_weight_update_interval", "lr_wsd_decay_iters", "fsdp_replicate_size", "loss_scale_window", "hysteresis"
    ),
    *_positive("loss_scale", "initial_loss_scale", "min_loss_scale", "lora_alpha"),
    *_not_negative("lr_warmup_init", "lora_rank"),
    Bound(field="lr_warmup_fraction", low=0, high=1, high_open=True),
    Bound(field="lora_dropout", low=0, high=1, high_open=True),
    *_not_negative("max_restarts", "sigterm_grace_s", "record_for_replay"),
    *_positive("mismatch_bound"),
    Bound(field="report_samples", low=0, high=8, why="a report stays small enough to mail"),
    *_positive("hang_timeout_s"),
    *_not_negative("max_staleness"),
    *_not_negative("profile_step_start", "profile_ranks"),
    *_positive(
        "placement_timeout_s",
        "gpu_memory_gib",
        "host_memory_gib",
        "rm_timeout_s",
        "agent_timeout_s",
        "engine_start_timeout_s",
        "engine_timeout_s",
    ),
    *_positive("eps_clip_high", "adam_eps"),
    *_not_negative("num_rollout", "rollout_stop_token_ids", "start_rollout_id", "kl_loss_coef", "entropy_coef"),
    *_not_negative("lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "ckpt_step"),
    *_counts("loss_constant_length", "overlong_buffer_len"),
    *_positive("overlong_penalty_factor", "tis_clip", "rs_upper_bound", "rs_veto_threshold", "opd_kl_coef"),
    *_not_negative("critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps"),
    *_positive("value_clip", "dpo_beta"),
    *_counts("ref_update_interval"),
    Bound(field="lambd", low=0, high=1, why="it weighs what is still to come"),
    Bound(field="dpo_label_smoothing", low=0, high=0.5, high_open=True, why="half of the labels wrong say nothing"),
    *_not_negative("kl_coef", "tis_clip_low", "rs_lower_bound", "opsm_delta"),
    Bound(field="staleness_decay", low=0, low_open=True, high=1, high_open=True, why="1 would not weigh less"),
    Bound(field="gamma", low=0, low_open=True, high=1, why="1 does not discount"),
    Bound(
        field="rollout_temperature",
        low=0,
        low_open=True,
        why="the trainer divides logits by it, and a group of equal samples teaches nothing",
    ),
    Bound(field="eval_temperature", low=0, why="0 is greedy"),
    *(Bound(field=name, low=0, low_open=True, high=1) for name in ("rollout_top_p", "eval_top_p")),
    *(Bound(field=name, low=1, also=(-1,), why=_WHOLE_VOCABULARY) for name in ("rollout_top_k", "eval_top_k")),
    Bound(field="rollout_max_context_len", low=2, why="it holds a prompt and a response"),
    *(Bound(field=name, low=0, high=_LARGEST_SEED) for name in ("rollout_seed", "seed")),
    Bound(field="eps_clip", low=0, low_open=True, high=1, why="the ratio is clipped at 1 - eps_clip from below"),
    Bound(field="eps_clip_c", low=1, low_open=True, why="a dual clip at 1 or below would flip or void the loss"),
    *(Bound(field=name, low=0, high=1, high_open=True) for name in ("adam_beta1", "adam_beta2")),
)

STRINGS: tuple[NotEmpty, ...] = tuple(
    NotEmpty(field=field.name)
    for field in all_fields().values()
    if field.inner in (str, tuple[str, ...]) and field.default != ""  # a required one: `model_is_named`
)
