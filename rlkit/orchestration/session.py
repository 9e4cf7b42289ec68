"""A run from its first process to its last: `with Session(cfg) as run:`. The verbs that `train.py` uses are here and nothing else.

Start:  Ray and slots -> engines, ranks and rollout manager side by side -> router -> weight channels
        (on shared GPUs the engines start first and go to sleep, because they size their KV cache by the free memory)
End:    also after an error or Ctrl-C, every process that was started is gone when `__exit__` returns.
"""

import json
import logging
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import ray
from ray import ObjectRef

from rlkit.config.schema import RunConfig
from rlkit.observability.console import Console
from rlkit.observability.ledger import Ledger, LedgerEvent
from rlkit.observability.logs import set_up_logging
from rlkit.observability.metrics import ConsoleSink, JsonlSink, MetricLog, MetricSink, WandbSink
from rlkit.observability.spans import SpanName, Spans
from rlkit.orchestration.checkpoints import (
    Checkpoint,
    CheckpointMeta,
    commit,
    find_checkpoint,
    prune,
    staging_dir,
    start_step,
)
from rlkit.orchestration.cluster import Cluster
from rlkit.orchestration.engine_servers import EnginePool
from rlkit.orchestration.layout import plan_layout
from rlkit.orchestration.phases import Phases, SharedGpus, SplitGpus
from rlkit.orchestration.rollout_worker import Rollouts
from rlkit.orchestration.router import register_engines, start_router
from rlkit.orchestration.train_workers import TrainGroup
from rlkit.orchestration.waiting import Waiter
from rlkit.sync.updater import WeightUpdater
from rlkit.types.errors import CheckpointError
from rlkit.types.ranks import EngineEndpoint, MetricSet

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolders:
    """Where a run keeps what it leaves behind."""

    run: Path
    save: Path
    load: Path

    @classmethod
    def of(cls, cfg: RunConfig, run_dir: Path) -> Self:
        save = Path(cfg.checkpoint.save) if cfg.checkpoint.save is not None else run_dir / "checkpoints"
        return cls(run=run_dir, save=save, load=Path(cfg.checkpoint.load) if cfg.checkpoint.load is not None else save)


class Session:
    """Owns every process of a run."""

    def __init__(self, cfg: RunConfig, *, num_steps: int, run_dir: Path, config_json: dict[str, Any]) -> None:
        self.cfg = cfg
        self.num_steps = num_steps
        self.folders = RunFolders.of(cfg, run_dir)
        self._config_json = config_json
        self._exit = ExitStack()
        self._spans = Spans()
        self._waiter = Waiter()
        self._metrics: MetricSet = {}
        self._updater: WeightUpdater | None = None
        self._actor: TrainGroup | None = None

    # ---- start and end -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._open_run_folder()
            self._start_processes()
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            logger.error("the run failed", exc_info=error)
        self._exit.close()

    def _open_run_folder(self) -> None:
        self.folders.run.mkdir(parents=True, exist_ok=True)
        set_up_logging(self.folders.run, "driver", console_level=logging.WARNING)
        self.checkpoint = self._find_checkpoint()
        self.start_step = start_step(self.checkpoint, self.cfg.rollout.start_rollout_id)
        if self.num_steps > 0 and self.start_step >= self.num_steps:
            raise CheckpointError(
                f"nothing to do: the next step is {self.start_step} and --num-rollout is {self.num_steps}; "
                f"raise --num-rollout, or start anew with another --output-dir (checkpoints: {self.folders.load})"
            )
        (self.folders.run / "config.json").write_text(json.dumps(self._config_json, indent=2))
        self.console = Console(total_steps=self.num_steps)
        self.console.say(f"run folder {self.folders.run}")
        if self.checkpoint is not None:
            self.console.say(f"continuing at step {self.start_step} from {self.checkpoint.path}")
        self._log = self._exit.enter_context(MetricLog(self._sinks()))
        self._ledger = self._exit.enter_context(Ledger(self.folders.run / "ledger.jsonl"))
        event = LedgerEvent.STARTED if self.checkpoint is None else LedgerEvent.RESUMED
        state = self.checkpoint.rollout_state if self.checkpoint is not None else {}
        self._ledger.write(event, step=self.start_step, rollout_state=state)

    def _find_checkpoint(self) -> Checkpoint | None:
        checkpoint = find_checkpoint(self.folders.load, self.cfg.checkpoint.ckpt_step)
        if checkpoint is None and self.cfg.checkpoint.load is not None:
            raise CheckpointError(f"--load {self.folders.load} holds no checkpoint of rlkit (iter_0000000/...)")
        return checkpoint

    def _sinks(self) -> list[MetricSink]:
        options = self.cfg.logging
        sinks: list[MetricSink] = [
            JsonlSink(self.folders.run / "metrics.jsonl", start_step=self.start_step),
            ConsoleSink(self.console),
        ]
        if options.use_wandb:
            wandb = WandbSink(
                self.folders.run,
                mode=options.wandb_mode,
                project=options.wandb_project,
                group=options.wandb_group,
                config=self._config_json,
            )
            sinks.append(wandb)
        return sinks

    def _start_processes(self) -> None:
        cfg = self.cfg
        # From here on SIGTERM takes the same way out as Ctrl-C.
        previous = signal.signal(signal.SIGTERM, raise_interrupt)
        self._exit.callback(signal.signal, signal.SIGTERM, previous)
        began = time.perf_counter()
        layout = plan_layout(cfg)
        device = resolve_device(cfg)
        cluster = Cluster(cfg, layout, device=device)
        self._exit.callback(cluster.close)
        options = {"run_dir": self.folders.run, "gather": self._waiter.gather}

        self.rollouts = Rollouts(cfg, run_dir=self.folders.run, waiter=self._waiter, console=self.console)
        self._exit.callback(self.rollouts.close)
        engines = EnginePool(cfg, cluster, layout, **options) if layout.engines else None
        starting = []
        if engines is not None:
            self._exit.callback(engines.close)
            starting = engines.start(weight_version=self.start_step)
        engines_first = device == "cuda" and cfg.cluster.colocate
        if layout.rank_slots:
            self._actor = TrainGroup(cfg, cluster, layout, **options)
            self._exit.callback(self._actor.close)
        endpoints: list[EngineEndpoint] = []
        if engines is not None and engines_first:
            endpoints = self._engines_ready(engines, starting)
            self._make_updater(endpoints)
            self._put_engines_to_sleep()
        resume_from = self.checkpoint.trainer_dir if self.checkpoint is not None else None
        loading = self._actor.start_init(resume_from) if self._actor is not None else []
        if engines is not None and not engines_first:
            endpoints = self._engines_ready(engines, starting)
            self._make_updater(endpoints)
            self._put_engines_to_sleep()
        router_url = self._start_router(endpoints) if endpoints else None
        reports = self._waiter.gather(loading)
        if self._actor is not None and endpoints:
            self._actor.connect(endpoints)
        self.rollouts.start(
            dp=max(1, len(layout.rank_slots)),
            router_url=router_url,
            engine_urls=[endpoint.url for endpoint in endpoints],
            state=self.checkpoint.rollout_state if self.checkpoint is not None else None,
        )
        self.phases: Phases = SplitGpus()
        if self._actor is not None and self._updater is not None and cfg.cluster.colocate:
            self._actor.sleep()
            self.phases = SharedGpus(self._actor, self._updater, self._spans)
        size = f", {reports[0].num_params / 1e6:.1f} M parameters" if reports else ""
        self.console.say(
            f"{len(layout.rank_slots)} training ranks and {len(layout.engines)} engines on {device} are up after "
            f"{time.perf_counter() - began:.0f} s{size}"
        )
        self._spans.drain()

    def _engines_ready(self, engines: EnginePool, starting: list[ObjectRef]) -> list[EngineEndpoint]:
        endpoints = engines.endpoints(starting)
        self._waiter.watch_tasks(engines.watch())
        return endpoints

    def _start_router(self, endpoints: list[EngineEndpoint]) -> str:
        process, url = start_router(self.cfg, ray.util.get_node_ip_address(), self.folders.run / "logs")
        self._exit.callback(process.stop)
        self._waiter.watch_process("router", process)
        register_engines(url, [endpoint.url for endpoint in endpoints], process)
        return url

    def _make_updater(self, endpoints: list[EngineEndpoint]) -> None:
        if self._actor is None:
            return
        self._updater = WeightUpdater(
            endpoints,
            self._actor.push_weights,
            engines_sleep=self.cfg.cluster.colocate,
            timeout_s=self.cfg.engine.engine_timeout_s,
            spans=self._spans,
        )
        self._exit.callback(self._updater.close)

    def _put_engines_to_sleep(self) -> None:
        if self._updater is not None and self.cfg.cluster.colocate:
            self._updater.sleep_engines()

    # ---- the verbs of the loop -----------------------------------------------------------------------------------

    def generate(self, step: int) -> list[ObjectRef]:
        """One rollout, graded and packed: a reference to each rank's updates."""
        self._step_began = time.perf_counter()
        shards, metrics = self.rollouts.generate(step)
        self._metrics.update(metrics)
        return shards

    def train(self, step: int, shards: list[ObjectRef]) -> None:
        """The optimizer steps of one rollout."""
        if self._actor is None:
            return  # --debug-rollout-only
        with self._spans(SpanName.TRAIN):
            self._metrics.update(self._actor.train(step, shards))

    def save_if_due(self, step: int) -> None:
        """Write a checkpoint after every `--save-interval` steps and after the last one."""
        if self._actor is None or not is_due(step + 1, self.cfg.checkpoint.save_interval, self.num_steps):
            return
        with self._spans(SpanName.SAVE):
            staging = staging_dir(self.folders.save, step)
            (staging / "trainer").mkdir()
            hf = self.cfg.checkpoint.save_hf
            self._actor.save(step, staging / "trainer", Path(hf.format(rollout_id=step)) if hf is not None else None)
            meta = CheckpointMeta(step=step, weight_version=step + 1, world_size=self._actor.world_size)
            path = commit(staging, meta, self.rollouts.state())
            self._ledger.write(LedgerEvent.SAVED, step=step, path=str(path))
            self._ledger.sync()
            prune(self.folders.save, self.cfg.checkpoint.keep_checkpoints)

    def sync_weights(self, version: int) -> None:
        """Bring every engine to the trainer's weights."""
        if self._updater is not None:
            report = self._updater.update(version)
            self._metrics["sync/num_bytes"] = report.num_bytes

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate the weights that step `step` starts with: before the first step, every `--eval-interval` steps and at the end."""
        options = self.cfg.evaluation
        if options.eval_interval is None:
            return
        is_first = step == self.start_step and not options.skip_eval_before_train
        if is_first or (step > self.start_step and is_due(step, options.eval_interval, self.num_steps)):
            self._log.write(step, self.rollouts.evaluate(step))

    def report(self, step: int) -> None:
        """Write the step's row of metrics."""
        seconds = time.perf_counter() - self._step_began
        self._log.write(step, {**self._metrics, **self._spans.drain(), "time/step_s": seconds})
        self._metrics = {}


def is_due(count: int, interval: int | None, last: int) -> bool:
    """Whether something happens after `count` steps: every `interval` of them (None: never) and after the last."""
    return count == last or (interval is not None and count % interval == 0)


def resolve_device(cfg: RunConfig) -> str:
    """`cuda` or `cpu`."""
    if cfg.cluster.device != "auto":
        return cfg.cluster.device
    import torch  # local: seconds, and the driver needs it for nothing else

    return "cuda" if torch.cuda.is_available() else "cpu"


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")
