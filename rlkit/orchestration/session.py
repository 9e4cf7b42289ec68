"""A run from its first process to its last: `with Session(cfg) as run:`. The verbs that `train.py` uses are here and
nothing else.

How the processes come up is in `startup.py`. Also after an error or Ctrl-C every one of them is gone when `__exit__`
returns.
"""

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ray import ObjectRef

from rlkit.config.schema import RunConfig
from rlkit.observability.console import Console
from rlkit.observability.ledger import Ledger
from rlkit.observability.logs import set_up_logging
from rlkit.observability.metrics import MetricLog
from rlkit.observability.sinks import open_sinks
from rlkit.observability.spans import SpanName, Spans
from rlkit.orchestration.checkpoints import (
    CheckpointMeta,
    check_not_counted_twice,
    prune,
    staging_dir,
    start_step,
)
from rlkit.orchestration.oversight import Oversight
from rlkit.orchestration.pending_save import CommittedSave, PendingSave
from rlkit.orchestration.resuming import (
    checkpoint_to_continue,
    lost_row,
    note_end,
    weights_to_begin_with,
    write_saved,
    write_start,
    write_step_metrics,
)
from rlkit.orchestration.run_lock import exclusive
from rlkit.orchestration.run_notes import changed_settings
from rlkit.orchestration.saving import SaveGuard, all_or_nothing
from rlkit.orchestration.startup import Startup
from rlkit.orchestration.telling import Telling
from rlkit.sync.versions import advanced
from rlkit.types.errors import CheckpointError, HangError, RlkitError
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
        load = Path(cfg.checkpoint.load) if cfg.checkpoint.load is not None else save
        return cls(run=run_dir, save=save.resolve(), load=load.resolve())


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
        self._saved_step: int | None = None
        self._pending: PendingSave | None = None
        self._weight_version: int | None = None
        """What the engines hold."""

    # ---- start and end -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._open_run_folder()
            startup = Startup(
                self.cfg, self.folders.run, self._exit, self._spans, self.console, waits=self._oversight.waits
            )
            fleet = startup.run(self.checkpoint, weight_version=self.start_step)
            self._oversight.all_is_up(fleet)
            self._num_saved_params = fleet.num_saved_params
            self._actor, self._updater = fleet.actor, fleet.updater
            self.rollouts, self.phases, self._recovery = fleet.rollouts, fleet.phases, fleet.recovery
        except BaseException as error:
            self._exit.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            logger.info("the run failed", exc_info=error)  # to the log alone; the entry point tells the user
        if self._pending is not None:
            self._rescue(self._pending, error)
        self._exit.__exit__(kind, error, trace)

    def _rescue(self, pending: PendingSave, error: BaseException | None) -> None:
        """A checkpoint that the ranks have written is kept, however the run ends."""
        try:
            self._note_saved(pending.rescue(may_ask_ranks=not isinstance(error, (KeyboardInterrupt, HangError))))
        except RlkitError as other:
            logger.warning("the save in progress is lost: %s", other)

    def _note_end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        note_end(self._ledger, error, next_step=self._next_step)

    def _open_run_folder(self) -> None:
        self._exit.enter_context(exclusive(self.folders.run, self.folders.save))
        set_up_logging(self.folders.run, "driver", console_level=logging.WARNING)
        ledger_path = self.folders.run / "ledger.jsonl"
        load, save, step = self.folders.load, self.folders.save, self.cfg.checkpoint.ckpt_step
        begins_with = weights_to_begin_with(load, save, step=step) if self.cfg.checkpoint.finetune else None
        if begins_with is not None:
            self.cfg = replace(self.cfg, checkpoint=replace(self.cfg.checkpoint, no_load_optim=True))
        self.checkpoint = begins_with or checkpoint_to_continue(load, save, ledger_path, step=step)
        self._is_resumed = self.checkpoint is not None and begins_with is None
        self._goes_on = self.checkpoint is not None and self.checkpoint.path.parent == save
        check_not_counted_twice(save, self.cfg.rollout.start_rollout_id)
        self.start_step = self._next_step = start_step(self.checkpoint, self.cfg.rollout.start_rollout_id)
        if self.num_steps > 0 and self.start_step >= self.num_steps:
            raise CheckpointError(
                f"nothing to do: the next step is {self.start_step} and --num-rollout is {self.num_steps}; "
                f"raise --num-rollout, or start anew with another --output-dir (checkpoints: {self.folders.load})"
            )
        config_path = self.folders.run / "config.json"
        changed = changed_settings(config_path, self._config_json) if self._is_resumed else []
        config_path.write_text(json.dumps(self._config_json, indent=2))
        self.console = Console(total_steps=self.num_steps)
        self._telling = Telling(self.cfg, self.folders.run, self.console.say)
        self._exit.callback(self._telling.close)  # below the ledger: its report knows the end
        self.console.say(f"run folder {self.folders.run}")
        if self.checkpoint is not None:
            how = f"continuing at step {self.start_step} from" if self._is_resumed else "a new run with the weights of"
            self.console.say(f"{how} {self.checkpoint.path}")
        if changed:
            self.console.say(f"settings that differ from this folder's last start: {', '.join(changed)}")
        sinks = open_sinks(
            self.cfg, self.folders.run, self.console, start_step=self.start_step, config_json=self._config_json
        )
        self._log = self._exit.enter_context(MetricLog(sinks))
        resumed = self.checkpoint if self._is_resumed else None
        own = self.checkpoint if self._goes_on else None
        if own is not None and (row := lost_row(self.folders.run / "metrics.jsonl", own)) is not None:
            self._log.write(own.meta.step, row)
        self._ledger = self._exit.enter_context(Ledger(ledger_path))
        self._exit.push(self._note_end)
        write_start(self._ledger, self.cfg, resumed, self.start_step, changed=changed)
        self._save_guard = SaveGuard(self.folders.save, self.checkpoint)
        self._oversight = Oversight(self.cfg.recovery, self.folders.run, console=self.console, exit_stack=self._exit)

    # ---- the verbs of the loop -----------------------------------------------------------------------------------

    def generate(self, step: int) -> list[ObjectRef]:
        """One rollout, graded and packed: a reference to each rank's updates."""
        self._step_began = time.perf_counter()
        shards, metrics = self.rollouts.generate(step)
        self._metrics.update(metrics)
        self._telling.after_rollout(step, metrics)
        return shards

    def begin_generating(self, step: int) -> None:
        """Start the rollout of a later step, and return. With `--async-mode full` generation goes on in any case."""
        if self.cfg.async_training.is_one_step and step < self.num_steps:
            self.rollouts.begin(step)

    def train(self, step: int, shards: list[ObjectRef]) -> None:
        """The optimizer steps of one rollout."""
        if self._actor is None:
            return  # --debug-rollout-only
        records = self._telling.wants_fingerprints
        if records and step == self.start_step:
            self._telling.note_start(step, self._actor.fingerprints(), self._config_json)
        with self._spans(SpanName.TRAIN):
            self._metrics.update(self._actor.train(step, shards))
        gaps = self._actor.token_gaps() if self.cfg.report.report_samples > 0 else []
        self._metrics.update(self.rollouts.record_trained(step, gaps))
        if records:
            self._telling.note_trained(step, self._actor.fingerprints())
        self._telling.after_training(step, self._metrics)
        self._save_guard.note_training(step, self._metrics)

    def save_if_due(self, step: int) -> None:
        """Write a checkpoint after every `--save-interval` steps and after the last one. With `--async-save` it is
        committed at a later step, when it is complete, or at the next save."""
        if self._pending is not None:
            self._note_saved(self._pending.advance())
        is_asked = self._oversight.stop.is_set or self._telling.wants_save
        is_due_now = is_asked or is_due(step + 1, self.cfg.checkpoint.save_interval, self.num_steps)
        if self._actor is None or not is_due_now:
            return
        self._save_guard.check_space(num_params=self._num_saved_params)
        if self._pending is not None:
            with self._spans(SpanName.SAVE):
                self._note_saved(self._pending.finish())
        staging = staging_dir(self.folders.save, step)
        with self._spans(SpanName.SAVE), all_or_nothing(staging):
            tensors = self._actor.fingerprints()
            self._save_guard.check_changed(step, tensors)
            (staging / "trainer").mkdir()
            hf = self.cfg.checkpoint.save_hf
            self._actor.save(step, staging / "trainer", Path(hf.format(rollout_id=step)) if hf is not None else None)
            write_step_metrics(staging, self._metrics)
            meta = CheckpointMeta(step=step, weight_version=step + 1, world_size=self._actor.world_size)
            state = self.rollouts.state(step)
            self._pending = PendingSave(self._actor, staging, meta, state, tensors)
            must_wait = not self.cfg.checkpoint.async_save or is_asked or step + 1 == self.num_steps
            saved = self._pending.finish() if must_wait else None
        self._note_saved(saved)

    def _note_saved(self, saved: CommittedSave | None) -> None:
        """Write down that the pending checkpoint is committed; None where it is not yet."""
        if saved is None:
            return
        self._pending = None
        write_saved(self._ledger, saved.meta, saved.path, saved.rollout_state)
        self._saved_step = saved.meta.step
        prune(self.folders.save, self.cfg.checkpoint.keep_checkpoints, newest=saved.meta.step)

    def sync_weights(self, version: int) -> None:
        """Bring every engine to the trainer's weights, where that is due: at the start, every
        `--update-weights-interval` steps and at the end. Samples carry the version that the engines hold."""
        if self._recovery is not None:
            self._recovery.trainer_version = version
        interval = self.cfg.sync.update_weights_interval
        if self._updater is None or not (version == self.start_step or is_due(version, interval, self.num_steps)):
            return
        self._weight_version = advanced(self._weight_version, version)
        if not self.cfg.updates_in_flight:
            self.rollouts.finish_begun()
        if self._recovery is not None:
            self._recovery.restart_before_update(requests_may_run=self.cfg.updates_in_flight)
        with self._oversight.waits.waiting("engines", f"the update to weights v{version}"):
            report = self._updater.update(version)
        if self.cfg.async_training.is_full:
            self.rollouts.set_engine_version(version)
        self._metrics["sync/num_bytes"] = report.num_bytes
        self._metrics["sync/num_buckets"] = report.num_buckets
        self._metrics["sync/prepare_s"] = report.prepare_s
        self._metrics["sync/send_s"] = report.send_s

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate the weights that step `step` starts with: before the first step, every `--eval-interval` steps and
        at the end."""
        options = self.cfg.evaluation
        if options.eval_interval is None:
            return
        is_first = step == self.start_step and not options.skip_eval_before_train
        # a resumed run makes the evaluation again that stood at the end of the checkpoint's step
        is_after_training = step > self.start_step or (self._goes_on and step > 0)
        if is_first or (is_after_training and is_due(step, options.eval_interval, self.num_steps)):
            metrics = self.rollouts.evaluate(step)
            if metrics:  # a replay has no engines to ask
                self._log.write(step, metrics)

    def report(self, step: int) -> None:
        """Write the step's row of metrics."""
        seconds = time.perf_counter() - self._step_began
        spans = self._spans.drain()
        if self._updater is not None and not self.cfg.cluster.colocate:
            self._metrics["bubble/trainer"] = trainer_bubble(spans, seconds)
        self._log.write(step, {**self._metrics, **spans, "time/step_s": seconds})
        metrics, self._metrics = self._metrics, {}
        self._next_step = step + 1
        self._telling.after_step(step, metrics)
        self._oversight.stop.stop_at(step + 1, is_saved=self._saved_step == step or self._actor is None)


def trainer_bubble(spans: MetricSet, step_s: float) -> float:
    """Share of a step in which the trainer neither trains nor saves nor sends weights. `spans` are the driver's."""
    busy_s = sum(spans.get(f"time/{name}_s", 0.0) for name in (SpanName.TRAIN, SpanName.SAVE, SpanName.SYNC))
    return max(0.0, 1.0 - busy_s / step_s)


def is_due(count: int, interval: int | None, last: int) -> bool:
    """Whether something happens after `count` steps: every `interval` of them (None: never) and after the last."""
    return count == last or (interval is not None and count % interval == 0)
