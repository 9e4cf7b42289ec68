"""Brings a run's processes up in the right order, each with its way down on the session's exit stack.

Ray and slots -> engines, training ranks and rollout manager side by side -> router -> weight channels.
On shared CUDA devices the engines start first and go to sleep before a trainer exists: they size their KV cache by the
free memory.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ray import ObjectRef

from rlkit.config.rules import check_on
from rlkit.config.schema import RunConfig
from rlkit.config.wording import count
from rlkit.engines.access import forget_token, make_token
from rlkit.observability.console import Console
from rlkit.observability.spans import Spans
from rlkit.orchestration.checkpoints import Checkpoint
from rlkit.orchestration.cluster import Cluster
from rlkit.orchestration.engine_servers import EnginePool, attach
from rlkit.orchestration.layout import plan_layout
from rlkit.orchestration.phases import Phases, SharedGpus, SplitGpus
from rlkit.orchestration.processes import ServerProcess, start_undertaker
from rlkit.orchestration.recovery import EngineRecovery
from rlkit.orchestration.rollout_worker import Rollouts
from rlkit.orchestration.router import register_engines, start_router
from rlkit.orchestration.saving import check_loaded
from rlkit.orchestration.train_workers import TrainGroup
from rlkit.orchestration.waiting import Waiter
from rlkit.orchestration.waits import Waits
from rlkit.sync.updater import WeightUpdater
from rlkit.types.errors import ConfigError
from rlkit.types.ranks import EngineEndpoint, InitReport

ATTACH_TIMEOUT_S = 30.0
"""For an external engine to say who it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The handles of everything that runs."""

    rollouts: Rollouts
    actor: TrainGroup | None
    """None when nothing trains."""
    updater: WeightUpdater | None
    """None when there is nobody to send weights, or nobody to receive them."""
    phases: Phases
    recovery: EngineRecovery | None
    """With `--use-fault-tolerance`."""
    endpoints: list[EngineEndpoint]
    """Where the engines were at the start."""
    num_saved_params: int
    """That a checkpoint holds; 0 when nothing trains."""

    def engine_urls(self) -> list[str]:
        """Where the engines are now."""
        endpoints = self.endpoints if self.updater is None else self.updater.endpoints
        return [endpoint.url for endpoint in endpoints]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Router:
    process: ServerProcess
    url: str


class Startup:
    """One start. `run` returns when everything answers; whatever was started before a failure is on the exit stack."""

    def __init__(
        self, cfg: RunConfig, run_dir: Path, exit_stack: ExitStack, spans: Spans, console: Console, *, waits: Waits
    ) -> None:
        self._cfg = cfg
        self._run_dir = run_dir
        self._exit = exit_stack
        self._spans = spans
        self._console = console
        self._waiter = Waiter(run_dir, waits)
        self._layout = plan_layout(cfg)
        self._device = resolve_device(cfg)
        problems = check_on(cfg, self._device)
        if problems:
            raise ConfigError("\n".join(problems))

    def run(self, checkpoint: Checkpoint | None, *, weight_version: int) -> Fleet:
        began = time.perf_counter()
        resume_from = checkpoint.trainer_dir if checkpoint is not None else None
        self._on_exit(start_undertaker(self._run_dir))
        if self._cfg.engine.engine_token and not self._cfg.engine.rollout_external_engine_addrs:
            make_token()
            self._on_exit(forget_token)
        cluster = Cluster(self._cfg, self._layout, device=self._device)
        self._on_exit(cluster.close)
        # The engines take longest, so nothing comes before them; the router and the others' imports overlap with them.
        engines = self._make_engines(cluster)
        starting = engines.start(weight_version) if engines is not None else []
        router = self._start_router(cluster) if self._cfg.starts_engines else None
        actor = self._make_actor(cluster)
        rollouts = Rollouts(self._cfg, run_dir=self._run_dir, waiter=self._waiter, console=self._console)
        self._on_exit(rollouts.close)

        if self._device == "cuda" and self._cfg.cluster.colocate:
            endpoints, updater = self._engines_ready(engines, starting, actor)
            loading = actor.start_init(resume_from) if actor is not None else []
        else:
            loading = actor.start_init(resume_from) if actor is not None else []
            endpoints, updater = self._engines_ready(engines, starting, actor)
        rollouts_starting = rollouts.start(
            dp=self._cfg.data_parallel_size if self._layout.rank_slots else 1,
            router_url=router.url if router is not None else None,
            engine_urls=[endpoint.url for endpoint in endpoints],
            state=(checkpoint.rollout_state or None) if checkpoint is not None else None,
        )
        if router is not None:
            register_engines(router.url, [endpoint.url for endpoint in endpoints], router.process)
        reports: list[InitReport] = self._waiter.gather(loading, who="training rank", doing="loading the model")
        if actor is not None and checkpoint is not None:
            check_loaded(checkpoint, actor.fingerprints(), with_optimizer=not self._cfg.checkpoint.no_load_optim)
        if actor is not None and updater is not None:
            actor.connect(endpoints)
        rollouts.wait_until_started(rollouts_starting)
        recovery = None
        if self._cfg.engine.use_fault_tolerance and engines and actor and updater and router:
            recovery = EngineRecovery(
                endpoints=endpoints,
                pool=engines,
                actor=actor,
                updater=updater,
                rollouts=rollouts,
                router_url=router.url,
                waiter=self._waiter,
                say=self._console.say,
            )
        phases = self._make_phases(actor, updater)
        self._say_ready(reports, len(endpoints), time.perf_counter() - began)
        self._spans.drain()
        return Fleet(
            rollouts=rollouts,
            actor=actor,
            updater=updater,
            phases=phases,
            recovery=recovery,
            endpoints=endpoints,
            num_saved_params=num_saved_params(reports[0]) if reports else 0,
        )

    def _on_exit(self, close: Callable[[], None]) -> None:
        self._exit.callback(close)

    def _make_engines(self, cluster: Cluster) -> EnginePool | None:
        if not self._layout.engines:
            return None
        pool = EnginePool(self._cfg, cluster, self._layout, run_dir=self._run_dir, waiter=self._waiter)
        self._on_exit(pool.close)
        return pool

    def _make_actor(self, cluster: Cluster) -> TrainGroup | None:
        if not self._layout.rank_slots:
            return None
        actor = TrainGroup(self._cfg, cluster, self._layout, run_dir=self._run_dir, waiter=self._waiter)
        self._on_exit(actor.close)
        return actor

    def _engines_ready(
        self, engines: EnginePool | None, starting: Sequence[ObjectRef], actor: TrainGroup | None
    ) -> tuple[list[EngineEndpoint], WeightUpdater | None]:
        """Wait for the engines; colocated ones are put to sleep until the first weights come."""
        if engines is not None:
            endpoints = engines.endpoints(starting)
            self._waiter.watch_tasks(engines.watch())
        else:
            addresses = self._cfg.engine.rollout_external_engine_addrs if self._cfg.starts_engines else ()
            endpoints = attach(addresses, timeout_s=ATTACH_TIMEOUT_S)
        if actor is None or not endpoints:
            return endpoints, None
        updater = WeightUpdater(
            endpoints,
            actor.push_weights,
            engines_sleep=self._cfg.cluster.colocate,
            timeout_s=self._cfg.engine.engine_timeout_s,
            spans=self._spans,
            pause_mode=self._cfg.sync.pause_generation_mode,
        )
        self._on_exit(updater.close)
        if self._cfg.cluster.colocate:
            updater.sleep_engines()
        return endpoints, updater

    def _start_router(self, cluster: Cluster) -> "_Router":
        process, url = start_router(self._cfg, cluster.driver_address(), self._run_dir / "logs")
        self._on_exit(process.stop)
        self._waiter.watch_process("router", process)
        return _Router(process=process, url=url)

    def _make_phases(self, actor: TrainGroup | None, updater: WeightUpdater | None) -> Phases:
        if actor is None or updater is None or not self._cfg.cluster.colocate:
            return SplitGpus()
        actor.sleep()
        return SharedGpus(actor, updater, self._spans)

    def _say_ready(self, reports: Sequence[InitReport], engines: int, seconds: float) -> None:
        size = f" of {reports[0].num_params / 1e6:.1f} M parameters" if reports else ""
        ranks = count(len(self._layout.rank_slots), "training rank")
        self._console.say(f"{ranks}{size} and {count(engines, 'engine')} on {self._device}, up in {seconds:.0f} s")
        if reports and self._device == "cuda":
            self._console.say(f"trainer: {reports[0].memory_plan}")


def resolve_device(cfg: RunConfig) -> Literal["cpu", "cuda"]:
    """`cuda` or `cpu`."""
    if cfg.cluster.device != "auto":
        return cfg.cluster.device
    import torch  # local: seconds, and the driver needs it for nothing else

    return "cuda" if torch.cuda.is_available() else "cpu"


def num_saved_params(report: InitReport) -> int:
    """Parameters that checkpoints hold."""
    own = report.num_params if report.num_saved_params is None else report.num_saved_params
    return own + report.num_critic_params
