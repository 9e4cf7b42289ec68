"""A trainer's checkpoint -> a Hugging Face checkpoint, without Ray, GPUs or the ranks that wrote it.

    python tools/convert_fsdp_to_hf.py --input-dir runs/a/checkpoints/iter_0000019 --origin-hf-dir /models/Qwen3-0.6B \
        --output-dir /models/mine

The result is what `--save-hf` would have written at that step, bit for bit. `--input-dir` is one checkpoint, or a
folder of them: then the newest complete one. `--origin-hf-dir` is the run's `--hf-checkpoint`: names, dtypes,
configuration and tokenizer come from there, and the base weights of a run that trained adapters, which are merged.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlkit.backends.fsdp.checkpoint import read_meta
from rlkit.backends.fsdp.lora import adapter_files, factor_names, lora_scaling, merged_rows
from rlkit.backends.fsdp.stored import full_state, is_full, stored_tensor, stored_tensors
from rlkit.backends.hf_writer import MAX_FILE_BYTES, HfWriter, copy_companions
from rlkit.backends.loading import CheckpointReader
from rlkit.config.schema import LoraConfig
from rlkit.orchestration.checkpoints import find_checkpoint
from rlkit.types.errors import CheckpointError
from rlkit.types.fingerprints import WEIGHTS
from rlkit.types.weights import WeightSpec

Shape = tuple[int, ...]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True, help="iter_N, or the folder of checkpoints")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--origin-hf-dir", type=Path, required=True, help="the run's --hf-checkpoint")
    parser.add_argument("-f", "--force", action="store_true", help="replace the output folder if it is there")
    parser.add_argument("--max-file-bytes", type=int, default=MAX_FILE_BYTES, help="of one file of weights")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code of --origin-hf-dir")
    args = parser.parse_args(arguments)
    try:
        folder = trainer_folder(args.input_dir)
        source = CheckpointReader(args.origin_hf_dir)
        make_room(args.output_dir, [args.origin_hf_dir, args.input_dir, folder], force=args.force)
        shapes = tensor_shapes(source.path, trust_remote_code=args.trust_remote_code)
        convert(folder, source, args.output_dir, shapes, max_file_bytes=args.max_file_bytes)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def trainer_folder(path: Path) -> Path:
    """Of the checkpoint `path`, of the newest one in it, or `path` itself where it is what a backend wrote."""
    for candidate in (path, path / "trainer"):
        if (candidate / "trainer.json").is_file():
            return candidate
    found = find_checkpoint(path)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint of a training run (iter_0000000/...)")
    return found.trainer_dir


def make_room(output: Path, sources: list[Path], *, force: bool) -> None:
    """CheckpointError where something is in the way that must not be, or may not be, deleted."""
    target = output.resolve()
    for source in sources:
        if target == source.resolve() or target in source.resolve().parents:
            raise CheckpointError(f"refusing to write over {source}; choose another --output-dir")
    if output.exists() and any(output.iterdir()):
        if not force:
            raise CheckpointError(f"{output} is not empty; pass --force to replace it")
        shutil.rmtree(output)


def tensor_shapes(path: Path, *, trust_remote_code: bool) -> dict[str, Shape]:
    """Names and shapes of the architecture's own tensors, tied ones once, in its order."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    temporary = {name for name, _ in model.named_non_persistent_buffers()}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name not in temporary]
    return {name: tuple(tensor.shape) for name, tensor in [*model.named_parameters(), *buffers]}


def convert(
    folder: Path, source: CheckpointReader, output: Path, shapes: dict[str, Shape], *, max_file_bytes: int
) -> None:
    """Write `output`, holding the tensors of one file (and the adapters) in memory."""
    settings = read_meta(folder).lora
    lora = None
    if settings is not None:  # JSON has no tuples
        lora = LoraConfig(**{**settings, "lora_target_modules": tuple(settings["lora_target_modules"])})
    specs = [WeightSpec(name=name, shape=shape, dtype=source.dtype(name)) for name, shape in shapes.items()]
    writer = HfWriter(output, specs, max_file_bytes)
    tensors = trained_tensors(folder, shapes) if lora is None else merged_tensors(folder, source, shapes, lora)
    for name, tensor in tensors:
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, {source.path} implies {shapes[name]}; they do not "
                "belong together"
            )
        writer.add(name, tensor.to(source.dtype(name)))
    writer.finish()
    if lora is not None:
        adapter_files(output / "adapter", _factors(folder), lora, source.path)
    copy_companions(source.path, output)
    print(f"{len(specs)} tensors, {sum(spec.num_bytes for spec in specs) / 1e9:.3f} GB, from {folder}")


def trained_tensors(folder: Path, shapes: dict[str, Shape]) -> Iterator[tuple[str, Tensor]]:
    whole = full_state(folder) if is_full(folder) else None
    for name in shapes:
        key = f"{WEIGHTS}{name}"
        if whole is not None and key not in whole:
            raise CheckpointError(f"{folder} holds no tensor {key}")
        yield name, whole[key] if whole is not None else stored_tensor(folder, key)


def merged_tensors(
    folder: Path, source: CheckpointReader, shapes: dict[str, Shape], lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """The base of `source` with the adapters multiplied out and added, as engines got it."""
    factors = _factors(folder)
    adapted = {factor_names(name)[1] for name in shapes} & factors.keys()
    if 2 * len(adapted) != len(factors):
        raise CheckpointError(
            f"{source.path} lacks layers that have adapters in {folder}: it is not the run's base model"
        )
    for name, shape in shapes.items():
        weight = source.read_rows(name, shape, 0, shape[0] if shape else 1).to(source.dtype(name))
        a, b = factor_names(name)
        yield name, merged_rows(weight, factors[b], factors[a], lora_scaling(lora)) if b in adapted else weight


def _factors(folder: Path) -> dict[str, Tensor]:
    return {name.removeprefix(WEIGHTS): tensor for name, tensor in stored_tensors(folder, WEIGHTS)}


if __name__ == "__main__":
    raise SystemExit(main())
