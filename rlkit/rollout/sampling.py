"""Sampling parameters of a run, spelled out field by field, and the token limits that hold for them. Pure but for reading `config.json`."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from rlkit.config.schema import RunConfig
from rlkit.types.errors import ConfigError
from rlkit.types.generation import SamplingParams

T = TypeVar("T")
_LENGTH_KEY = "max_position_embeddings"


def rollout_sampling(cfg: RunConfig, eos_ids: Collection[int]) -> SamplingParams:
    """What training rollouts send. `eos_ids` are the model's end-of-sequence ids; the user's stop ids come on top."""
    rollout = cfg.rollout
    return SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=tuple(sorted({*eos_ids, *rollout.rollout_stop_token_ids})),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def eval_sampling(cfg: RunConfig, eos_ids: Collection[int]) -> SamplingParams:
    """The same with the `--eval-*` overrides; temperature 0 is greedy."""
    rollout, overrides = cfg.rollout, cfg.evaluation
    return SamplingParams(
        temperature=_first(overrides.eval_temperature, rollout.rollout_temperature),
        top_p=_first(overrides.eval_top_p, rollout.rollout_top_p),
        top_k=_first(overrides.eval_top_k, rollout.rollout_top_k),
        max_new_tokens=_first(overrides.eval_max_response_len, rollout.rollout_max_response_len),
        stop=rollout.rollout_stop,
        stop_token_ids=tuple(sorted({*eos_ids, *rollout.rollout_stop_token_ids})),
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def context_limit(cfg: RunConfig) -> int | None:
    """Most tokens of prompt and response: the smallest of `--rollout-max-context-len`, `--sglang-context-length` and the model's own limit.

    None where nothing states one. A ConfigError if the checkpoint has no readable `config.json`.
    """
    limits = [cfg.rollout.rollout_max_context_len, cfg.engine.sglang.get("context_length"), _model_limit(cfg)]
    return min((int(limit) for limit in limits if limit is not None), default=None)


def _model_limit(cfg: RunConfig) -> int | None:
    path = Path(cfg.model.hf_checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"--hf-checkpoint: {path} cannot be read: {error}") from error
    return config.get(_LENGTH_KEY, config.get("text_config", {}).get(_LENGTH_KEY))


def _first(override: T | None, default: T) -> T:
    return default if override is None else override
