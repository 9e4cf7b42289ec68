"""Rules about agents: what may not be asked for together with one."""

import shlex
import string

from rlkit.config.fields import all_fields
from rlkit.config.schema import RunConfig

PLACEHOLDERS = ("base_url", "api_key", "prompt", "task_file")
"""What `--agent-command` may hold in braces."""


def one_agent_is_named(cfg: RunConfig) -> str | None:
    path, command = cfg.agent.custom_agent_path, cfg.agent.agent_command
    if path is None or command is None:
        return None
    return (
        f"custom_agent_path = {path} and agent_command = {command} are both set;"
        " drop --custom-agent-path or --agent-command"
    )


def one_thing_makes_responses(cfg: RunConfig) -> str | None:
    if not cfg.agent.has_agent:
        return None
    path = cfg.rollout.custom_generate_function_path
    if path is not None:
        return (
            f"custom_generate_function_path = {path} and an agent would both make the responses;"
            " drop --custom-generate-function-path, or --custom-agent-path and --agent-command"
        )
    if cfg.rollout.partial_rollout:
        return (
            "partial_rollout = True would continue half an episode, but an agent plays one from its beginning;"
            " drop --partial-rollout: what is cut off starts anew"
        )
    if cfg.is_supervised:
        return f"loss_type = {cfg.algo.loss_type} generates nothing; drop --custom-agent-path or --agent-command"
    return None


def command_can_be_run(cfg: RunConfig) -> str | None:
    command = cfg.agent.agent_command
    if command is None:
        return None
    try:
        words = shlex.split(command)
        names = {name for word in words for _, name, _, _ in string.Formatter().parse(word) if name is not None}
    except ValueError as error:
        remedy = "quote --agent-command as for a shell, with {{ for {"
        return f"agent_command = {command} cannot be read ({error}); {remedy}"
    unknown = sorted(names - set(PLACEHOLDERS))
    if unknown:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        remedy = "correct --agent-command, with {{ for {"
        return f"agent_command = {command} has {{{unknown[0]}}}, known are {known}; {remedy}"
    return None if words else "agent_command names no program; correct --agent-command"


def settings_have_an_agent(cfg: RunConfig) -> str | None:
    if cfg.agent.has_agent:
        return None
    for name in ("agent_timeout_s", "agent_concurrency", "agent_max_turns", "agent_host"):
        field = all_fields()[name]
        value = getattr(cfg.agent, name)
        if value != field.default:
            return f"{name} = {value} has no effect without an agent; pass --custom-agent-path, or drop {field.flag}"
    return None


RULES = (one_agent_is_named, one_thing_makes_responses, command_can_be_run, settings_have_an_agent)
