"""The folder of checkpoints: what is complete, which one a run continues from, how one is written, which are deleted.

    <save>/iter_0000011/COMPLETE            written last, with the manifest's digest; without it never chosen
                       /manifest.json       every file with its digest, every tensor with its fingerprint
                       /meta.json           step, weight version, world size
                       /rollout_state.json  position in the prompt file and the next group id
                       /step_metrics.json   the step's metrics so far, should its row never be written
                       /trainer/            what the backend wrote
          /latest_checkpointed_iteration.txt  the newest step, for people and other tools; not trusted here

A checkpoint is written into `.iter_0000011.tmp` and renamed. Pure file handling; called by `session.py`.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlkit.orchestration.manifest import (
    MARKER,
    build_manifest,
    manifest_text,
    marker_text,
    read_manifest,
    verify_files,
)
from rlkit.orchestration.manifest import NAME as MANIFEST
from rlkit.types.errors import CheckpointError

logger = logging.getLogger(__name__)

POINTER = "latest_checkpointed_iteration.txt"
NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMeta:
    step: int
    """The step after which it was saved."""
    weight_version: int
    """Version of the weights in it: step + 1."""
    world_size: int
    """Training ranks that wrote it. Any number can load it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    meta: CheckpointMeta
    rollout_state: dict[str, Any]

    @property
    def trainer_dir(self) -> Path:
        return self.path / "trainer"


def start_step(checkpoint: Checkpoint | None, start_rollout_id: int | None) -> int:
    """First step of a run: `--start-rollout-id` if given, else the one after the checkpoint, else 0."""
    if start_rollout_id is not None:
        return start_rollout_id
    return checkpoint.meta.step + 1 if checkpoint is not None else 0


def check_not_counted_twice(save: Path, start_rollout_id: int | None) -> None:
    """CheckpointError where `--start-rollout-id` would number steps again that this folder holds checkpoints of: its
    newest checkpoint would no longer be the newest work, and later starts would find ledger and checkpoint at odds.
    """
    if start_rollout_id is None:
        return
    later = [path for path in complete_checkpoints(save) if step_of(path) >= start_rollout_id]
    if later:
        raise CheckpointError(
            f"--start-rollout-id {start_rollout_id} would count steps again of which {save} holds checkpoints, up to"
            f" {later[-1].name}. Drop it, continue from an earlier checkpoint with --ckpt-step, or begin a new run with"
            " these weights: --finetune --load and another --output-dir"
        )


def has_complete(directory: Path) -> bool:
    """Whether a run could continue from this folder."""
    return directory.is_dir() and any(
        NAME.fullmatch(path.name) and (path / MARKER).is_file() for path in directory.iterdir()
    )


def find_checkpoint(directory: Path, step: int | None = None) -> Checkpoint | None:
    """The newest complete checkpoint, or that of `step`. None when the folder holds no checkpoint at all.

    Incomplete ones are skipped with a warning that names them. Raises CheckpointError when the wanted step is not
    there, when only incomplete ones are, or when a complete one has lost a part: training must not restart its data
    silently.
    """
    if not directory.is_dir():
        return None
    folders = {int(match[1]): path for path in directory.iterdir() if (match := NAME.fullmatch(path.name))}
    complete = {number: path for number, path in folders.items() if (path / MARKER).is_file()}
    for number in sorted(folders.keys() - complete.keys()):
        logger.warning("skipping %s: it has no %s marker, so its save did not finish", folders[number], MARKER)
    if step is not None:
        if step not in complete:
            raise CheckpointError(f"--ckpt-step {step} is not complete in {directory}; complete are {sorted(complete)}")
        return read_checkpoint(complete[step])
    if complete:
        return read_checkpoint(complete[max(complete)])
    if folders:
        raise CheckpointError(
            f"{directory} holds only unfinished checkpoints ({', '.join(sorted(p.name for p in folders.values()))}); "
            "remove them to start anew, or point --load elsewhere"
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Check that every part of a complete checkpoint is there."""
    missing = [name for name in ("meta.json", "rollout_state.json", "trainer") if not (path / name).exists()]
    if missing:
        raise CheckpointError(
            f"{path} is marked complete but lacks {', '.join(missing)}; continue from another one with --ckpt-step"
        )
    rollout_state = _read_object(path / "rollout_state.json")
    try:
        meta = CheckpointMeta(**_read_object(path / "meta.json"))
    except TypeError as error:
        raise CheckpointError(f"{path / 'meta.json'} is not of this version: {error}") from error
    return Checkpoint(path=path, meta=meta, rollout_state=rollout_state)


def verify(checkpoint: Checkpoint) -> None:
    """Read every file and compare it with the manifest; CheckpointError names what differs. A checkpoint without a
    manifest is taken as it is, with a warning.
    """
    manifest = read_manifest(checkpoint.path)
    if manifest is None:
        logger.warning("%s has no %s, so its files cannot be verified", checkpoint.path, MANIFEST)
        return
    problems = verify_files(checkpoint.path, manifest)
    if not problems:
        return
    others = [path.name for path in complete_checkpoints(checkpoint.path.parent) if path != checkpoint.path]
    raise CheckpointError(
        f"{checkpoint.path} is not what was saved: {'; '.join(problems)}. Continue from another one with --ckpt-step "
        f"(complete are also: {', '.join(others) or 'none'})"
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); continue from another one with --ckpt-step") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged (no JSON object); continue from another one with --ckpt-step")
    return content


def staging_dir(directory: Path, step: int) -> Path:
    """A fresh folder to write step's checkpoint into; leftovers of an interrupted save are removed."""
    path = directory / f".iter_{step:07d}.tmp"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def commit(
    staging: Path, meta: CheckpointMeta, rollout_state: dict[str, Any], *, tensors: Mapping[str, str] | None = None
) -> Path:
    """Add what is missing, mark it complete, rename it into place and move the pointer.

    `tensors`: fingerprints of what was saved, for the manifest. Reads all that was written, for its digests.
    """
    directory = staging.parent
    write_durably(staging / "meta.json", json.dumps(asdict(meta), indent=2))
    write_durably(staging / "rollout_state.json", json.dumps(rollout_state))
    manifest = build_manifest(staging, asdict(meta), rollout_state, tensors or {})
    text = manifest_text(manifest)
    write_durably(staging / MANIFEST, text)
    write_durably(staging / MARKER, marker_text(text))
    final = directory / f"iter_{meta.step:07d}"
    if final.exists():
        # Training an old step again (--ckpt-step): the new one replaces it, never half of it.
        old = directory / f".iter_{meta.step:07d}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        staging.rename(final)
        shutil.rmtree(old)
    else:
        staging.rename(final)
    pointer = directory / (POINTER + ".tmp")
    write_durably(pointer, f"{meta.step}\n")
    pointer.replace(directory / POINTER)
    sync_dir(directory)
    return final


def complete_checkpoints(directory: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest step first."""
    if not directory.is_dir():
        return []
    return sorted(
        (path for path in directory.iterdir() if NAME.fullmatch(path.name) and (path / MARKER).is_file()), key=step_of
    )


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def prune(directory: Path, keep: int | None, *, newest: int | None = None) -> list[Path]:
    """Delete all but the `keep` newest complete checkpoints (None keeps all); returns what was deleted.

    `newest`: the step saved last. Checkpoints of later steps are older work that a run with --ckpt-step left behind:
    they neither count nor are they deleted.
    """
    if keep is None:
        return []
    complete = [path for path in complete_checkpoints(directory) if newest is None or step_of(path) <= newest]
    doomed = complete[: max(0, len(complete) - keep)]
    for path in doomed:
        (path / MARKER).unlink()  # first, so that an interrupted deletion leaves nothing that looks complete
        shutil.rmtree(path)
    return doomed


def write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_dir(directory: Path) -> None:
    """Make renames in `directory` survive a power loss."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
