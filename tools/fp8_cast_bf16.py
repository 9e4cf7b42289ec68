"""Makes a bfloat16 checkpoint of one in fp8 with scales for blocks of 128 x 128 (DeepSeek-V3, Qwen3-*-FP8).

    python tools/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-R1 --output-bf16-hf-path DeepSeek-R1-bf16 [--verify]

Needs twice the source's room on the disk and a few dozen megabytes of memory. Interrupted, it goes on where it was
when it is started again. Tensors that are not fp8 are copied as they are; an fp8 weight without scales is taken at
face value, with a warning. `--verify` afterwards reads both checkpoints and compares every tensor with the formula.
"""

import argparse
import json
import os
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
    row_ranges,
    run_tool,
)
from checkpoint_writer import Conversion, finish, prepare
from torch import Tensor

from rlkit.algo.fp8 import BLOCK, dequantise, grid
from rlkit.config.errors import ConfigError
from rlkit.config.quantization import SCALE_SUFFIX, parse_quantization

FP8 = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--verify", action="store_true", help="compare every tensor afterwards")
    parser.add_argument("--max-workers", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    args = parser.parse_args()
    cast(args.input_fp8_hf_path, args.output_bf16_hf_path, num_workers=args.max_workers)
    if args.verify:
        verify(args.input_fp8_hf_path, args.output_bf16_hf_path)


def cast(source: Path, target: Path, *, num_workers: int) -> Conversion:
    """Write `target`. ConversionError or ConfigError where `source` cannot be converted."""
    places = read_places(source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    quantization = config.pop("quantization_config", None)
    if quantization is None:
        raise ConversionError(f"{source} has no quantization_config in its config.json: it is not in fp8")
    parse_quantization(quantization, place=str(source))
    reader = Reader()
    files = plan(places, reader)
    prepare(source, target)
    with Conversion(target, files, reader, num_workers=num_workers, title="fp8_cast_bf16") as conversion:
        conversion.run()
    finish(source, target, files, config)
    return conversion


def plan(places: dict[str, Place], reader: Reader) -> list[NewFile]:
    """What is to be written. Scales are found in whatever file they are."""
    files: dict[Path, NewFile] = {}
    for place in places.values():
        file = files.setdefault(place.file, NewFile(name=place.file.name, source=place.file))
        if place.name.endswith(SCALE_SUFFIX):
            if place.name.removesuffix(SCALE_SUFFIX) not in places:
                print(f"warning: {place.name} are the scales of no tensor; left out", file=sys.stderr)
            continue
        if place.dtype == FP8:
            scale = places.get(place.name + SCALE_SUFFIX)
            if scale is None:
                print(f"warning: {place.name} is in fp8 without scales; its scale is taken to be 1", file=sys.stderr)
            new, pieces = cast_tensor(reader, place, scale)
        else:
            new, pieces = copied(reader, place)
        file.tensors.append(new)
        file.pieces.extend(pieces)
    return list(files.values())


def cast_tensor(reader: Reader, place: Place, scale: Place | None) -> tuple[NewTensor, list[Piece]]:
    """bfloat16 rows of one fp8 tensor."""
    check_scale(place, scale)
    row_bytes = 2 * place.row_bytes

    def piece(first: int, count: int) -> Piece:
        def convert(write) -> None:
            values = reader.matrix(place, first, count)
            out = reader.buffer("out", count * row_bytes).view(torch.bfloat16).view(values.shape)
            if scale is None:
                out.copy_(values)
            else:
                blocks = (first // BLOCK[0], -(-count // BLOCK[0]))
                try:
                    dequantise(values, reader.matrix(scale, *blocks, slot="scale"), out=out)
                except ValueError as error:
                    raise ConversionError(f"{place.name}: {error}") from error
            write(place.name, first * row_bytes, out)

        return convert

    new = new_tensor(place.name, "BF16", place.shape)
    return new, [piece(*rows) for rows in row_ranges(place, BLOCK[0])] if place.num_bytes else []


def check_scale(place: Place, scale: Place | None) -> None:
    """ConversionError unless the scales are those of a matrix in blocks."""
    if scale is None:
        return
    if len(place.shape) != 2 or scale.shape != grid(place.shape) or scale.dtype not in SCALE_DTYPES:
        raise ConversionError(
            f"{scale.name} is {scale.dtype} {list(scale.shape)}, which are no scales for blocks of {BLOCK[0]} x"
            f" {BLOCK[1]} of {place.name} with shape {list(place.shape)}"
        )


def verify(source: Path, target: Path) -> None:
    """ConversionError unless every tensor of `target` is what the formula says, computed in another way than by the
    conversion: value by value in float32, with every scale written out."""
    old, new = read_places(source), read_places(target)
    wanted = {name for name in old if not name.endswith(SCALE_SUFFIX)}
    if new.keys() != wanted:
        raise ConversionError(f"{target} has other tensors than {source}: {sorted(new.keys() ^ wanted)[:4]}")
    if "quantization_config" in json.loads((target / "config.json").read_text(encoding="utf-8")):
        raise ConversionError(f"{target}/config.json still has a quantization_config")
    reader = Reader()

    def differs(name: str) -> str | None:
        place, made = old[name], new[name]
        is_fp8 = place.dtype == FP8
        if made.shape != place.shape or made.dtype != ("BF16" if is_fp8 else place.dtype):
            return f"{made.dtype} {list(made.shape)}"
        for first, count in row_ranges(place, BLOCK[0]) if place.num_bytes else ():
            found = reader.rows(made, first, count, slot="found")
            if is_fp8:
                expected = formula(reader, place, old.get(name + SCALE_SUFFIX), first, count)
                expected = expected.view(torch.uint8).view(-1)
            else:
                expected = reader.rows(place, first, count)
            if not torch.equal(found, expected):
                return f"rows {first} to {first + count - 1} differ"
        return None

    try:
        compare(sorted(wanted), differs, "fp8_cast_bf16")
    finally:
        reader.close()


def formula(reader: Reader, place: Place, scale: Place | None, first: int, count: int) -> Tensor:
    """bfloat16 rows, by torch's own cast of e4m3."""
    values = reader.matrix(place, first, count).float()
    if scale is None:
        return values.bfloat16()
    blocks = reader.matrix(scale, first // BLOCK[0], -(-count // BLOCK[0]), slot="scale").float()
    expanded = blocks.repeat_interleave(BLOCK[0], 0)[:count].repeat_interleave(BLOCK[1], 1)[:, : values.shape[1]]
    return (values * expanded).bfloat16()


if __name__ == "__main__":
    run_tool(main, ConfigError)
