"""From the command line to a run that may start: parse, check, answer `--help` and `--dry-run`, name the run folder.

Called by `train.py`. Imports neither torch nor ray.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlkit.cli.dry_run import print_dry_run
from rlkit.cli.exit_status import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RESTARTABLE,
    EXIT_STOPPED,
    attempt_number,
)
from rlkit.config.load import load_config, to_json
from rlkit.config.redaction import redacted_config
from rlkit.config.rules import advice, check_paths
from rlkit.config.rules.paths import output_folder
from rlkit.config.schema import RunConfig
from rlkit.types.errors import (
    ConfigError,
    EngineError,
    HangError,
    RlkitError,
    RunStopped,
    SyncError,
    WorkerDied,
)

_RESTARTABLE = (WorkerDied, HangError, EngineError, SyncError)
_FROM_OUTSIDE = ("AcceleratorError", "DistBackendError", "DistNetworkError")
"""Errors of torch that a broken GPU or network causes, not the configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A configuration that passed every check that needs no cluster."""

    cfg: RunConfig
    num_steps: int
    run_dir: Path
    config_json: dict[str, Any]


def prepare_run(argv: Sequence[str], *, program: str = "train.py") -> RunPlan:
    """The plan of a run of `program`. Raises ConfigError; exits after `--help`, `--dry-run` and `--probe`."""
    resolved = load_config(argv, program=program)
    cfg = resolved.config
    check_program(cfg, program)
    if cfg.debug.dry_run:
        with reader_may_leave():
            print_dry_run(resolved, sys.stdout)
        raise SystemExit(0)
    problems = check_paths(cfg)
    if problems:
        raise ConfigError("\n".join(problems))
    if cfg.debug.probe:
        from rlkit.cli.probe import run_probe  # local: a run does not need it

        run_probe(argv, cfg)
        raise SystemExit(0)
    from rlkit.cli.data_checks import check_rows  # local: numpy, which --help does not need

    check_rows(cfg)
    for sentence in advice(cfg):
        print(f"note: {sentence}", file=sys.stderr)
    steps = num_steps(cfg)
    if attempt_number():
        from rlkit.cli.supervisor import continue_own_run  # local: a first attempt does not need it

        cfg = continue_own_run(cfg, run_dir(cfg))
    # With --num-epoch the number is known only now; schedules need it too.
    cfg = replace(cfg, rollout=replace(cfg.rollout, num_rollout=steps))
    return RunPlan(cfg=cfg, num_steps=steps, run_dir=run_dir(cfg), config_json=redacted_config(to_json(resolved)))


def check_program(cfg: RunConfig, program: str) -> None:
    """ConfigError where the configuration asks for the loop of the other program."""
    mode = cfg.async_training.async_mode
    if program == "train.py" and mode is not None:
        raise ConfigError(
            f"async_mode = {mode}, but train.py takes turns: it generates, then trains. Run train_async.py with these "
            "flags, or drop --async-mode"
        )
    if program == "train_async.py" and mode is None:
        raise ConfigError("async_mode = None is what train.py does: run that, or pass --async-mode one-step or full")


def num_steps(cfg: RunConfig) -> int:
    """Rollouts of the run: `--num-rollout`, or as many whole batches as `--num-epoch` passes over the prompt file
    hold."""
    if cfg.rollout.num_rollout is not None:
        return cfg.rollout.num_rollout
    assert cfg.rollout.num_epoch is not None and cfg.data.prompt_data is not None, "a rule of config/rules.py"
    from rlkit.cli.data_checks import num_rows_of_an_epoch  # local: numpy, which --help does not need

    rows = num_rows_of_an_epoch(cfg)
    steps = cfg.rollout.num_epoch * rows // cfg.rollout.rollout_batch_size
    if steps == 0:
        limit = cfg.data.rollout_max_prompt_len
        fitting = "" if limit is None else f" that fit --rollout-max-prompt-len {limit}"
        raise ConfigError(
            f"--num-epoch {cfg.rollout.num_epoch} over {rows} rows of {cfg.data.prompt_data}{fitting} is less than one"
            f" batch of --rollout-batch-size {cfg.rollout.rollout_batch_size}; lower the batch or set --num-rollout"
        )
    return steps


def run_dir(cfg: RunConfig) -> Path:
    if cfg.logging.output_dir is not None:
        return output_folder(cfg.logging.output_dir)
    return Path("runs") / f"{Path(cfg.model.hf_checkpoint).name}-{time.strftime('%Y%m%d-%H%M%S')}"


def run_cli(main: Callable[[list[str]], None], argv: list[str]) -> int:
    """Run an entry point; errors that users can act on are one message, not a traceback (that is in
    `logs/driver.log`). With `--max-restarts` it runs in child processes."""
    try:
        if attempt_number() is None and (status := supervise(argv)) is not None:
            return status
        main(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    except RunStopped as stopped:
        print(stopped, file=sys.stderr)
        return EXIT_STOPPED
    except _RESTARTABLE as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_RESTARTABLE
    except RlkitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; every process of the run has been stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except RuntimeError as error:
        if type(error).__name__ not in _FROM_OUTSIDE:
            raise
        traceback.print_exc()
        return EXIT_RESTARTABLE
    return 0


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Printing into `| head` ends quietly, with status 0, when the reader has seen enough."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python flushes once more when it exits
        os.close(nowhere)
        raise SystemExit(0) from None


def supervise(argv: Sequence[str]) -> int | None:
    """Run attempts in child processes; their exit status. None without `--max-restarts`, and for a dry run."""
    with reader_may_leave():  # --help
        cfg = load_config(argv).config
    if cfg.recovery.max_restarts == 0 or cfg.debug.dry_run or cfg.debug.probe:
        return None
    from rlkit.cli.supervisor import Supervisor  # local: --help does not need it

    folder = run_dir(cfg)
    named = [] if cfg.logging.output_dir is not None else ["--output-dir", str(folder)]  # the same for all attempts
    command = [sys.executable, sys.argv[0], *argv, *named]
    return Supervisor(command, run_dir=folder, max_restarts=cfg.recovery.max_restarts).run()
