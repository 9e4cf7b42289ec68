"""The rollout manager as a Ray actor. `RolloutWorker` is a shell around `RolloutManager`; `Rollouts` is the driver's
handle."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlkit.config.schema import RunConfig
from rlkit.engines.access import current_token, use_token
from rlkit.observability.console import Console
from rlkit.observability.spans import Spans
from rlkit.orchestration.cluster import WORKER_ENV
from rlkit.orchestration.waiting import Waiter
from rlkit.orchestration.worker_output import claim_output
from rlkit.rollout.manager import RolloutManager
from rlkit.rollout.metrics import eval_table
from rlkit.types.ranks import MetricSet

GC_THRESHOLDS = (3_000, 1_000, 1_000)
"""Python's own (700, 10, 10) looks through every list of tokens again and again while answers come in: with 4,000
samples of 2,000 tokens that doubled the time of an answer and held up the event loop for half a second. With these each
list is looked through once, those of some hundred samples at a time (`tools/bench/manager.py`)."""


class RolloutWorker:
    """An async actor: progress can be asked for while a rollout runs."""

    def __init__(self, cfg: RunConfig, run_dir: Path, *, token: str | None = None) -> None:
        use_token(token)
        gc.set_threshold(*GC_THRESHOLDS)
        claim_output(run_dir, "rollout")
        self._cfg = cfg
        self._run_dir = run_dir
        self._spans = Spans()
        self._progress = (0, 0)
        self._manager: RolloutManager | None = None

    async def start(
        self, dp: int, router_url: str | None, engine_urls: Sequence[str], state: dict[str, Any] | None
    ) -> None:
        """Open data, graders and connections; `state` is a checkpoint's."""
        self._manager = RolloutManager(
            self._cfg,
            run_dir=self._run_dir,
            dp=dp,
            router_url=router_url,
            engine_urls=engine_urls,
            spans=self._spans,
            on_progress=self._on_progress,
        )
        if state is not None:
            self._manager.load_state(state)

    def _on_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)

    @property
    def manager(self) -> RolloutManager:
        assert self._manager is not None, "start() comes first"
        return self._manager

    async def progress(self) -> tuple[int, int]:
        """Samples done and wanted in the running rollout or evaluation."""
        return self._progress

    async def waits(self) -> list[str]:
        """What the running rollout or evaluation waits for, a sentence each."""
        return self.manager.waits()

    async def generate(self, step: int) -> tuple[list[ObjectRef], MetricSet]:
        """Shards go into the object store one by one, so that each rank fetches its own only."""
        batch = await self.manager.generate(step)
        return [ray.put(shard) for shard in batch.shards], {**batch.metrics, **self._spans.drain()}

    async def evaluate(self, step: int) -> MetricSet:
        return {**(await self.manager.evaluate(step)), **self._spans.drain()}

    async def set_engines(self, engine_urls: Sequence[str]) -> None:
        self.manager.set_engines(engine_urls)

    async def set_engine_version(self, version: int) -> None:
        self.manager.set_engine_version(version)

    async def record_trained(self, step: int, gaps: Sequence[ObjectRef]) -> MetricSet:
        return self.manager.record_trained(step, [await ref for ref in gaps])

    async def state(self, step: int) -> dict[str, Any]:
        return self.manager.state(step)

    async def close(self) -> None:
        await self.manager.close()


WHO = "rollout manager"
ASK_TIMEOUT_S = 2.0
RemoteRolloutWorker: Any = ray.remote(num_cpus=0)(RolloutWorker)


class Rollouts:
    """Generates, evaluates and accounts for prompts; shows progress while it does."""

    def __init__(self, cfg: RunConfig, *, run_dir: Path, waiter: Waiter, console: Console) -> None:
        self._waiter = waiter
        self._console = console
        self.on_poll: Callable[[], None] | None = None
        """Called about twice a second while a rollout or an evaluation runs."""
        self._begun: tuple[int, ObjectRef] | None = None
        """A rollout that runs."""
        self._finished: tuple[int, tuple[list[ObjectRef], MetricSet]] | None = None
        """One that was begun, and waits to be trained on."""
        here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        self._worker: Any = RemoteRolloutWorker.options(
            scheduling_strategy=here, runtime_env={"env_vars": WORKER_ENV}, max_concurrency=8
        ).remote(cfg, run_dir, token=current_token())

    def start(
        self, *, dp: int, router_url: str | None, engine_urls: Sequence[str], state: dict[str, Any] | None
    ) -> ObjectRef:
        """Begin opening data, graders and connections; see `wait_until_started`."""
        return self._worker.start.remote(dp, router_url, engine_urls, state)

    def wait_until_started(self, starting: ObjectRef) -> None:
        self._waiter.gather([starting], who=WHO, doing="opening data and graders")

    def generate(self, step: int) -> tuple[list[ObjectRef], MetricSet]:
        """The rollout of a step: the one that was begun, or a new one."""
        if self._begun is None and self._finished is None:
            self.begin(step)
        self.finish_begun()
        finished, self._finished = self._finished, None
        assert finished is not None and finished[0] == step, f"step {step} is not the one that was begun"
        return finished[1]

    def begin(self, step: int) -> None:
        """Start the rollout of a step, and return; `generate` waits for it."""
        self._begun = step, self._worker.generate.remote(step)

    def finish_begun(self) -> None:
        """Wait until nothing that was begun runs any more."""
        if self._begun is not None:
            step, task = self._begun
            self._begun = None
            self._finished = step, self._with_progress(task, "generate", f"generating step {step}")

    def set_engine_version(self, version: int) -> None:
        """Tell the pool of `--async-mode full` which weights all engines have."""
        self._waiter.gather([self._worker.set_engine_version.remote(version)], who=WHO)

    def evaluate(self, step: int) -> MetricSet:
        self.finish_begun()  # the end of a rollout may cut requests off: not those of an evaluation
        metrics = self._with_progress(self._worker.evaluate.remote(step), "evaluate", f"evaluating before step {step}")
        if table := eval_table(metrics):
            self._console.say(table)
        return metrics

    def _with_progress(self, task: ObjectRef, label: str, doing: str) -> Any:
        shown: tuple[int, int] | None = None
        with self._console.progress(label) as bar:

            def show() -> None:
                nonlocal shown
                asked = self._worker.progress.remote()
                if ray.wait([asked], timeout=ASK_TIMEOUT_S)[0] and (now := tuple[int, int](ray.get(asked))) != shown:
                    bar.update(*now)
                    self._waiter.waits.progress()
                    shown = now
                if self.on_poll is not None:
                    self.on_poll()

            return self._waiter.gather([task], who=WHO, doing=doing, on_poll=show)[0]

    def set_engines(self, engine_urls: Sequence[str]) -> None:
        """Where the engines are now; requests find them through the router, aborts go to them directly."""
        self._waiter.gather([self._worker.set_engines.remote(engine_urls)], who=WHO)

    def record_trained(self, step: int, gaps: Sequence[ObjectRef] = ()) -> MetricSet:
        """Tell the ledger that the optimizer steps of this rollout are done; `gaps` are for the samples that are kept.
        Returns how busy engines were."""
        return self._waiter.gather([self._worker.record_trained.remote(step, list(gaps))], who=WHO)[0]

    def waits(self, timeout_s: float) -> list[str]:
        """What the manager itself waits for; asked by the watchdog from a thread of its own."""
        asked = self._worker.waits.remote()
        if not ray.wait([asked], timeout=timeout_s)[0]:
            return [f"the {WHO} does not answer"]
        return ray.get(asked)

    def state(self, step: int) -> dict[str, Any]:
        """The place in the data once `step` is trained."""
        return self._waiter.gather([self._worker.state.remote(step)], who=WHO)[0]

    def close(self) -> None:
        """Grader processes end with the actor in any case; a clean close only lets it say goodbye first."""
        ray.wait([self._worker.close.remote()], timeout=5.0)
        ray.kill(self._worker)
