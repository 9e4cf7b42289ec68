"""fp8 <-> bfloat16 checkpoints by the tools: values, index, configuration, interruption, memory, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import checkpoint_files
import convert_hf_to_fp8
import fp8_cast_bf16
import pytest
import torch
from checkpoint_files import ConversionError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlkit.algo.fp8 import E4M3, dequantise, quantise
from rlkit.config.errors import ConfigError

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text().split("\n")[:-1])
}
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TOOLS = Path(fp8_cast_bf16.__file__).parent


def write(folder: Path, files: dict[str, dict[str, Tensor]], config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def plain_tensors() -> dict[str, Tensor]:
    """Several pieces to a tensor where `PIECE_BYTES` is small; odd sizes, so that tensors would not be aligned."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    return {
        "lm_head.weight": normal(37, 136),
        "model.embed_tokens.weight": normal(37, 136),
        "model.layers.0.input_layernorm.weight": normal(136),
        "model.layers.0.mlp.gate.weight": normal(5, 136),
        "model.layers.0.mlp.experts.0.up_proj.weight": normal(1001, 136),
        "model.layers.0.mlp.experts.0.down_proj.weight": normal(136, 1001),
        "model.layers.0.self_attn.o_proj.weight": normal(136, 63),
        "model.layers.0.flag": torch.tensor([True, False, True]),
        "model.layers.0.scalar": torch.tensor(3, dtype=torch.int64),
        "model.layers.0.empty": torch.zeros(0, 4),
    }


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    tensors = plain_tensors()
    names = list(tensors)
    files = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:5]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[5:]},
    }
    return write(tmp_path / "plain", files, {"model_type": "qwen3_moe", "hidden_size": 136})


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 50_000)


QUANTISED = {name for name in plain_tensors() if "_proj" in name}


@pytest.mark.parametrize("is_ue8m0", [False, True])
def test_there_and_back(plain, tmp_path, small_pieces, is_ue8m0):
    before, tensors = state(plain), plain_tensors()
    convert_hf_to_fp8.convert(plain, tmp_path / "fp8", exclude=["o_proj"], is_ue8m0=is_ue8m0, num_workers=2)
    convert_hf_to_fp8.verify(plain, tmp_path / "fp8")
    made = read(tmp_path / "fp8")
    chosen = QUANTISED - {"model.layers.0.self_attn.o_proj.weight"}
    assert made.keys() == tensors.keys() | {f"{name}_scale_inv" for name in chosen}
    for name, tensor in tensors.items():
        if name in chosen:
            values, scale = quantise(tensor, power_of_two=is_ue8m0)
            assert torch.equal(made[name].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(made[f"{name}_scale_inv"], scale)
        else:
            assert made[name].dtype == tensor.dtype and torch.equal(made[name], tensor)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [
            *("lm_head", "model.embed_tokens", "model.layers.0.empty", "model.layers.0.mlp.gate"),
            "model.layers.0.self_attn.o_proj",
        ],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    } | ({"scale_fmt": "ue8m0"} if is_ue8m0 else {})

    fp8_cast_bf16.cast(tmp_path / "fp8", tmp_path / "back", num_workers=2)
    fp8_cast_bf16.verify(tmp_path / "fp8", tmp_path / "back")
    back = read(tmp_path / "back")
    assert back.keys() == tensors.keys()
    for name in chosen:
        assert torch.equal(back[name], dequantise(made[name], made[f"{name}_scale_inv"]))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(before["config.json"])
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads(before["model.safetensors.index.json"])["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert (tmp_path / "back" / "tokenizer.json").exists()
    assert state(plain) == before


def test_fc_02_missing_scales_scales_elsewhere_and_other_bytes(tmp_path, capsys):
    case = CASES["fc-02"]
    scale = torch.tensor(case["input"]["shard2"]["a.weight_scale_inv"].removeprefix("float32 ") and [[0.5]])
    files = {
        "model-00001-of-00002.safetensors": {
            "a.weight": torch.tensor([[2.0, 4.0], [8.0, 16.0]]).to(E4M3),
            "b.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(E4M3),
            "m.mask": torch.tensor([True, False]),
            "n.idx": torch.tensor([7, -3], dtype=torch.int8),
            "norm.weight": torch.ones(2, dtype=torch.bfloat16),
        },
        "model-00002-of-00002.safetensors": {"a.weight_scale_inv": scale},
    }
    source = write(tmp_path / "source", files, case["input"]["config.json"])
    before, expected = state(source), case["expected"]
    fp8_cast_bf16.cast(source, tmp_path / "target", num_workers=2)
    fp8_cast_bf16.verify(source, tmp_path / "target")
    found = read(tmp_path / "target")
    names = {"bf16": torch.bfloat16, "bool": torch.bool, "int8": torch.int8}
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: names[dtype] for name, dtype in expected["dtypes"].items()
    }
    assert found["a.weight"].tolist() == expected["a.weight"]
    assert found["b.weight"].tolist() == expected["b.weight"]
    assert torch.equal(found["m.mask"], files["model-00001-of-00002.safetensors"]["m.mask"])
    assert torch.equal(found["n.idx"], files["model-00001-of-00002.safetensors"]["n.idx"])
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and all(name in warnings[0] for name in expected["warning_for"])
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert ("quantization_config" in config) == expected["config_has_quantization_config"]
    weight_map = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum(name.endswith("scale_inv") for name in weight_map) == expected["index_keys_ending_scale_inv"]
    assert (state(source) == before) == expected["source_dir_untouched"]


def test_an_interrupted_conversion_goes_on(plain, tmp_path, monkeypatch, small_pieces):
    fp8 = tmp_path / "fp8"
    whole = quantise

    def fails_in_the_second_file(weight: Tensor, **options):
        if weight.shape[1] == 1001:
            raise ValueError("the power went")
        return whole(weight, **options)

    monkeypatch.setattr(convert_hf_to_fp8, "quantise", fails_in_the_second_file)
    options = {"exclude": [], "is_ue8m0": False, "num_workers": 2}
    with pytest.raises(ConversionError, match=r"down_proj.weight, from row \d+ on: the power went"):
        convert_hf_to_fp8.convert(plain, fp8, **options)
    assert [path.name for path in fp8.iterdir()] == ["model-00001-of-00002.safetensors"]
    first = (fp8 / "model-00001-of-00002.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(convert_hf_to_fp8, "quantise", whole)
    conversion = convert_hf_to_fp8.convert(plain, fp8, **options)
    assert conversion.num_kept == 1
    assert (fp8 / "model-00001-of-00002.safetensors").stat().st_mtime_ns == first
    convert_hf_to_fp8.verify(plain, fp8)
    assert convert_hf_to_fp8.convert(plain, fp8, **options).num_kept == 2
    # a source that has changed since is converted again
    changed = plain / "model-00001-of-00002.safetensors"
    save_file({name: tensor * 2 for name, tensor in read_file(changed).items()}, changed, metadata={"format": "pt"})
    assert convert_hf_to_fp8.convert(plain, fp8, **options).num_kept == 1
    convert_hf_to_fp8.verify(plain, fp8)


def read_file(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("tool", ["cast", "quantise"])
def test_verify_finds_one_wrong_byte(plain, tmp_path, tool):
    fp8, back = tmp_path / "fp8", tmp_path / "back"
    convert_hf_to_fp8.convert(plain, fp8, exclude=[], is_ue8m0=False, num_workers=1)
    fp8_cast_bf16.cast(fp8, back, num_workers=1)
    folder = back if tool == "cast" else fp8
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    place = checkpoint_files.read_places(folder)[name]
    with place.file.open("r+b") as file:
        file.seek(place.start + place.num_bytes - 3)
        byte = file.read(1)[0]
        file.seek(place.start + place.num_bytes - 3)
        file.write(bytes([byte ^ 0x40]))
    with pytest.raises(ConversionError, match=rf"1 of 10 tensors are wrong; the first is {name}: rows"):
        if tool == "cast":
            fp8_cast_bf16.verify(fp8, back)
        else:
            convert_hf_to_fp8.verify(plain, fp8)


@pytest.mark.parametrize(
    "quantization, message",
    [
        (None, "has no quantization_config"),
        ({"quant_method": "fp8"}, "one scale a tensor"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"quant_method": "gptq", "bits": 4}, r"quantised as gptq \(4 bits\)"),
    ],
)
def test_what_cannot_be_cast(tmp_path, quantization, message):
    config = {"quantization_config": quantization} if quantization else {}
    source = write(tmp_path / "source", {"model.safetensors": {"a.weight": torch.ones(2, 2)}}, config)
    with pytest.raises((ConversionError, ConfigError), match=message):
        fp8_cast_bf16.cast(source, tmp_path / "target", num_workers=1)
    assert not (tmp_path / "target").exists()


def test_other_refusals(plain, tmp_path):
    with pytest.raises(ConversionError, match="cannot replace its source"):
        convert_hf_to_fp8.convert(plain, plain, exclude=[], is_ue8m0=False, num_workers=1)
    bad = {"a.weight": torch.ones(2, 2).to(E4M3), "a.weight_scale_inv": torch.ones(2, 2)}
    source = write(tmp_path / "bad", {"model.safetensors": bad}, {"quantization_config": FP8_CONFIG})
    with pytest.raises(ConversionError, match=r"a.weight_scale_inv is F32 \[2, 2\], which are no scales"):
        fp8_cast_bf16.cast(source, tmp_path / "target", num_workers=1)
    (plain / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConversionError, match=r"model-00002-of-00002.safetensors is missing"):
        convert_hf_to_fp8.convert(plain, tmp_path / "target", exclude=[], is_ue8m0=False, num_workers=1)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensor(tmp_path):
    """A process that casts 256 MB in one tensor stays within 100 MB of one that casts 1 MB."""

    def peak_mib(rows: int) -> float:
        values = torch.ones(rows, 8192).to(E4M3)
        tensors = {"a.weight": values, "a.weight_scale_inv": torch.ones(rows // 128, 64)}
        source = write(tmp_path / f"{rows}", {"model.safetensors": tensors}, {"quantization_config": FP8_CONFIG})
        code = (
            "import resource, runpy, sys; sys.argv[0] = sys.argv.pop(1); sys.path.insert(0, sys.argv.pop(1))\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
        )
        argv = [sys.executable, "-c", code, str(TOOLS / "fp8_cast_bf16.py"), str(TOOLS), "--verify"]
        argv += ["--input-fp8-hf-path", str(source), "--output-bf16-hf-path", str(tmp_path / f"{rows}-bf16")]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=TOOLS.parent)
        assert "1 tensors verified" in done.stderr
        return float(done.stdout)

    assert peak_mib(32768) < peak_mib(128) + 100
