"""`rlkit ckpt verify|diff|list`: checkpoints by their manifests. Works without Ray; torch only with `--deep`."""

import argparse
import sys
import time
from pathlib import Path

from rlkit.orchestration.checkpoints import NAME, complete_checkpoints, read_checkpoint, step_of
from rlkit.orchestration.manifest import MARKER, Manifest, read_manifest, verify_files
from rlkit.types.errors import CheckpointError
from rlkit.types.fingerprints import WEIGHTS, differing

MAX_NAMED = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    verify = commands.add_parser("verify", help="compare every file with the manifest")
    verify.add_argument("directory", type=Path, help="a checkpoint, or a folder of checkpoints: all of them")
    verify.add_argument(
        "--deep", action="store_true", help="also compare every tensor in the files with what was saved"
    )
    diff = commands.add_parser("diff", help="which tensors differ between two checkpoints")
    diff.add_argument("first", type=Path)
    diff.add_argument("second", type=Path)
    listing = commands.add_parser("list", help="the checkpoints of a folder")
    listing.add_argument("directory", type=Path)


def main(args: argparse.Namespace) -> int:
    match args.action:
        case "verify":
            return verify(args.directory, deep=args.deep)
        case "diff":
            return diff(args.first, args.second)
        case _:
            return show_list(args.directory)


def verify(directory: Path, *, deep: bool) -> int:
    """1 if anything is wrong with one of them."""
    paths = [directory] if NAME.fullmatch(directory.name) else complete_checkpoints(checkpoints_of(directory))
    if not paths:
        print(f"{directory} holds no complete checkpoint", file=sys.stderr)
        return 1
    bad = 0
    for path in paths:
        began = time.perf_counter()
        manifest, problems = problems_of(path, deep=deep)
        seconds = time.perf_counter() - began
        size = f"{manifest.num_bytes / 1e9:.3f} GB, " if manifest is not None else ""
        print(f"{path.name}: {'BAD' if problems else 'good'} ({size}{seconds:.1f} s)")
        for problem in problems:
            print(f"  {problem}")
        bad += bool(problems)
    return 1 if bad else 0


def problems_of(path: Path, *, deep: bool) -> tuple[Manifest | None, list[str]]:
    if not (path / MARKER).is_file():
        return None, [f"no {MARKER} marker: its save did not finish"]
    try:
        read_checkpoint(path)
        manifest = read_manifest(path)
    except CheckpointError as error:
        return None, [str(error)]
    if manifest is None:
        return None, ["no manifest: saved by an older version, cannot be verified"]
    problems = verify_files(path, manifest)
    if deep and not problems:
        if not manifest.tensors:
            return manifest, ["no fingerprints of tensors in the manifest"]
        from rlkit.backends.fsdp.fingerprint import file_fingerprints  # local: torch

        wrong = differing(manifest.tensors, file_fingerprints(path / "trainer"))
        problems += [f"{name} in the files is not what the ranks held at the save" for name in wrong[:MAX_NAMED]]
        problems += [f"... {len(wrong)} tensors in all"] if len(wrong) > MAX_NAMED else []
    return manifest, problems


def diff(first: Path, second: Path) -> int:
    """1 if a tensor differs, 0 if all are the same."""
    a, b = known_manifest(first), known_manifest(second)
    for name in ("step", "weight_version", "world_size", "data_position", "next_group_id", "trainer"):
        old, new = getattr(a, name), getattr(b, name)
        if old != new:
            print(f"{name}: {old} -> {new}")
    missing = sorted(a.tensors.keys() ^ b.tensors.keys())
    changed = differing({name: a.tensors[name] for name in a.tensors.keys() & b.tensors.keys()}, b.tensors)
    for what, is_weight in (("weights", True), ("optimizer state", False)):
        names = [name for name in changed if name.startswith(WEIGHTS) is is_weight]
        total = sum(name.startswith(WEIGHTS) is is_weight for name in a.tensors)
        more = f": {', '.join(names[:MAX_NAMED])}{', ...' if len(names) > MAX_NAMED else ''}" if names else ""
        print(f"{what}: {len(names)} of {total} tensors differ{more}")
    if missing:
        print(f"in one of them only: {', '.join(missing[:MAX_NAMED])}")
    return 1 if changed or missing else 0


def known_manifest(path: Path) -> Manifest:
    manifest = read_manifest(path)
    if manifest is None:
        raise CheckpointError(f"{path} has no manifest, so there is nothing to compare")
    return manifest


def show_list(directory: Path) -> int:
    """1 if there is none."""
    folder = checkpoints_of(directory)
    found = sorted((p for p in folder.iterdir() if NAME.fullmatch(p.name)), key=step_of) if folder.is_dir() else []
    for path in found:
        manifest = read_manifest(path)
        if not (path / MARKER).is_file():
            print(f"{path.name}  unfinished")
        elif manifest is None:
            print(f"{path.name}  complete, without manifest")
        else:
            print(
                f"{path.name}  step {manifest.step}, weights v{manifest.weight_version}, {manifest.world_size} ranks, "
                f"next group {manifest.next_group_id}, {len(manifest.rng_files)} random states, "
                f"{manifest.num_bytes / 1e9:.3f} GB"
            )
    if not folder.is_dir():
        print(f"there is no folder {folder}", file=sys.stderr)
    elif not found:
        print(f"{folder} holds no checkpoint", file=sys.stderr)
    return 0 if found else 1


def checkpoints_of(directory: Path) -> Path:
    """A run folder stands for the checkpoints in it."""
    inner = directory / "checkpoints"
    return inner if inner.is_dir() else directory
