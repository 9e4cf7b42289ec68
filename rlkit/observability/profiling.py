"""The profiler and the memory recorder of one training rank. Called by `orchestration/train_workers.py` around each
`train` call; nothing happens unless a flag asks for it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rlkit.config.schema import ProfileConfig

logger = logging.getLogger(__name__)

MAX_MEMORY_EVENTS = 200_000
"""Allocations that the recorder remembers; older ones are forgotten. About 100 MB of snapshot."""


class RankProfiler:
    """Make it before the model is built: the memory recorder starts in the constructor."""

    def __init__(self, cfg: ProfileConfig, run_dir: Path, rank: int) -> None:
        self._cfg = cfg
        self._rank = rank
        self._directory = run_dir / "profile"
        self._snapshot_dir = Path(cfg.memory_snapshot_dir or self._directory)
        self._is_chosen = rank in (cfg.profile_ranks or (0,))
        self._num_steps = 0
        self._records_memory = cfg.record_memory_history and self._is_chosen
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS, stacks="python")

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the training call of one step. Its files are complete when the block is left."""
        try:
            if self._is_profiled(step):
                with self._profiler() as recorded:
                    yield
                self._write_trace(recorded, step)
            else:
                yield
        except torch.OutOfMemoryError:
            if self._records_memory:
                self._write_snapshot(step)
            raise
        self._num_steps += 1
        if self._records_memory and self._num_steps == self._cfg.memory_snapshot_num_steps:
            self._write_snapshot(step)

    def _is_profiled(self, step: int) -> bool:
        cfg = self._cfg
        return cfg.use_pytorch_profiler and self._is_chosen and cfg.profile_step_start <= step < cfg.profile_step_end

    def _profiler(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities)

    def _write_trace(self, recorded: profile, step: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"train_rank{self._rank}_step{step}.json.gz"
        recorded.export_chrome_trace(str(path))
        logger.info(f"step {step}: profile written to {path}; open it in https://ui.perfetto.dev")

    def _write_snapshot(self, step: int) -> None:
        """And stop recording: it costs time in every allocation."""
        name = Path(self._cfg.memory_snapshot_path)
        path = self._snapshot_dir / f"{name.stem}_rank{self._rank}_step{step}{name.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        self._records_memory = False
        logger.info(f"step {step}: memory snapshot written to {path}; open it in https://pytorch.org/memory_viz")
