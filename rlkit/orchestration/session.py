"""A run from its first process to its last: `with Session(cfg) as run:`. The verbs that `train.py` uses are here and
nothing else.

How the processes come up is in `startup.py`. Also after an error or Ctrl-C every one of them is gone when `__exit__`
returns.
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
from rlkit.orchestration.startup import Startup
from rlkit.types.errors import CheckpointError
from rlkit.types.ranks import MetricSet

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
        self._metrics: MetricSet = {}

    # ---- start and end -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._open_run_folder()
            previous = signal.signal(signal.SIGTERM, raise_interrupt)
            self._exit.callback(signal.signal, signal.SIGTERM, previous)
            startup = Startup(self.cfg, self.folders.run, self._exit, self._spans, self.console)
            fleet = startup.run(self.checkpoint, weight_version=self.start_step)
            signal.signal(signal.SIGTERM, raise_interrupt)  # again: ray.init puts a handler of its own there
            self._actor, self._updater = fleet.actor, fleet.updater
            self.rollouts, self.phases = fleet.rollouts, fleet.phases
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            logger.info("the run failed", exc_info=error)  # to the log alone; the entry point tells the user
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
        if checkpoint is None and self.folders.load != self.folders.save:
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
        self.rollouts.record_trained(step)

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
        """Evaluate the weights that step `step` starts with: before the first step, every `--eval-interval` steps and
        at the end."""
        options = self.cfg.evaluation
        if options.eval_interval is None:
            return
        is_first = step == self.start_step and not options.skip_eval_before_train
        if is_first or (step > self.start_step and is_due(step, options.eval_interval, self.num_steps)):
            metrics = self.rollouts.evaluate(step)
            if metrics:  # a replay has no engines to ask
                self._log.write(step, metrics)

    def report(self, step: int) -> None:
        """Write the step's row of metrics."""
        seconds = time.perf_counter() - self._step_began
        self._log.write(step, {**self._metrics, **self._spans.drain(), "time/step_s": seconds})
        self._metrics = {}


def is_due(count: int, interval: int | None, last: int) -> bool:
    """Whether something happens after `count` steps: every `interval` of them (None: never) and after the last."""
    return count == last or (interval is not None and count % interval == 0)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM takes the same way out as Ctrl-C."""
    raise KeyboardInterrupt(f"signal {number}")
