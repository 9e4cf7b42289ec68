"""What a run with engines opens to use them: connections to router and engines, graders, and the generator over them.
Called by `manager.py`.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rlkit.config.schema import RunConfig
from rlkit.data.tokenizer import Tokenizer
from rlkit.engines.client import EngineClient, RouterClient
from rlkit.rewards.pool import GraderPool
from rlkit.rollout.agents import AgentResponder
from rlkit.rollout.collect import Collector
from rlkit.rollout.generator import Generator
from rlkit.rollout.reward_prompts import grader_pool
from rlkit.rollout.sampling import context_limit
from rlkit.rollout.turns import CustomResponder

CONTROL_TIMEOUT_S = 10.0
"""For aborts, which an engine answers at once or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """The connections to router, engines and graders: what a run without engines does not have."""

    router: RouterClient
    engines: list[EngineClient]
    graders: GraderPool
    generator: Generator
    collector: Collector
    has_custom_reward: bool
    agents: AgentResponder | None

    @classmethod
    def open(cls, cfg: RunConfig, tokenizer: Tokenizer, router_url: str, engine_urls: Sequence[str]) -> Self:
        concurrency = cfg.engine.sglang_server_concurrency * max(1, len(engine_urls))
        timeout_s = cfg.engine.engine_timeout_s
        router = RouterClient(router_url, timeout_s=timeout_s, max_connections=concurrency)
        engines = [EngineClient(url, timeout_s=CONTROL_TIMEOUT_S, max_connections=0) for url in engine_urls]
        graders = grader_pool(cfg.reward)
        generator = Generator(
            router,
            engines,
            concurrency=concurrency,
            max_context_len=context_limit(cfg),
            timeout_s=timeout_s,
            run_tag=secrets.token_hex(4),
            patience_s=2 * cfg.engine.engine_start_timeout_s if cfg.engine.use_fault_tolerance else 0.0,
            follows_versions=cfg.sync.pause_generation_mode == "retract",
            outlives_updates=cfg.updates_in_flight and cfg.sync.pause_generation_mode == "abort",
        )
        path = cfg.rollout.custom_generate_function_path
        agents = AgentResponder(cfg, generator, tokenizer) if cfg.agent.has_agent else None
        responder = CustomResponder(path, generator, tokenizer) if path is not None else agents
        return cls(
            router=router,
            engines=engines,
            graders=graders,
            generator=generator,
            collector=Collector(generator, graders, responder=responder, group_rm=cfg.reward.group_rm),
            has_custom_reward=cfg.reward.custom_rm_path is not None,
            agents=agents,
        )

    def set_engines(self, engine_urls: Sequence[str]) -> None:
        """Where the engines are now: one that was restarted has another address."""
        kept = {client.url: client for client in self.engines}
        self.engines[:] = [kept.get(url) or EngineClient(url, timeout_s=CONTROL_TIMEOUT_S) for url in engine_urls]
        self.generator.set_engines(self.engines)

    async def start_graders(self) -> None:
        """Before anything is generated: a broken `--custom-rm-path` is a ConfigError now, not after minutes."""
        if self.has_custom_reward:
            await self.graders.start()

    async def close(self) -> None:
        await self.graders.aclose()
        if self.agents is not None:
            await self.agents.close()
        for client in (self.router, *self.engines):
            await client.close()
