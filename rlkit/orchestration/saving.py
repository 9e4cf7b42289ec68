"""What surrounds a save: is there room, are these really new weights, and what a failed save leaves. Called by the
session; the files are `checkpoints.py`'s and the backend's work.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlkit.orchestration.checkpoints import Checkpoint, complete_checkpoints
from rlkit.orchestration.manifest import read_manifest
from rlkit.types.errors import CheckpointError
from rlkit.types.fingerprints import CRITIC, REFERENCE, WEIGHTS, differing, weights_digest
from rlkit.types.ranks import MetricSet

BYTES_PER_PARAMETER = 12
"""Master weight and two moments in float32, where no earlier checkpoint tells the size."""
SPARE = 1.02


class SaveGuard:
    """Watches over the saves of one session."""

    def __init__(self, directory: Path, checkpoint: Checkpoint | None) -> None:
        """`directory` is the folder of checkpoints; `checkpoint` the one that the run continues from."""
        self._directory = directory
        manifest = read_manifest(checkpoint.path) if checkpoint is not None else None
        tensors = manifest.tensors if manifest is not None else {}
        self._saved = weights_digest(tensors) if tensors else None
        self._saved_step = manifest.step if manifest is not None else None
        self._largest_norm = 0.0
        self._norm_step: int | None = None

    def note_training(self, step: int, metrics: MetricSet) -> None:
        """Remember whether a step should have moved the weights."""
        norm = metrics.get("train/grad_norm", 0.0)
        if metrics.get("train/lr", 0.0) > 0.0 and norm > self._largest_norm:
            self._largest_norm, self._norm_step = norm, step

    def check_space(self, *, num_params: int) -> None:
        """CheckpointError when the disk cannot hold another checkpoint: before anything is written or deleted."""
        needed = int(SPARE * self._expected_bytes(num_params))
        self._directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise CheckpointError(
                f"a checkpoint needs about {needed / 1e9:.2f} GB and {self._directory} has {free / 1e9:.2f} GB free; "
                "nothing was written and earlier checkpoints are as they were. Make room, lower --keep-checkpoints, or "
                "point --save elsewhere, then start again"
            )

    def _expected_bytes(self, num_params: int) -> int:
        for path in reversed(complete_checkpoints(self._directory)):
            manifest = read_manifest(path)
            if manifest is not None:
                return manifest.num_bytes
        return BYTES_PER_PARAMETER * num_params

    def check_changed(self, step: int, tensors: Mapping[str, str]) -> None:
        """CheckpointError when weights that were trained on are still those of the save before."""
        digest = weights_digest(tensors)
        if digest == self._saved and self._largest_norm > 0.0:
            raise CheckpointError(
                f"the weights after step {step} are bit for bit those saved after step {self._saved_step}, although "
                f"step {self._norm_step} had a gradient norm of {self._largest_norm:g} and a learning rate above 0: "
                "the optimizer does not reach what is saved, or --lr is too small for the weights' precision. Not saved"
            )
        self._saved, self._saved_step, self._largest_norm = digest, step, 0.0


@contextmanager
def all_or_nothing(staging: Path) -> Iterator[None]:
    """Remove a save that failed, so that a full disk has room again, and say that nothing else was lost."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(
            f"the save into {staging.parent} failed: {error}. What was written of it has been removed; the checkpoints "
            "before it are complete, and the run continues from the newest of them when it is started again"
        ) from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def check_loaded(checkpoint: Checkpoint, tensors: Mapping[str, str], *, with_optimizer: bool) -> None:
    """CheckpointError when a tensor that the ranks have loaded is not the one that was saved."""
    manifest = read_manifest(checkpoint.path)
    if manifest is None:
        return
    saved = {
        name: value
        for name, value in manifest.tensors.items()
        # a run without a critic or a moving reference leaves theirs in the checkpoint
        if name in tensors or not name.startswith((CRITIC, REFERENCE))
        if with_optimizer or name.startswith(WEIGHTS)
    }
    different = differing(saved, tensors)
    if different:
        raise CheckpointError(
            f"{len(different)} of {len(saved)} tensors loaded from {checkpoint.path} are not those that were saved; "
            f"the first is {different[0]}: saved {saved[different[0]]}, loaded {tensors.get(different[0], 'absent')}. "
            "Continue from another one with --ckpt-step"
        )
