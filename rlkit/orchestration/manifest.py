"""What a checkpoint says about itself: `manifest.json`, written before its COMPLETE marker, checked before it is used.

It lists every file with size and digest, and the fingerprint of every tensor as it stood in the ranks' memory at the
save. Files are read in pieces by several threads; a file's digest is the digest of its pieces' digests.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlkit.types.errors import CheckpointError

NAME = "manifest.json"
MARKER = "COMPLETE"
FORMAT = 1
PIECE_BYTES = 32 * 1024 * 1024
MAX_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    num_bytes: int
    digest: str
    """SHA-256 over the SHA-256 of each piece of 32 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    step: int
    weight_version: int
    world_size: int
    data_position: dict[str, Any] | None
    """Place in the prompt file, None where the run reads none."""
    next_group_id: int | None
    trainer: dict[str, Any]
    """The backend's own `trainer.json`: optimizer steps are the state of the schedule."""
    rng_files: list[str]
    """Random states, one a rank."""
    files: dict[str, FileDigest]
    """By path inside the checkpoint."""
    tensors: dict[str, str]
    """Fingerprints of the live tensors at the save (`types/fingerprints.py`); empty where none were taken."""
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


def build_manifest(
    checkpoint: Path, meta: Mapping[str, int], rollout_state: Mapping[str, Any], tensors: Mapping[str, str]
) -> Manifest:
    """Read every file of a finished but uncommitted checkpoint."""
    trainer = checkpoint / "trainer" / "trainer.json"
    files = digest_files(checkpoint)
    return Manifest(
        step=meta["step"],
        weight_version=meta["weight_version"],
        world_size=meta["world_size"],
        data_position=rollout_state.get("prompts"),
        next_group_id=rollout_state.get("next_group_id"),
        trainer=json.loads(trainer.read_text()) if trainer.is_file() else {},
        rng_files=sorted(name for name in files if Path(name).name.startswith("rng_")),
        files=files,
        tensors=dict(tensors),
    )


def manifest_text(manifest: Manifest) -> str:
    return json.dumps(asdict(manifest), indent=1)


def marker_text(manifest: str) -> str:
    """What the marker of a checkpoint holds: the digest of its manifest, which vouches for everything else."""
    return f"sha256 {hashlib.sha256(manifest.encode()).hexdigest()} {NAME}\n"


def read_manifest(checkpoint: Path) -> Manifest | None:
    """None where a checkpoint has none, as those of older versions. CheckpointError when it is damaged, or another one
    than was committed (an older version's marker is empty and cannot tell).
    """
    path, marker = checkpoint / NAME, checkpoint / MARKER
    committed = marker.read_text() if marker.is_file() else ""
    if not path.is_file():
        if committed:
            raise CheckpointError(f"{path} is missing; continue from another one with --ckpt-step")
        return None
    text = path.read_text()
    if committed and committed != marker_text(text):
        raise CheckpointError(
            f"{path} was changed after the checkpoint was complete; continue from another one with --ckpt-step"
        )
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {fields['format']}, this version of rlkit reads {FORMAT}")
        files = {name: FileDigest(**file) for name, file in fields.pop("files").items()}
        return Manifest(files=files, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); continue from another one with --ckpt-step") from error


def verify_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files: one line each, empty when all are as they were written. Reads everything."""
    problems = []
    present: dict[str, int] = {}
    for name, file in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != file.num_bytes:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {file.num_bytes}")
        else:
            present[name] = file.num_bytes
    found = _digests(checkpoint, present)
    problems += [
        f"{name} has other content than when it was written"
        for name in present
        if found[name].digest != manifest.files[name].digest
    ]
    return problems


def digest_files(checkpoint: Path) -> dict[str, FileDigest]:
    """Digest of every file below, but of manifest and marker."""
    sizes = {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name not in (NAME, MARKER)
    }
    return _digests(checkpoint, sizes)


def _digests(root: Path, sizes: Mapping[str, int]) -> dict[str, FileDigest]:
    pieces = [(name, start) for name, size in sizes.items() for start in range(0, size, PIECE_BYTES)]
    with ThreadPoolExecutor(max_workers=min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda piece: _digest_piece(root / piece[0], piece[1]), pieces)
        whole = {name: hashlib.sha256() for name in sizes}
        for (name, _), digest in zip(pieces, digests, strict=True):
            whole[name].update(digest)
    return {name: FileDigest(num_bytes=size, digest=whole[name].hexdigest()) for name, size in sizes.items()}


def _digest_piece(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(PIECE_BYTES)).digest()  # both calls let other threads run
