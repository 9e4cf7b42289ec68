"""Quantises a bfloat16, float16 or float32 checkpoint to fp8 (e4m3) with a float32 scale for each block of 128 x 128,
as DeepSeek-V3 is: what SGLang serves, and what rlkit trains with fp8 rollouts.

    python tools/convert_hf_to_fp8.py --model-dir Qwen3-30B-A3B --save-dir Qwen3-30B-A3B-FP8 [--verify]

Linear layers are quantised; embeddings, the head, norms, routers, and the modules that `--exclude` names are copied
and listed in `modules_to_not_convert`. Memory, interruption and `--verify` as in `fp8_cast_bf16.py`.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import (
    DTYPES,
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

from rlkit.algo.fp8 import BLOCK, E4M3, E4M3_MAX, grid, quantise
from rlkit.config.errors import ConfigError
from rlkit.config.quantization import SCALE_SUFFIX, Fp8Blocks, parse_quantization

FLOATS = ("F32", "F16", "BF16")
PLAIN_MODULES = (
    *("lm_head", "embed_tokens", "embeddings", "embed_positions", "word_embeddings", "wte", "wpe"),
    *("mlp.gate", "block_sparse_moe.gate", "router", "shared_expert_gate"),
    *("eh_proj", "shared_head", "visual", "vision_tower", "multi_modal_projector", "conv1d"),
)
"""Modules, by a dotted part of their path, whose matrices stay: small, sensitive to rounding, or no linear layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--save-dir", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--scale-fmt", choices=["float32", "ue8m0"], default="float32", help="ue8m0: powers of two")
    parser.add_argument("--exclude", nargs="*", default=[], metavar="MODULE", help="more modules that stay as they are")
    parser.add_argument("--verify", action="store_true", help="compare every tensor afterwards")
    parser.add_argument("--max-workers", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    args = parser.parse_args()
    is_ue8m0 = args.scale_fmt == "ue8m0"
    convert(args.model_dir, args.save_dir, exclude=args.exclude, is_ue8m0=is_ue8m0, num_workers=args.max_workers)
    if args.verify:
        verify(args.model_dir, args.save_dir)


def convert(source: Path, target: Path, *, exclude: Sequence[str], is_ue8m0: bool, num_workers: int) -> Conversion:
    """Write `target`. ConversionError where `source` cannot be converted."""
    places = read_places(source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config") is not None:
        raise ConversionError(f"{source} is quantised already; start from a bfloat16 checkpoint")
    plain = Fp8Blocks(excluded=(*PLAIN_MODULES, *exclude))
    chosen = {name for name, place in places.items() if is_quantised(place, plain)}
    if not chosen:
        raise ConversionError(f"{source} holds no matrix that would be quantised")
    for place in places.values():
        if len(place.shape) > 2 and "expert" in place.name:
            print(f"warning: {place.name} has shape {list(place.shape)}; only matrices are quantised", file=sys.stderr)
    reader = Reader()
    files = plan(places, chosen, reader, power_of_two=is_ue8m0)
    prepare(source, target)
    with Conversion(target, files, reader, num_workers=num_workers, title="convert_hf_to_fp8") as conversion:
        conversion.run()
    kept = (name for name, place in places.items() if len(place.shape) == 2 and name not in chosen)
    config["quantization_config"] = quantization_config(sorted(kept), is_ue8m0=is_ue8m0)
    finish(source, target, files, config)
    return conversion


def is_quantised(place: Place, plain: Fp8Blocks) -> bool:
    is_weight = place.name.endswith(".weight") and len(place.shape) == 2 and place.dtype in FLOATS
    return is_weight and not plain.excludes(place.name) and "norm" not in place.name


def quantization_config(kept: Sequence[str], *, is_ue8m0: bool) -> dict[str, Any]:
    """What engines read. `kept`: names of matrices that stay."""
    found: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [name.removesuffix(".weight") for name in kept],
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
    return found | ({"scale_fmt": "ue8m0"} if is_ue8m0 else {})


def plan(places: dict[str, Place], chosen: set[str], reader: Reader, *, power_of_two: bool) -> list[NewFile]:
    files: dict[Path, NewFile] = {}
    for place in places.values():
        file = files.setdefault(place.file, NewFile(name=place.file.name, source=place.file))
        if place.name in chosen:
            new, pieces = quantise_tensor(reader, place, power_of_two=power_of_two)
        else:
            one, pieces = copied(reader, place)
            new = [one]
        file.tensors.extend(new)
        file.pieces.extend(pieces)
    return list(files.values())


def quantise_tensor(reader: Reader, place: Place, *, power_of_two: bool) -> tuple[list[NewTensor], list[Piece]]:
    """fp8 rows and their scales."""
    columns = place.shape[1]
    scale = new_tensor(place.name + SCALE_SUFFIX, "F32", grid(place.shape))

    def piece(first: int, count: int) -> Piece:
        def convert_rows(write) -> None:
            weight = reader.matrix(place, first, count)
            out = reader.buffer("out", count * columns).view(E4M3).view(count, columns)
            scale_mn = torch.empty(grid(weight.shape))
            try:
                quantise(weight, power_of_two=power_of_two, out=(out, scale_mn))
            except ValueError as error:
                raise ConversionError(f"{place.name}, from row {first} on: {error}") from error
            write(place.name, first * columns, out)
            write(scale.name, first // BLOCK[0] * scale.shape[1] * 4, scale_mn)

        return convert_rows

    new = [new_tensor(place.name, "F8_E4M3", place.shape), scale]
    return new, [piece(*rows) for rows in row_ranges(place, BLOCK[0])] if place.num_bytes else []


def verify(source: Path, target: Path) -> None:
    """ConversionError unless every tensor of `target` is what the formula says: the largest value of each block became
    +-448 (less where scales are powers of two), and every value is within half a step of e4m3."""
    old, new = read_places(source), read_places(target)
    weights = {name for name in new if not name.endswith(SCALE_SUFFIX)}
    if weights != old.keys():
        raise ConversionError(f"{target} has other tensors than {source}: {sorted(weights ^ old.keys())[:4]}")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    scheme = parse_quantization(config["quantization_config"], place=str(target))
    reader = Reader()

    def differs(name: str) -> str | None:
        place, made, scale = old[name], new[name], new.get(name + SCALE_SUFFIX)
        if made.shape != place.shape or made.dtype != (place.dtype if scale is None else "F8_E4M3"):
            return f"{made.dtype} {list(made.shape)}"
        for first, count in row_ranges(place, BLOCK[0]) if place.num_bytes else ():
            if scale is None:
                is_right = torch.equal(reader.rows(place, first, count), reader.rows(made, first, count, slot="found"))
            else:
                is_right = rows_are_right(reader, place, made, scale, first, count, scheme)
            if not is_right:
                return f"rows {first} to {first + count - 1} differ"
        return None

    try:
        compare(sorted(weights), differs, "convert_hf_to_fp8")
    finally:
        reader.close()


def rows_are_right(
    reader: Reader, place: Place, made: Place, scale: Place, first: int, count: int, scheme: Fp8Blocks
) -> bool:
    weight = reader.matrix(place, first, count).to(DTYPES["F64"])
    values = reader.matrix(made, first, count, slot="found").double()
    scales = reader.matrix(scale, first // BLOCK[0], -(-count // BLOCK[0]), slot="scale").double()
    expanded = scales.repeat_interleave(BLOCK[0], 0)[:count].repeat_interleave(BLOCK[1], 1)[:, : weight.shape[1]]
    quotient = weight / expanded
    bound = torch.maximum(quotient.abs() * 2.0**-4, torch.tensor(2.0**-10)) * (1 + 1e-6)
    largest = torch.nn.functional.pad(quotient.abs(), (0, -weight.shape[1] % BLOCK[1], 0, -count % BLOCK[0]))
    largest = largest.view(scales.shape[0], BLOCK[0], scales.shape[1], BLOCK[1]).amax(dim=(1, 3))
    uses_range = largest > (E4M3_MAX / 2 if scheme.power_of_two else E4M3_MAX) * (1 - 1e-6)
    fits = uses_range & (largest < E4M3_MAX * (1 + 1e-6)) | (largest == 0) | (scales == 2.0**-126)
    return bool(((values - quotient).abs() <= bound).all() and fits.all())


if __name__ == "__main__":
    run_tool(main, ConfigError)
