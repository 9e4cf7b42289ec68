"""How an agent is run: a function in a thread of its own, or a command. Called by `agents.py`.

Neither may disturb the rollout manager's event loop, on which the endpoint answers: a function that blocks holds up
other agents at worst.
"""

import asyncio
import json
import math
import os
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from rlkit.config.hooks import HOOKS, is_async, load_function
from rlkit.config.schema import AgentConfig
from rlkit.engines.client import current_token
from rlkit.rollout.hooks import HookError

OUTPUT_TAIL_BYTES = 16384
"""Of what a command prints; its last line may hold the reward, and the end of its errors is told."""
END_TIMEOUT_S = 8.0
"""Longer than the guardian's grace."""


class AgentError(Exception):
    """The agent ended without having done its work."""


class AgentProgram(Protocol):
    async def run(self, base_url: str, api_key: str, task: dict[str, Any]) -> float | None:
        """Play one episode. Raises whatever the agent raises; being cancelled ends it."""
        ...

    def close(self) -> None: ...


def agent_program(cfg: AgentConfig) -> AgentProgram:
    """ConfigError where the function of `--custom-agent-path` cannot be used."""
    if cfg.agent_command is not None:
        return CommandAgent(cfg.agent_command)
    assert cfg.custom_agent_path is not None, "a config with an agent names one"
    return FunctionAgent(cfg.custom_agent_path)


class FunctionAgent:
    """`(base_url, api_key, task) -> float | None` of the user. Coroutine functions share one thread and its event loop;
    plain functions get a thread each, which a process that ends does not wait for."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._function: Callable[..., Any] = load_function(HOOKS["custom_agent_path"], path)
        self._is_async = is_async(self._function)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, base_url: str, api_key: str, task: dict[str, Any]) -> float | None:
        if self._is_async:
            future = asyncio.run_coroutine_threadsafe(self._function(base_url, api_key, task), self._own_loop())
        else:
            future = self._in_thread(base_url, api_key, task)
        return checked_reward(await asyncio.wrap_future(future), f"--custom-agent-path {self._path}")

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _in_thread(self, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                future.set_result(self._function(*arguments))
            except BaseException as error:  # the user's function: told by whoever waits for the future
                future.set_exception(error)

        threading.Thread(target=work, name="agent", daemon=True).start()
        return future

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        return self._loop


class CommandAgent:
    """One process an episode, which the guardian ends with all that it started, also when this process is killed.

    Its environment has OPENAI_BASE_URL and OPENAI_API_KEY, and in RLKIT_TASK_FILE the path of the task as JSON. A last
    line of output that is a JSON object with the key `reward` gives the reward.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._words = shlex.split(command)

    async def run(self, base_url: str, api_key: str, task: dict[str, Any]) -> float | None:
        with tempfile.TemporaryDirectory(prefix="rlkit-agent-") as folder:
            task_file = Path(folder) / "task.json"
            task_file.write_text(json.dumps(task, default=str), encoding="utf-8")
            values = {
                "base_url": base_url,
                "api_key": api_key,
                "prompt": prompt_text(task["prompt"]),
                "task_file": str(task_file),
            }
            status, out, err = await self._run([word.format(**values) for word in self._words], values)
        if status != 0:
            raise AgentError(f"{self._command} ended with status {status}: {err or out or 'it printed nothing'}")
        return self._reward(out)

    def close(self) -> None:
        """Nothing outlives a call of `run`."""

    async def _run(self, words: list[str], values: dict[str, str]) -> tuple[int, str, str]:
        env = {
            "OPENAI_BASE_URL": values["base_url"],
            "OPENAI_API_BASE": values["base_url"],
            "OPENAI_API_KEY": values["api_key"],
            "RLKIT_TASK_FILE": values["task_file"],
        }
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rlkit.orchestration.guardian", *words),
            stdin=pipe,  # never written to: its end of file tells the guardian that we are gone
            stdout=pipe,
            stderr=pipe,
            env=_environment() | env,
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            out, err = await asyncio.gather(_tail(process.stdout), _tail(process.stderr))
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
                except TimeoutError:
                    process.kill()
        return status, out, err

    def _reward(self, out: str) -> float | None:
        lines = out.strip().splitlines()
        try:
            last = json.loads(lines[-1]) if lines else None
        except ValueError:
            return None
        if not isinstance(last, dict) or "reward" not in last:
            return None
        return checked_reward(last["reward"], f"--agent-command {self._command}")


def _environment() -> dict[str, str]:
    """This process's, without the secret of engines and router: an agent has the key of its episode."""
    secret = current_token()
    return {name: value for name, value in os.environ.items() if secret is None or value != secret}


async def _tail(stream: asyncio.StreamReader) -> str:
    """The end of what is written, however much it is."""
    kept = b""
    while chunk := await stream.read(65536):
        kept = (kept + chunk)[-OUTPUT_TAIL_BYTES:]
    return kept.decode("utf-8", errors="replace").strip()


def checked_reward(value: object, where: str) -> float | None:
    """A number or None. HookError, which ends the run, where it is something else; AgentError for NaN."""
    if value is None:
        return None
    if not isinstance(value, bool | int | float):
        raise HookError(f"{where} must give a reward or None, it gave {str(value)[:200]!r} ({type(value).__name__})")
    if not math.isfinite(value):
        raise AgentError(f"{where} gave the reward {value}")
    return float(value)


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as one text: of messages the last one's."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
