"""Fingerprints: the same for live tensors, for files, and for any number of ranks; different after any change."""

from pathlib import Path

import pytest
import torch
from fsdp_setup import all_weights, make_config, parts_of, rank_info, start_backend, train_step

from rlkit.backends.fsdp import fingerprint
from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.fingerprint import _mixed_sum, file_fingerprints, sums
from rlkit.types.fingerprints import WORD, differing, merged, weights_digest


def value(tensor: torch.Tensor, start: int = 0) -> int:
    return int(_mixed_sum(tensor, start)) % WORD


def plain_sum(integers: list[int]) -> int:
    """The definition, element by element, in Python's integers."""

    def signed(number: int) -> int:
        number %= WORD
        return number - WORD if number >= WORD // 2 else number

    total = 0
    for index, bits in enumerate(integers):
        mixed = signed(index * 0x1E3779B97F4A7C15 + bits)
        mixed = signed((mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D)
        mixed = signed((mixed ^ (mixed >> 29)) * 0x369DEA0F31A53F85)
        total += mixed
    return total % WORD


def test_it_is_what_the_definition_says():
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0))
    assert value(tensor) == plain_sum(tensor.view(torch.int32).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_parts_add_up_to_the_whole(dtype, monkeypatch):
    """However the rows are dealt, and however large a chunk is."""
    tensor = (torch.randn(11, 7, generator=torch.Generator().manual_seed(1)) * 10).to(dtype)
    whole = merged([{"w": value(tensor)}])
    for cut in (0, 1, 5, 11):
        parts = [{"w": value(tensor[:cut])}, {"w": value(tensor[cut:], cut * 7)}]
        assert merged(parts) == whole, cut
    monkeypatch.setitem(fingerprint.CHUNK, "cpu", 5)
    assert merged([{"w": value(tensor)}]) == whole


def test_any_change_shows():
    tensor = torch.zeros(1000)
    seen = {value(tensor), value(torch.zeros(999)), value(-tensor)}  # -0.0 has other bits
    for index in (0, 1, 999):
        changed = tensor.clone()
        changed[index] = 1e-45  # the lowest bit
        seen.add(value(changed))
    swapped = torch.arange(1000.0)
    seen |= {value(swapped), value(swapped.flip(0))}
    assert len(seen) == 8


def test_an_empty_shard_counts_nothing():
    assert sums({"w": (torch.zeros(0, 4), 12)}) == {"w": 0} and sums({}) == {}


def test_live_tensors_files_and_a_resumed_backend_agree(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = make_config(checkpoints["qwen3"])
    backend = start_backend(cfg)
    before = merged([backend.fingerprint()])
    train_step(backend, cfg, 0)
    live = merged([backend.fingerprint()])
    assert weights_digest(live) != weights_digest(before)
    assert set(all_weights(backend)) <= {name.removeprefix("model.") for name in live}
    backend.save(0, tmp_path / "saved", hf_directory=None)
    assert file_fingerprints(tmp_path / "saved") == live

    second = FsdpBackend()
    second.init(cfg, rank_info(), resume_from=tmp_path / "saved")
    assert merged([second.fingerprint()]) == live
    with torch.no_grad():
        next(iter(parts_of(second).policy.parameters())).to_local().view(-1)[3] += 1e-6
    assert len(differing(live, merged([second.fingerprint()]))) == 1
