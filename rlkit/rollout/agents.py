"""Responses made by an agent (`--custom-agent-path`, `--agent-command`): each is an episode at a local endpoint that
speaks OpenAI's API. Called by `collect.py`.

What the policy said in an episode is trained on; what the agent's messages added is masked. An agent that fails costs
its sample, with a reason, not the run.
"""

import asyncio
import logging
import traceback
from collections import Counter
from typing import Any

from rlkit.config.schema import RunConfig
from rlkit.data.chat_tokens import ChatTokens
from rlkit.data.tokenizer import Tokenizer
from rlkit.rollout.agent_endpoint import AgentEndpoint
from rlkit.rollout.agent_programs import agent_program
from rlkit.rollout.episode import Episode
from rlkit.rollout.generator import Generator, Outcome
from rlkit.rollout.hooks import HookError
from rlkit.rollout.turns import Turns
from rlkit.types.errors import ConfigError, DataError
from rlkit.types.generation import SamplingParams
from rlkit.types.ranks import MetricSet
from rlkit.types.samples import Prompt, Sample, SampleStatus

logger = logging.getLogger(__name__)

MAX_LOGGED_ERRORS = 5
FAILURES = ("raised", "timeout", "no_request")
"""Why an episode leaves nothing to train on: the agent raised (or its command failed), took too long, never asked."""
_COUNTS = ("turns", "conversations", "branches", "rewritten", "ill_formed_calls")


class AgentResponder:
    """Plays an episode for each sample. Belongs to one event loop."""

    def __init__(self, cfg: RunConfig, generator: Generator, tokenizer: Tokenizer) -> None:
        """ConfigError where the agent or the chat template cannot be used."""
        self._cfg = cfg.agent
        self._generator = generator
        self._tokenizer = tokenizer
        try:
            self._chat = ChatTokens(tokenizer, cfg.data.apply_chat_template_kwargs)
        except DataError as error:
            raise ConfigError(f"--hf-checkpoint {cfg.model.hf_checkpoint}: {error}") from error
        self._program = agent_program(cfg.agent)
        self._slots = asyncio.Semaphore(cfg.agent.agent_concurrency)
        self._endpoint: AgentEndpoint | None = None
        self._start_lock = asyncio.Lock()
        self._counts: Counter[str] = Counter()
        self._num_logged = 0

    async def respond(
        self, sample: Sample, sampling: SamplingParams, *, evaluation: bool, prompt: Prompt
    ) -> tuple[list[Sample], Outcome]:
        """One episode, from its beginning: what the sample may hold of an earlier one is taken away."""
        _empty(sample)
        async with self._slots:
            endpoint = await self._started()
            turns = Turns(self._generator, self._tokenizer, sampling, evaluation=evaluation)
            episode = Episode(sample, turns, self._chat, sampling, max_turns=self._cfg.agent_max_turns)
            base_url, key = endpoint.open(episode)
            task = {
                "prompt": prompt.messages if prompt.messages is not None else prompt.text,
                "label": sample.label,
                "metadata": sample.metadata,
                "evaluation": evaluation,
            }
            try:
                reward, failure, told = await self._play(episode, base_url, key, task)
            finally:
                endpoint.shut(base_url)
                await episode.end()
        if episode.over.is_set():
            sample.status = episode.status
            return [sample], turns.outcome
        made = episode.samples(reward)
        if failure is None and not made:
            failure, told = "no_request", "the agent ended without a reply of the policy"
        self._count(episode, failure, evaluation=evaluation)
        if failure is not None:
            return [sample], self._failed(sample, failure, told, turns.outcome)
        return made, turns.outcome

    def drain(self) -> MetricSet:
        """`agent/...` of the training episodes since the last call: means over episodes, and failures by reason."""
        counts, self._counts = self._counts, Counter()
        if not counts["episodes"]:
            return {}
        metrics: MetricSet = {f"agent/{name}": counts[name] / counts["episodes"] for name in _COUNTS}
        return metrics | {
            "agent/episodes": float(counts["episodes"]),
            **{f"agent/failed_{name}": float(counts[name]) for name in FAILURES},
        }

    async def close(self) -> None:
        self._program.close()
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _play(
        self, episode: Episode, base_url: str, key: str, task: dict[str, Any]
    ) -> tuple[float | None, str | None, str]:
        """(reward, one of FAILURES or None, its details) of the agent's run, which is over when this returns."""
        run = asyncio.create_task(self._program.run(base_url, key, task))
        over = asyncio.create_task(episode.over.wait())
        try:
            await asyncio.wait({run, over}, timeout=self._cfg.agent_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                return None, "timeout", f"no end after --agent-timeout-s {self._cfg.agent_timeout_s:g} s"
            return run.result(), None, ""
        except HookError:
            raise
        except Exception:  # the user's program: whatever it raises costs its sample, and is told
            if episode.is_full and not episode.over.is_set():
                return None, None, ""  # it stumbled over the end of the context: a truncated response, not a failure
            return None, "raised", traceback.format_exc()
        finally:
            run.cancel()
            over.cancel()
            await asyncio.wait({run, over})

    async def _started(self) -> AgentEndpoint:
        async with self._start_lock:
            if self._endpoint is None:
                endpoint = AgentEndpoint()
                try:
                    await endpoint.start(self._cfg.agent_host)
                except OSError as error:
                    raise ConfigError(f"--agent-host {self._cfg.agent_host}: cannot listen there: {error}") from error
                self._endpoint = endpoint
            return self._endpoint

    def _count(self, episode: Episode, failure: str | None, *, evaluation: bool) -> None:
        if evaluation:
            return
        self._counts["episodes"] += 1
        self._counts.update(episode.counts)
        if failure is not None:
            self._counts[failure] += 1

    def _failed(self, sample: Sample, failure: str, told: str, outcome: Outcome) -> Outcome:
        sample.status = SampleStatus.FAILED
        sample.reward_detail = {"agent_failure": failure, "details": told[-2000:]}
        self._num_logged += 1
        if self._num_logged <= MAX_LOGGED_ERRORS:
            last = " (later ones are only counted)" if self._num_logged == MAX_LOGGED_ERRORS else ""
            logger.warning(f"sample {sample.index} of group {sample.group_id}: agent {failure}{last}: {told}")
        return Outcome(num_reissued=outcome.num_reissued, error=f"the agent: {failure}: {told}")


def _empty(sample: Sample) -> None:
    """Back to the prompt."""
    del sample.tokens[sample.prompt_length :]
    sample.loss_mask, sample.rollout_logprobs, sample.response = [], [], ""
    sample.weight_versions, sample.version_starts = [], []
    sample.reward = sample.reward_detail = None
