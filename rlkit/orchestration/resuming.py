"""Which checkpoint a session continues from, once it has proven itself: its files are what was saved, and its place in
the data is the one that the run's ledger tells.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlkit.config.schema import RunConfig
from rlkit.observability.audit import disagreements
from rlkit.observability.ledger import Ledger, LedgerEvent, read_ledger
from rlkit.observability.metrics import read_metrics
from rlkit.orchestration.checkpoints import Checkpoint, CheckpointMeta, find_checkpoint, has_complete, verify
from rlkit.types.errors import CheckpointError, RunStopped

logger = logging.getLogger(__name__)

STEP_METRICS = "step_metrics.json"
EVALUATION = "eval/"
"""Evaluations have rows of their own, with the number of the step that follows."""


def checkpoint_to_continue(load: Path, save: Path, ledger: Path, *, step: int | None) -> Checkpoint | None:
    """The verified checkpoint, or None for a fresh start. CheckpointError when there is one that must not be used.

    A run that has checkpoints of its own (in `save`) continues from those, whatever `load` it was started from, unless
    a `step` is asked for.
    """
    if load != save and step is None and has_complete(save):
        load = save
    checkpoint = find_checkpoint(load, step)
    if checkpoint is None:
        if load != save:
            raise CheckpointError(f"--load {load} holds no checkpoint of rlkit (iter_0000000/...)")
        return None
    verify(checkpoint)
    if load == save:
        check_ledger(ledger, checkpoint)
    return checkpoint


def weights_to_begin_with(load: Path, save: Path, *, step: int | None) -> Checkpoint | None:
    """With `--finetune`: the verified checkpoint whose weights a new run takes, with nothing behind it. None where the
    run has checkpoints of its own to continue from.
    """
    if load == save or has_complete(save):
        return None
    checkpoint = find_checkpoint(load, step)
    if checkpoint is None:
        raise CheckpointError(f"--load {load} holds no checkpoint of rlkit (iter_0000000/...)")
    verify(checkpoint)
    return replace(checkpoint, meta=replace(checkpoint.meta, step=-1, weight_version=0), rollout_state={})


def lost_row(metrics: Path, checkpoint: Checkpoint) -> dict[str, float] | None:
    """The metrics of the checkpoint's last step, where the run was ended between the save and the step's row."""
    stored = checkpoint.path / STEP_METRICS
    if not stored.is_file() or not metrics.is_file():
        return None
    step = checkpoint.meta.step
    rows = (row for row in read_metrics(metrics) if row["step"] == step)
    if any(not name.startswith(EVALUATION) for row in rows for name in row.keys() - {"step"}):
        return None
    return json.loads(stored.read_text())


def write_step_metrics(staging: Path, metrics: Mapping[str, float]) -> None:
    """Keep what is known of the step in its checkpoint."""
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    (staging / STEP_METRICS).write_text(json.dumps(finite, indent=1))


def check_ledger(ledger: Path, checkpoint: Checkpoint) -> None:
    """CheckpointError when the ledger of the same run contradicts the checkpoint: prompts would be lost or trained on
    twice.
    """
    if not ledger.is_file():
        logger.warning("%s is not there, so the place in the data of %s cannot be checked", ledger, checkpoint.path)
        return
    problems = disagreements(read_ledger(ledger), step=checkpoint.meta.step, rollout_state=checkpoint.rollout_state)
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} and {ledger} disagree: {'; '.join(problems)}. Continue from a checkpoint that fits "
            "with --ckpt-step, or use its weights for a new run (--load with another --output-dir)"
        )


def write_start(
    ledger: Ledger, cfg: RunConfig, checkpoint: Checkpoint | None, step: int, *, changed: Sequence[str] = ()
) -> None:
    """STARTED, or RESUMED with what the checkpoint says and the settings that have `changed` since the last start."""
    if cfg.debug.load_debug_rollout_data is not None:
        source = "replay"
    else:
        source = "engines" if cfg.starts_engines else "labels"
    if checkpoint is None:
        ledger.write(LedgerEvent.STARTED, step=step, source=source, rollout_state={})
        return
    ledger.write(
        LedgerEvent.RESUMED,
        step=step,
        source=source,
        checkpoint_step=checkpoint.meta.step,
        weight_version=checkpoint.meta.weight_version,
        path=str(checkpoint.path),
        rollout_state=ledger_state(checkpoint.rollout_state),
        **({"changed": list(changed)} if changed else {}),
    )


def write_saved(ledger: Ledger, meta: CheckpointMeta, path: Path, rollout_state: dict[str, Any]) -> None:
    """SAVED, and everything before it, is on the disk when this returns: a checkpoint never knows more than the
    ledger.
    """
    ledger.write(
        LedgerEvent.SAVED,
        step=meta.step,
        weight_version=meta.weight_version,
        path=str(path),
        rollout_state=ledger_state(rollout_state),
    )
    ledger.sync()


def ledger_state(rollout_state: dict[str, Any]) -> dict[str, Any]:
    """Of waiting groups their ids only: their tokens are in the checkpoint."""
    waiting = [{"group": {"group_id": item["group"]["group_id"]}} for item in rollout_state.get("waiting", ())]
    return {**rollout_state, "waiting": waiting}


def note_end(ledger: Ledger, error: BaseException | None, *, next_step: int) -> None:
    """How an attempt ended. `error`: what came out of it; None when all steps were made."""
    match error:
        case None:
            ledger.write(LedgerEvent.FINISHED, step=next_step)
        case RunStopped():
            ledger.write(LedgerEvent.STOPPED, step=next_step, signal="SIGTERM", saved=True)
        case KeyboardInterrupt() | SystemExit():
            ledger.write(LedgerEvent.STOPPED, step=next_step, signal=str(error) or "SIGINT", saved=False)
        case _:
            ledger.write(LedgerEvent.FAILED, error=type(error).__name__, message=str(error)[:4000])
    ledger.sync()
