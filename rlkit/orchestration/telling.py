"""What a session tells beside its metrics: guards, the report, the record for replays, explanations of log-prob
differences. Made by `session.py`; nothing in here may end a run, but for `--strict-guards`.
"""

import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlkit.config.schema import RunConfig
from rlkit.observability.guards import Guards, gap_is_large
from rlkit.observability.replay_files import note_start, note_tensors
from rlkit.observability.report.page import write_report
from rlkit.observability.report.record import settings_of
from rlkit.types.ranks import MetricSet

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 60.0
"""Least time between two reports of a running run; more where writing one takes longer than a hundredth of that."""
REPORT_SHARE = 100
PACKAGES = ("rlkit", "torch", "transformers", "ray", "sglang", "flash-attn", "megatron-core")


class Telling:
    """Of one session. `close` writes the report of the end, whatever the end was."""

    def __init__(self, cfg: RunConfig, run_dir: Path, say: Callable[[str], None]) -> None:
        self._cfg = cfg
        self._run_dir = run_dir
        self._say = say
        self._guards = Guards(cfg, run_dir, say)
        self._next_report = time.monotonic() + REPORT_EVERY_S
        self._explains = _Explanation(cfg, run_dir, say)
        write_environment(run_dir)

    @property
    def wants_fingerprints(self) -> bool:
        """Whether the session is to call `note_start` and `note_trained`."""
        return self._cfg.report.record_for_replay > 0

    @property
    def wants_save(self) -> bool:
        """Whether a checkpoint is wanted after this step, because the next one is to be explained."""
        return self._explains.wants_save

    def after_rollout(self, step: int, metrics: MetricSet) -> None:
        self._guards.look("rollout", step, metrics)

    def after_training(self, step: int, metrics: MetricSet) -> None:
        """Before the step's checkpoint."""
        self._explains.after_training(step, is_large=bool(gap_is_large(metrics, self._cfg)))

    def note_start(self, step: int, tensors: Mapping[str, str], config_json: Mapping[str, Any]) -> None:
        """Fingerprints of weights and optimizer before the first step of an attempt, for `rlkit replay`."""
        settings = {item.name: item.value for item in settings_of(config_json)}
        note_start(self._run_dir, step, before=tensors, settings=settings)

    def note_trained(self, step: int, tensors: Mapping[str, str]) -> None:
        """The same after a step."""
        note_tensors(self._run_dir, step, tensors)

    def after_step(self, step: int, metrics: MetricSet) -> None:
        """When the step's row is written."""
        self._guards.look("step", step, metrics)
        self._explains.after_step(step)
        if time.monotonic() >= self._next_report:
            began = time.monotonic()
            self._write_report()
            took = time.monotonic() - began
            self._next_report = time.monotonic() + max(REPORT_EVERY_S, REPORT_SHARE * took)

    def close(self) -> None:
        self._explains.close()
        self._write_report()

    def _write_report(self) -> None:
        try:
            write_report(self._run_dir)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("report.html could not be written: %r", error)


class _Explanation:
    """Sees that a difference beyond the bound is explained once: a checkpoint of the weights that the next step begins
    with, then `rlkit explain` on that step's samples, in a process of its own.
    """

    def __init__(self, cfg: RunConfig, run_dir: Path, say: Callable[[str], None]) -> None:
        self._is_on = cfg.report.explain_mismatch and cfg.report.report_samples > 0 and cfg.starts_engines
        self._run_dir = run_dir
        self._say = say
        self.wants_save = False
        self._step: int | None = None
        """The step to explain."""
        self._process: subprocess.Popen[bytes] | None = None

    def after_training(self, step: int, *, is_large: bool) -> None:
        """Before the step's checkpoint, where there is one."""
        if self._is_on and self._step is None and is_large:
            self._step, self.wants_save = step + 1, True

    def after_step(self, step: int) -> None:
        """The samples of the step were made with the weights that the step before left, and those are saved."""
        self.wants_save = False
        if step == self._step:
            self._start(step)

    def _start(self, step: int) -> None:
        self._say(f"looking for the cause of the log-prob difference of step {step}; logs/explain.log, report.html")
        log = (self._run_dir / "logs" / "explain.log").open("ab")
        command = [sys.executable, "-m", "rlkit.cli.main", "explain", str(self._run_dir), "--step", str(step)]
        with log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                preexec_fn=lambda: os.nice(15),
            )

    def close(self) -> None:
        """Wait a little for an explanation that is nearly done; the report of the end shows it."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            logger.warning("rlkit explain was not done when the run ended; call it again by hand")


def write_environment(run_dir: Path) -> None:
    """`environment.json`: versions of what matters. Names of machines and users are none of it."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["cpu cores"] = str(os.cpu_count())
    (run_dir / "environment.json").write_text(json.dumps(found, indent=1))
