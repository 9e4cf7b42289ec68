"""`rlkit replay RUN_DIR --step N [-- --flag value ...]`: train a recorded step again, in fresh processes, and compare
it bit for bit with what the run did.

The run's own machinery does it: a session without engines reads the recorded batches, from the newest checkpoint before
the step (or from the start), with as many ranks as the run had. Flags behind `--` change settings for the replay, and
are named as what differs. `--rollout` also generates the step's rollout again with its recorded seeds.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlkit.cli.entry import num_steps
from rlkit.cli.replay_verdict import Verdict, compare_rollouts, compare_training
from rlkit.config.argv import read_command_line
from rlkit.config.fields import all_fields, flag_of
from rlkit.config.load import from_json
from rlkit.config.rules import check
from rlkit.config.schema import EvalConfig, RunConfig
from rlkit.observability.metrics import read_metrics
from rlkit.observability.replay_files import (
    FOLDER,
    StepRecord,
    batch_path,
    batch_template,
    changed_groups,
    digest,
    read_steps,
)
from rlkit.observability.report.record import settings_of
from rlkit.orchestration.checkpoints import complete_checkpoints, step_of
from rlkit.orchestration.manifest import read_manifest
from rlkit.rollout.debug_data import load_rollout, rollout_path
from rlkit.types.errors import ConfigError, DataError
from rlkit.types.samples import SampleGroup

WITHOUT_EFFECT = frozenset(
    {"num_rollout", "output_dir", "load", "save", "ckpt_step", "max_restarts", "keep_checkpoints", "save_interval"}
)
"""Settings that may differ without changing what a step does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """What is to be run."""

    run_dir: Path
    step: int
    first_step: int
    """The step after the checkpoint that the replay begins with."""
    checkpoint: Path | None
    batches: str
    """As `--load-debug-rollout-data` spells it."""
    cfg: RunConfig
    config_json: dict[str, Any]
    changed: list[str]
    """Settings that differ from those that the step was trained with, a sentence each."""
    records: dict[int, StepRecord]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="run folder")
    parser.add_argument("--step", type=int, required=True, help="the step to train again")
    parser.add_argument("--rollout", action="store_true", help="also generate the step's rollout again")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the replay, RUN_DIR/replay/again")
    parser.epilog = "What follows -- are flags of a run that the replay changes."


def main(args: argparse.Namespace) -> int:
    """0 when all is the same bit for bit, 1 when something differs, 2 when the step cannot be replayed."""
    try:
        plan = make_plan(args.run_dir, args.step, args.flags)
        if args.rollout:
            check_rollout(plan)
    except (ConfigError, DataError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    folder = args.run_dir / FOLDER / "again"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    verdict = Verdict(changed_settings=plan.changed, changed_batches=batch_changes(plan))
    start = f"checkpoint {plan.checkpoint.name}" if plan.checkpoint is not None else "the start of the run"
    print(f"replaying steps {plan.first_step} to {plan.step} from {start}", flush=True)
    run_again(plan, folder)
    compare_training(
        verdict,
        steps=range(plan.first_step, plan.step + 1),
        recorded_rows={row["step"]: row for row in read_metrics(args.run_dir / "metrics.jsonl") if _is_step(row)},
        rows={row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if _is_step(row)},
        recorded=with_checkpoints(plan),
        found=read_steps(folder),
    )
    if args.rollout:
        compare_rollouts(verdict, load_rollout(batch_of(plan, plan.step))[1], generate_again(plan, folder))
    print("\n".join(verdict.lines()))
    if not args.keep:
        shutil.rmtree(folder)
    return 0 if verdict.is_same else 1


def make_plan(run_dir: Path, step: int, flags: Sequence[str]) -> ReplayPlan:
    """ConfigError or DataError where something that a replay needs is not there; the message says what to record."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: {run_dir} is no run folder")
    document = json.loads(path.read_text())
    line = read_command_line(flags)
    if line.problems:
        raise ConfigError("\n".join(line.problems))
    for name, value in line.values.items():
        if name not in all_fields():
            raise ConfigError(f"{flag_of(name)} concerns engines, which a replay does not start; drop it")
        section = all_fields()[name].section
        plain = list(value) if isinstance(value, tuple) else value
        document[section][name] = {"value": plain, "from": "replay"}
    cfg = from_json(document)
    cfg = replace(cfg, rollout=replace(cfg.rollout, num_rollout=num_steps(cfg)))
    records = read_steps(run_dir)
    checkpoint, first = _start(cfg, run_dir, step)
    batches = _batches(cfg, run_dir, first, step)
    attempts = [number for number, record in records.items() if record.settings and number <= step]
    recorded = records[max(attempts)].settings if attempts else {}
    now = {item.name: item.value for item in settings_of(document)}
    changed = [
        f"{flag_of(name)} was {json.dumps(recorded[name])} and is {json.dumps(value)}"
        for name, value in now.items()
        if name in recorded and name not in WITHOUT_EFFECT and recorded[name] != value
    ]
    return ReplayPlan(
        run_dir=run_dir,
        step=step,
        first_step=first,
        checkpoint=checkpoint,
        batches=batches,
        cfg=cfg,
        config_json=document,
        changed=changed,
        records=records,
    )


def _start(cfg: RunConfig, run_dir: Path, step: int) -> tuple[Path | None, int]:
    saved = saved_in(cfg, run_dir)
    before = [path for path in complete_checkpoints(saved) if step_of(path) < step]
    if before:
        return before[-1], step_of(before[-1]) + 1
    if cfg.checkpoint.load is not None and Path(cfg.checkpoint.load).resolve() != saved.resolve():
        loaded = complete_checkpoints(Path(cfg.checkpoint.load))
        wanted = [path for path in loaded if cfg.checkpoint.ckpt_step in (None, step_of(path))]
        if not wanted:
            raise ConfigError(f"the run began with --load {cfg.checkpoint.load}, which is not there any more")
        if cfg.checkpoint.finetune:  # its weights for a new run
            return wanted[-1], cfg.rollout.start_rollout_id or 0
        return wanted[-1], step_of(wanted[-1]) + 1
    return None, cfg.rollout.start_rollout_id or 0


def _batches(cfg: RunConfig, run_dir: Path, first: int, step: int) -> str:
    steps = range(first, step + 1)
    templates = [batch_template(run_dir)]
    if cfg.debug.save_debug_rollout_data is not None:
        templates.append(cfg.debug.save_debug_rollout_data)
    for template in templates:
        if all(rollout_path(template, number).is_file() for number in steps):
            return template
    missing = [number for number in steps if not batch_path(run_dir, number).is_file()]
    raise DataError(
        f"step {step} needs the batches of steps {first} to {step}, after the newest checkpoint before it; those of "
        f"{missing} were not recorded or are deleted by now. Start the run with --record-for-replay N, with N at least "
        "--save-interval, or with --save-debug-rollout-data 'rollout_{rollout_id}.jsonl'"
    )


def saved_in(cfg: RunConfig, run_dir: Path) -> Path:
    """Where the run keeps its checkpoints."""
    return Path(cfg.checkpoint.save) if cfg.checkpoint.save is not None else run_dir / "checkpoints"


def batch_of(plan: ReplayPlan, step: int) -> Path:
    return rollout_path(plan.batches, step)


def batch_changes(plan: ReplayPlan) -> list[str]:
    """What differs between the batches as they lie there and as they were when the run made them."""
    told = []
    for step in range(plan.first_step, plan.step + 1):
        recorded = plan.records.get(step, StepRecord()).groups
        if recorded:
            found = {group.group_id: digest(group) for group in load_rollout(batch_of(plan, step))[1]}
            told += [f"step {step}: {change}" for change in changed_groups(recorded, found)]
    return told


def with_checkpoints(plan: ReplayPlan) -> dict[int, StepRecord]:
    """The recorded fingerprints, those of checkpoints where a step has none of its own."""
    records = dict(plan.records)
    for path in complete_checkpoints(saved_in(plan.cfg, plan.run_dir)):
        manifest = read_manifest(path)
        record = records.setdefault(step_of(path), StepRecord())
        if manifest is not None and not record.after:
            record.after = dict(manifest.tensors)
    if plan.first_step - 1 in records and not records.get(plan.first_step, StepRecord()).before:
        records.setdefault(plan.first_step, StepRecord()).before = records[plan.first_step - 1].after
    return records


def run_again(plan: ReplayPlan, folder: Path) -> None:
    """Train the steps, in processes of their own. Leaves metrics and fingerprints in `folder`."""
    cfg = without_company(plan, folder, batches=plan.batches)
    _check(cfg)
    from rlkit.orchestration.session import Session  # local: seconds of imports

    with Session(cfg, num_steps=plan.step + 1, run_dir=folder, config_json=plan.config_json) as run:
        for step in range(run.start_step, plan.step + 1):
            shards = run.generate(step)
            with run.phases.training():
                run.train(step, shards)
            run.report(step)


def check_rollout(plan: ReplayPlan) -> None:
    """DataError where the step's rollout cannot be generated again."""
    older = {
        "--async-mode": plan.cfg.async_training.async_mode is not None,
        "--partial-rollout": plan.cfg.rollout.partial_rollout,
        "--update-weights-interval": plan.cfg.sync.update_weights_interval > 1,
    }
    if any(older.values()):
        flags = ", ".join(flag for flag, is_set in older.items() if is_set)
        raise DataError(f"--rollout cannot repeat rollouts that older weights made: {flags}")
    if plan.first_step != plan.step:
        raise DataError(
            f"--rollout needs the weights that step {plan.step} began with, and the newest checkpoint before it is of "
            f"step {plan.first_step - 1}; replay step {plan.first_step}, or save more often (--save-interval)"
        )


def generate_again(plan: ReplayPlan, folder: Path) -> list[SampleGroup]:
    """The groups of the step, generated with the weights that it began with. Needs the checkpoint right before it."""
    output = folder / "rollout"
    template = str(output / "rollout_{rollout_id}.jsonl")
    cfg = without_company(plan, output, batches=None)
    cfg = replace(cfg, debug=replace(cfg.debug, save_debug_rollout_data=template))
    _check(cfg)
    from rlkit.orchestration.session import Session  # local: seconds of imports

    output.mkdir(parents=True)
    with Session(cfg, num_steps=plan.step + 1, run_dir=output, config_json=plan.config_json) as run:
        run.sync_weights(version=run.start_step)
        with run.phases.generating():
            run.generate(plan.step)
    return load_rollout(rollout_path(template, plan.step))[1]


def without_company(plan: ReplayPlan, folder: Path, *, batches: str | None) -> RunConfig:
    """The run's configuration, with folders of its own, and nothing that reaches beyond them. `batches`: what to train
    on; None generates.
    """
    cfg = plan.cfg
    load = plan.checkpoint
    is_own = load is not None and load.parent.resolve() == saved_in(cfg, plan.run_dir).resolve()
    return replace(
        cfg,
        checkpoint=replace(
            cfg.checkpoint,
            save=str(folder / "checkpoints"),
            load=str(load.parent) if load is not None else None,
            ckpt_step=step_of(load) if load is not None else None,
            finetune=cfg.checkpoint.finetune and not is_own,
            no_load_optim=cfg.checkpoint.no_load_optim and not is_own,
            save_hf=None,
            async_save=False,
        ),
        debug=replace(cfg.debug, load_debug_rollout_data=batches, save_debug_rollout_data=None),
        evaluation=EvalConfig(),
        logging=replace(cfg.logging, output_dir=str(folder), use_wandb=False),
        report=replace(
            cfg.report,
            record_for_replay=1,
            report_samples=0,
            strict_guards=False,
            use_tensorboard=False,
            use_mlflow=False,
        ),
        profile=replace(cfg.profile, use_pytorch_profiler=False, record_memory_history=False),
        rollout=replace(cfg.rollout, start_rollout_id=plan.first_step if load is None and plan.first_step else None),
    )


def _check(cfg: RunConfig) -> None:
    problems = check(cfg)
    if problems:
        raise ConfigError("\n".join(problems))


def _is_step(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("train/") for name in row)
