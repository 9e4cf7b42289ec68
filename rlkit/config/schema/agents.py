"""Programs that the policy is trained in, through an endpoint that speaks OpenAI's API."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """An agent makes each response: it talks to a local `/v1/chat/completions` whose model is the policy."""

    custom_agent_path: str | None = None
    """Function `(base_url, api_key, task) -> reward or None`, plain or async, that plays one episode. `task` holds
    `prompt`, `label`, `metadata` and `evaluation`. None, and the grader scores the last reply."""
    agent_command: str | None = None
    """The same as a command line, run once an episode without a shell; `{base_url}`, `{api_key}`, `{prompt}` and
    `{task_file}` are filled in. Instead of `--custom-agent-path`."""
    agent_timeout_s: float = 600.0
    """Seconds one episode may take; then it is ended and its sample is left out of the loss."""
    agent_concurrency: int = 256
    """Episodes at once; for `--agent-command` processes, and for a plain function threads."""
    agent_max_turns: int = 64
    """Replies of the policy in one episode; further requests are refused with status 429."""
    agent_host: str = "127.0.0.1"
    """Address on which the endpoint listens, on a port of its own; another one for agents in containers."""

    @property
    def has_agent(self) -> bool:
        return self.custom_agent_path is not None or self.agent_command is not None
