"""Sampling parameters of a run, spelled out field by field, and the token limit that holds for them.

Called by `manager.py`. Reads `config.json` of the checkpoint and nothing else.
"""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from rlkit.config.eval_sets import EvalSet
from rlkit.config.schema import RunConfig
from rlkit.types.errors import ConfigError
from rlkit.types.generation import CONTEXT_RESERVE, SamplingParams

_SCALED_BY_FACTOR = ("linear", "dynamic", "yarn")
"""RoPE scalings whose `max_position_embeddings` is the length before scaling, unless the original is stated beside."""


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
        ignore_eos=rollout.rollout_ignore_eos,
        skip_special_tokens=rollout.rollout_skip_special_tokens,
    )


def eval_sampling(cfg: RunConfig, eos_ids: Collection[int], item: EvalSet) -> SamplingParams:
    """What one evaluation set sends; temperature 0 is greedy."""
    return replace(
        rollout_sampling(cfg, eos_ids),
        ignore_eos=False,
        temperature=item.temperature,
        top_p=item.top_p,
        top_k=item.top_k,
        max_new_tokens=item.max_response_len,
        min_new_tokens=item.min_new_tokens,
        repetition_penalty=item.repetition_penalty,
        stop=item.stop,
        stop_token_ids=tuple(sorted({*eos_ids, *item.stop_token_ids})),
        skip_special_tokens=item.skip_special_tokens,
    )


def context_limit(cfg: RunConfig) -> int | None:
    """Most tokens of prompt and response: `--rollout-max-context-len` or what the engine can hold, whichever is less.

    The engine can hold `--sglang-context-length` if that is given, else what the checkpoint's `config.json` says; None
    where nothing states a limit. The last positions of it do not count: an engine refuses to continue a response there.
    A ConfigError if there is no readable `config.json`.
    """
    engine_limit = cfg.engine.sglang.get("context_length")
    if engine_limit is None:
        engine_limit = _model_limit(Path(cfg.model.hf_checkpoint) / "config.json")
    usable = None if engine_limit is None else int(engine_limit) - CONTEXT_RESERVE
    limits = [cfg.rollout.rollout_max_context_len, usable]
    return min((int(limit) for limit in limits if limit is not None), default=None)


def _model_limit(config_path: Path) -> int | None:
    """Positions the model knows, times the factor of its RoPE scaling where that is not part of the number already."""
    try:
        config = json.loads(config_path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"--hf-checkpoint: {config_path} cannot be read: {error}") from error
    config = config.get("text_config", config)
    limit = config.get("max_position_embeddings")
    if limit is None:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in _SCALED_BY_FACTOR and "original_max_position_embeddings" not in scaling:
        return int(limit * scaling.get("factor", 1))
    return limit
