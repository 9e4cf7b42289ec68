"""Rules across fields: named functions `rule(cfg)` that return a message with both values and the remedy, or None.

They never edit the configuration. `check` is run by `load_config`, `check_paths` before a launch, `advice` by both
a launch and the dry run.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

from rlkit.config.bounds import BOUNDS, STRINGS
from rlkit.config.fields import all_fields, sections
from rlkit.config.rules import (
    agents,
    algorithms,
    asynchronous,
    batch,
    cluster,
    critic,
    fsdp,
    megatron,
    preferences,
    profile,
    required,
    rollout,
    sampling,
    schedules,
    training,
)
from rlkit.config.rules.advice import ADVICE
from rlkit.config.rules.architecture import model_is_the_one_described
from rlkit.config.rules.megatron_model import megatron_layout_is_possible
from rlkit.config.rules.paths import PATH_RULES
from rlkit.config.schema import RunConfig

Rule = Callable[[RunConfig], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """A rule about one field. Where it finds fault, the rules that compute with that field are not asked."""

    field: str
    rule: Rule


FIELD_RULES: tuple[FieldRule, ...] = (
    *(FieldRule(field=bound.field, rule=bound) for bound in BOUNDS),
    *(FieldRule(field=string.field, rule=string) for string in STRINGS),
    FieldRule(field="rollout_batch_size", rule=required.prompts_per_rollout),
    FieldRule(field="n_samples_per_prompt", rule=required.group_is_big_enough),
)

CROSS_RULES: tuple[Rule, ...] = (
    *required.RULES,
    *batch.RULES,
    *cluster.RULES,
    *rollout.RULES,
    *sampling.RULES,
    *training.RULES,
    *schedules.RULES,
    *fsdp.RULES,
    *megatron.RULES,
    *algorithms.RULES,
    *critic.RULES,
    *preferences.RULES,
    *asynchronous.RULES,
    *agents.RULES,
    *profile.RULES,
)

RULES: tuple[Rule, ...] = (*(item.rule for item in FIELD_RULES), *CROSS_RULES)
"""Every rule that needs nothing but the configuration."""


def check(cfg: RunConfig, *, unreadable: frozenset[str] = frozenset()) -> list[str]:
    """All violations at once. `unreadable`: fields whose value could not be read; rules that need one are not asked."""
    known = _without(cfg, unreadable)
    found: list[str] = []
    bad: set[str] = set(unreadable)
    for item in FIELD_RULES:
        message = _ask(item.rule, known)
        if message is not None:
            found.append(message)
            bad.add(item.field)
    known = _without(cfg, frozenset(bad))
    found += [message for rule in CROSS_RULES if (message := _ask(rule, known)) is not None]
    return found


def check_on(cfg: RunConfig, device: Literal["cpu", "cuda"]) -> list[str]:
    """The violations that show once `--device auto` is resolved. Call it at launch, when torch has been asked."""
    return check(replace(cfg, cluster=replace(cfg.cluster, device=device)))


MODEL_RULES = (megatron_layout_is_possible, model_is_the_one_described)
"""Rules that read the model's config.json."""


def check_paths(cfg: RunConfig) -> list[str]:
    """What is missing in the file system, all at once."""
    return [
        message for rule in (*PATH_RULES, megatron.megatron_has_its_packages, *MODEL_RULES) for message in rule(cfg)
    ]


def advice(cfg: RunConfig) -> list[str]:
    """What works, but probably not as meant. `cfg` passes `check`."""
    return [sentence for rule in ADVICE if (sentence := rule(cfg)) is not None]


def _ask(rule: Rule, cfg: RunConfig) -> str | None:
    try:
        return rule(cfg)
    except AttributeError as error:
        if error.name in all_fields() and type(error.obj) in sections().values():
            return None  # the rule needs a field that `_without` left out
        raise


def _without(cfg: RunConfig, names: frozenset[str]) -> RunConfig:
    """A copy that lacks the fields `names`: reading one is an AttributeError."""
    if not names:
        return cfg
    parts: dict[str, Any] = {}
    for section, cls in sections().items():
        whole = getattr(cfg, section)
        part = cast("Any", object.__new__(cls))  # past __init__, which would set every field
        for item in fields(cls):
            if item.name not in names:
                object.__setattr__(part, item.name, getattr(whole, item.name))
        parts[section] = part
    return RunConfig(**parts)
