"""A trainer's checkpoint in torch's distributed format -> a Hugging Face checkpoint, without the ranks that wrote it:

    python tools/convert_torch_dist_to_hf.py --input-dir runs/a/checkpoints --origin-hf-dir /models/DeepSeek-R1 \
        --output-dir /models/mine [--add-missing-from-origin-hf]

For checkpoints of `--train-backend megatron`, whose tensors have the names of the Hugging Face files, experts one by
one (those of the FSDP backend: `convert_fsdp_to_hf.py`, which also knows adapters and fused experts).
`--origin-hf-dir` is the run's `--hf-checkpoint`: which tensors there are, in which files and dtypes; fp8 becomes
bfloat16, and rows of the vocabulary are as many as there. One tensor is in memory at a time; interrupted, it goes on
where it was.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from checkpoint_files import (
    ConversionError,
    NewFile,
    NewTensor,
    Piece,
    Place,
    Reader,
    compare,
    copied,
    new_tensor,
    read_places,
    run_tool,
)
from checkpoint_writer import Conversion, finish, prepare
from convert_fsdp_to_hf import trainer_folder
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rlkit.backends.fsdp.stored import SHARDS
from rlkit.backends.sharded_files import ShardedFiles
from rlkit.config.errors import ConfigError
from rlkit.config.quantization import SCALE_SUFFIX
from rlkit.types.errors import CheckpointError
from rlkit.types.fingerprints import WEIGHTS

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True, help="iter_N, or the folder of checkpoints")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--origin-hf-dir", type=Path, required=True, help="the run's --hf-checkpoint")
    parser.add_argument(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="copy tensors that the trainer does not have, such as layers that only draft",
    )
    parser.add_argument("--verify", action="store_true", help="compare every tensor afterwards")
    args = parser.parse_args()
    folder = trainer_folder(args.input_dir)
    convert(folder, args.origin_hf_dir, args.output_dir, add_missing=args.add_missing_from_origin_hf)
    if args.verify:
        verify(folder, args.origin_hf_dir, args.output_dir)


def convert(folder: Path, origin: Path, output: Path, *, add_missing: bool) -> Conversion:
    """`folder` is what a backend wrote (`iter_N/trainer`)."""
    if not (folder / SHARDS).is_dir():
        raise ConversionError(f"{folder} has no {SHARDS}/: it is not in torch's distributed format")
    stored = stored_places(folder)
    places = {name: place for name, place in read_places(origin).items() if not name.endswith(SCALE_SUFFIX)}
    check_names(folder, origin, stored, places, add_missing=add_missing)
    reader = Reader()
    files: dict[Path, NewFile] = {}
    for place in places.values():
        file = files.setdefault(place.file, NewFile(name=place.file.name, source=place.file))
        if place.name in stored:
            new, pieces = trained(folder, stored[place.name], place)
        elif place.dtype == "F8_E4M3":
            raise ConversionError(
                f"{place.name} is not in {folder} and in fp8 in {origin}; make a bfloat16 checkpoint of it with"
                " tools/fp8_cast_bf16.py and pass that as --origin-hf-dir"
            )
        else:
            new, pieces = copied(reader, place)
        file.tensors.append(new)
        file.pieces.extend(pieces)
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    prepare(origin, output)
    chosen = list(files.values())
    source_id = f"{folder.resolve()} {(folder / SHARDS / '.metadata').stat().st_mtime_ns}"
    conversion = Conversion(
        output, chosen, reader, num_workers=1, title="convert_torch_dist_to_hf", made_from=source_id
    )
    with conversion:
        conversion.run()
    finish(origin, output, chosen, config)
    return conversion


def stored_places(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Weights in the checkpoint by Hugging Face name."""
    everything = ShardedFiles(folder / SHARDS).read_metadata().state_dict_metadata
    return {
        name.removeprefix(WEIGHTS): stored
        for name, stored in everything.items()
        if name.startswith(WEIGHTS) and isinstance(stored, TensorStorageMetadata)
    }


def check_names(
    folder: Path,
    origin: Path,
    stored: dict[str, TensorStorageMetadata],
    places: dict[str, Place],
    *,
    add_missing: bool,
) -> None:
    foreign = sorted(stored.keys() - places.keys())
    if foreign:
        raise ConversionError(f"{folder} holds {len(foreign)} tensors that {origin} has not, the first is {foreign[0]}")
    tied = json.loads((origin / "config.json").read_text()).get("tie_word_embeddings", False)
    missing = sorted(places.keys() - stored.keys() - ({"lm_head.weight"} if tied else set()))
    if missing and not add_missing:
        raise ConversionError(
            f"{folder} lacks {len(missing)} tensors of {origin}, the first is {missing[0]}; pass"
            " --add-missing-from-origin-hf to copy them"
        )
    for name in stored:
        if tuple(stored[name].size) != places[name].shape:
            raise ConversionError(
                f"{name} has shape {list(stored[name].size)} in {folder} and {list(places[name].shape)} in {origin};"
                " they do not belong together"
            )
    if tied and "lm_head.weight" not in stored:
        places.pop("lm_head.weight", None)


def trained(folder: Path, stored: TensorStorageMetadata, place: Place) -> tuple[NewTensor, list[Piece]]:
    dtype = "BF16" if place.dtype == "F8_E4M3" else place.dtype

    def piece(write) -> None:
        write(place.name, 0, read(folder, stored, place.name).to(DTYPES[dtype]))

    return new_tensor(place.name, dtype, place.shape), [piece]


def read(folder: Path, stored: TensorStorageMetadata, name: str) -> Tensor:
    """The whole tensor, in the dtype that it is stored in."""
    tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
    load({WEIGHTS + name: tensor}, storage_reader=ShardedFiles(folder / SHARDS), no_dist=True)
    return tensor


def verify(folder: Path, origin: Path, output: Path) -> None:
    """ConversionError unless every tensor of `output` is the checkpoint's or, where that has none, the origin's."""
    stored, old, new = stored_places(folder), read_places(origin), read_places(output)
    reader = Reader()

    def differs(name: str) -> str | None:
        place = new[name]
        found = reader.rows(place, 0, place.num_rows, slot="found")
        if name in stored:
            expected = read(folder, stored[name], name).to(DTYPES[place.dtype]).reshape(-1).view(torch.uint8)
        else:
            expected = reader.rows(old[name], 0, old[name].num_rows)
        return None if torch.equal(found, expected) else "another content"

    try:
        compare(sorted(new), differs, "convert_torch_dist_to_hf")
    finally:
        reader.close()
    if stored.keys() - new.keys():
        raise ConversionError(f"{output} lacks {sorted(stored.keys() - new.keys())[:4]}")


if __name__ == "__main__":
    sys.exit(run_tool(main, ConfigError, CheckpointError))
