"""Hugging Face -> torch's distributed format -> Hugging Face, by one process and by two, and both backends start from
what is between."""

import json
import os
import subprocess
import sys
from pathlib import Path

import convert_hf_to_torch_dist
import convert_torch_dist_to_hf
import pytest
import torch
from checkpoint_files import ConversionError, Place
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlkit.algo.fp8 import dequantise, quantise
from rlkit.orchestration.checkpoints import find_checkpoint, verify

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text().split("\n")[:-1])
}
TOOL = Path(convert_hf_to_torch_dist.__file__)


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (151, 8),
        "lm_head.weight": (151, 8),
        "model.norm.weight": (8,),
        "model.layers.0.mlp.experts.0.up_proj.weight": (16, 8),
        "model.layers.0.mlp.experts.1.up_proj.weight": (16, 8),
        "model.layers.1.eh_proj.weight": (8, 16),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    found = tensors()
    files = {f"model-0000{i + 1}-of-00002.safetensors": list(found)[i::2] for i in range(2)}
    for file, names in files.items():
        save_file({name: found[name] for name in names}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "vocab_size": 151}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_there_and_back(origin, tmp_path, num_ranks):
    argv = ["--hf-checkpoint", str(origin), "--save", str(tmp_path / "ckpt")]
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1])}
    subprocess.run([*launcher, str(TOOL), *argv], check=True, env=environment, cwd=TOOL.parents[1])
    checkpoint = find_checkpoint(tmp_path / "ckpt")
    assert checkpoint is not None and checkpoint.meta.world_size == num_ranks
    verify(checkpoint)
    data = {path.name.split("_")[2] for path in (checkpoint.trainer_dir / "dcp").glob("__*.distcp")}
    assert len(data) == num_ranks or num_ranks == 1
    folder = checkpoint.trainer_dir
    convert_torch_dist_to_hf.convert(folder, origin, tmp_path / "back", add_missing=False)
    convert_torch_dist_to_hf.verify(folder, origin, tmp_path / "back")
    assert same(read(tmp_path / "back"), tensors())
    again = convert_torch_dist_to_hf.convert(folder, origin, tmp_path / "back", add_missing=False)
    assert again.num_kept == 2
    for name in ("model.safetensors.index.json", "config.json"):
        assert (tmp_path / "back" / name).exists()
    assert (
        json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())["weight_map"]
        == json.loads((origin / "model.safetensors.index.json").read_text())["weight_map"]
    )


def test_fp8_becomes_bfloat16(tmp_path):
    folder = tmp_path / "fp8"
    folder.mkdir()
    values, scale = quantise(torch.randn(150, 130, generator=torch.Generator().manual_seed(1)))
    save_file({"a.weight": values, "a.weight_scale_inv": scale}, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    convert_hf_to_torch_dist.convert(folder, tmp_path / "ckpt")
    trainer = tmp_path / "ckpt" / "iter_0000000" / "trainer"
    convert_torch_dist_to_hf.convert(trainer, folder, tmp_path / "back", add_missing=False)
    assert same(read(tmp_path / "back"), {"a.weight": dequantise(values, scale)})
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    with pytest.raises(ConversionError, match="is there already"):
        convert_hf_to_torch_dist.convert(folder, tmp_path / "ckpt")


def test_tensors_that_the_trainer_lacks(origin, tmp_path):
    """A trainer without the layer that only drafts."""
    less = tmp_path / "less"
    less.mkdir()
    kept = {name: tensor * 2 for name, tensor in tensors().items() if "eh_proj" not in name}
    save_file(kept, less / "model.safetensors")
    (less / "config.json").write_text("{}")
    convert_hf_to_torch_dist.convert(less, tmp_path / "ckpt")
    trainer = tmp_path / "ckpt" / "iter_0000000" / "trainer"
    with pytest.raises(ConversionError, match=r"lacks 1 tensors of .*, the first is model.layers.1.eh_proj.weight"):
        convert_torch_dist_to_hf.convert(trainer, origin, tmp_path / "out", add_missing=False)
    convert_torch_dist_to_hf.convert(trainer, origin, tmp_path / "out", add_missing=True)
    convert_torch_dist_to_hf.verify(trainer, origin, tmp_path / "out")
    missing = {"model.layers.1.eh_proj.weight": tensors()["model.layers.1.eh_proj.weight"]}
    assert same(read(tmp_path / "out"), kept | missing)
    with pytest.raises(ConversionError, match="holds 5 tensors that"):
        other = tmp_path / "other"
        other.mkdir()
        save_file({"z": torch.ones(2)}, other / "model.safetensors")
        (other / "config.json").write_text("{}")
        convert_torch_dist_to_hf.convert(trainer, other, tmp_path / "out2", add_missing=True)


def test_tensors_are_dealt_by_bytes():
    places = [
        Place(name=str(i), dtype="F32", shape=(size,), file=Path("f"), start=0, num_bytes=4 * size)
        for i, size in enumerate([1, 9, 3, 5, 2, 4])
    ]
    shares = convert_hf_to_torch_dist.dealt(places, 3)
    assert sorted(place.name for share in shares for place in share) == sorted(str(i) for i in range(6))
    assert [sum(place.num_bytes for place in share) // 4 for share in shares] == [9, 8, 7] or max(
        sum(place.num_bytes for place in share) for share in shares
    ) == 36


@pytest.mark.parametrize("which", range(3))
def test_fc_04_padding_of_the_vocabulary_never_leaves_the_ranks(origin, tmp_path, which):
    """The Megatron backend pads rows to a multiple of the tensor-parallel ranks, and keeps the padding to itself."""
    pytest.importorskip("megatron.core")
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from rlkit.backends.megatron.checkpoint import _SaveBlocks, block_of
    from rlkit.backends.megatron.names import Piece, padded_rows
    from rlkit.backends.megatron.parallel import Axis

    case = CASES["fc-04"]
    vocab, hidden, ranks = case["input"]["hf_vocab"], case["input"]["hidden"], case["input"]["tp_sizes"][which]
    whole = torch.arange(float(vocab))[:, None].repeat(1, hidden)
    rows = padded_rows(vocab, ranks)
    assert rows * ranks >= vocab
    padded = torch.cat([whole, torch.zeros(rows * ranks - vocab, hidden)])
    folder = tmp_path / "trainer"
    blocks = {}
    for rank in range(ranks):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            axis = Axis(group=None, rank=rank, size=ranks)  # pyright: ignore[reportArgumentType]
            piece = Piece(name=name, shape=(vocab, hidden), axis=0)
            block = block_of(piece, axis, padded[rank * rows : (rank + 1) * rows])
            if block is not None:
                blocks.setdefault(f"model.{name}", []).append(block)
    assert all(sum(len(block.tensor) for block in parts) == vocab for parts in blocks.values())
    whole_of = {name: torch.cat([block.tensor for block in parts]) for name, parts in blocks.items()}
    single = {
        name: block_of(
            Piece(name=name, shape=(vocab, hidden), axis=None),
            Axis(group=None, rank=0, size=1),  # pyright: ignore[reportArgumentType]
            tensor,
        )
        for name, tensor in whole_of.items()
    }
    save({}, storage_writer=FileSystemWriter(folder / "dcp"), planner=_SaveBlocks(single), no_dist=True)
    convert_torch_dist_to_hf.convert(folder, origin, tmp_path / "out", add_missing=True)
    found = read(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].shape[0] == case["expected"]["exported_rows"][which]
        assert torch.equal(found[name].float(), whole)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == case["expected"]["config_vocab_size"]
