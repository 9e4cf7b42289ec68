"""A small valid configuration, and a way to change single fields of it."""

from collections.abc import Callable
from typing import Any

import pytest

from rlkit.config.fields import all_fields, sections
from rlkit.config.schema import RunConfig

VALID = {
    "hf_checkpoint": "models/tiny",
    "prompt_data": "train.jsonl",
    "label_key": "label",
    "rm_type": "math",
    "num_rollout": 10,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 8,
    "actor_num_gpus_per_node": 2,
    "colocate": True,
}


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """`make_config(lr=1e-5, sglang={"page_size": 16})`: the valid configuration with these fields. No checks."""

    def make(**fields: Any) -> RunConfig:
        parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
        parts["engine"]["sglang"] = fields.pop("sglang", {})
        for name, value in (VALID | fields).items():
            parts[all_fields()[name].section][name] = value
        return RunConfig(**{section: cls(**parts[section]) for section, cls in sections().items()})

    return make


@pytest.fixture
def valid_argv() -> list[str]:
    """The same as a command line."""
    words = [f"{all_fields()[name].flag}={value}" for name, value in VALID.items() if name != "colocate"]
    return [*words, "--colocate"]
