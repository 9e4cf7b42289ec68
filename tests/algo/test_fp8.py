"""Block quantisation against the formula written out value by value, and its edges."""

import json
import math
from pathlib import Path

import pytest
import torch
from fp8_cases import not_finite, weights
from torch import Tensor

from rlkit.algo.fp8 import E4M3, LARGEST_SCALE, dequantise, dequantised, grid, quantise

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parents[1] / "data" / "cases.jsonl").read_text().split("\n")[:-1])
}

E4M3_VALUES = sorted(
    {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
    | {m / 8 * 2.0**-6 for m in range(8)}
)
"""Every magnitude that e4m3 has, from its definition: 4 exponent bits with bias 7, 3 of mantissa, no infinity."""


def nearest_e4m3(value: float) -> float:
    """Ties to the even neighbour, which is the one at an even place of the sorted magnitudes."""
    magnitude = min(abs(value), 448.0)
    best = min(range(len(E4M3_VALUES)), key=lambda k: (abs(E4M3_VALUES[k] - magnitude), k % 2))
    return math.copysign(E4M3_VALUES[best], value)


def slow(weight: Tensor, block: tuple[int, int], *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """(values as float32, scales), one block and one value at a time. float32 where the format says so: the scale and
    the quotient are rounded to it, everything else is exact."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns)
    scale = torch.empty(grid(weight.shape, block))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            amax = float(weight[part].float().abs().max())
            s = max(float(torch.tensor(amax / 448.0, dtype=torch.float32)), 2.0**-126) if amax else 1.0
            if power_of_two:
                s = 2.0 ** math.ceil(math.log2(s))
            scale[i, j] = s
            quotient = (weight[part].double() / s).float()
            values[part] = torch.tensor([[nearest_e4m3(float(v)) for v in row] for row in quotient]).float()
    return values, scale


SMALL = {name: weight[:40, :50] for name, weight in weights().items() if weight.numel()}


@pytest.mark.parametrize("power_of_two", [False, True], ids=["any scale", "power of two"])
@pytest.mark.parametrize("weight", SMALL.values(), ids=SMALL)
def test_values_and_scales_are_those_of_the_formula(weight, power_of_two):
    block = (16, 24)
    values, scale = quantise(weight, block=block, power_of_two=power_of_two)
    expected_values, expected_scale = slow(weight, block, power_of_two=power_of_two)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(values.float(), expected_values)
    back = dequantise(values, scale, block=block, dtype=torch.float32)
    expanded = expected_scale.repeat_interleave(16, 0).repeat_interleave(24, 1)[: weight.shape[0], : weight.shape[1]]
    assert torch.equal(back, expected_values * expanded)


@pytest.mark.parametrize("weight", weights().values(), ids=weights())
def test_the_error_is_within_half_a_step_of_e4m3(weight):
    values, scale = quantise(weight)
    assert values.dtype == E4M3 and values.shape == weight.shape
    assert scale.dtype == torch.float32 and tuple(scale.shape) == grid(weight.shape)
    assert scale.isfinite().all() and (scale > 0).all()
    back = dequantise(values, scale, dtype=torch.float32)
    exact = weight.double()
    expanded = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    expanded = expanded[: weight.shape[0], : weight.shape[1]]
    # half a unit of three mantissa bits, or half a subnormal step of the block; float32 rounding beside it
    bound = torch.maximum(exact.abs() * 2.0**-4, expanded * 2.0**-10) * (1 + 2.0**-20) + 2.0**-149
    assert ((back.double() - exact).abs() <= bound).all()


def test_a_second_time_changes_no_value():
    """Weights that came from fp8 go back to the same values: a run's first update gives engines what they have."""
    values, scale = quantise(weights()["whole blocks"])
    again, scale_again = quantise(dequantise(values, scale, dtype=torch.float32))
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    assert torch.allclose(scale_again, scale, rtol=2.0**-22, atol=0)


def test_every_byte_is_read_as_e4m3():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    bytes_ = bytes_[(bytes_ & 0x7F) != 0x7F].view(1, -1)
    scale = torch.tensor([[1.0, 0.75]])
    plain = bytes_.view(E4M3).float()
    plain[:, 128:] *= 0.75
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(dequantise(bytes_.view(E4M3), scale, dtype=dtype), plain.to(dtype))


@pytest.mark.parametrize("weight", not_finite().values(), ids=not_finite())
def test_not_finite_is_refused_with_its_place(weight):
    with pytest.raises(ValueError, match="rows 256 to 383, columns 128 to 255 is NaN, infinite or too large"):
        quantise(weight)
    _, scale = quantise(weight, check=False)
    assert (~(scale <= LARGEST_SCALE)).nonzero().tolist() == [[2, 1]]
    _, scale = quantise(weight, check=False, power_of_two=True)
    assert (~(scale <= LARGEST_SCALE)).nonzero().tolist() == [[2, 1]]


def test_what_cannot_be_dequantised():
    values, scale = quantise(torch.ones(130, 256))
    with pytest.raises(ValueError, match=r"scales \[2, 2\], got \[1, 2\]"):
        dequantise(values, scale[:1])
    with pytest.raises(ValueError, match="a scale is not in"):
        dequantise(values, torch.where(scale > 0, torch.nan, scale))
    with pytest.raises(ValueError, match="a scale is not in"):
        dequantise(values, scale * 0)
    with pytest.raises(ValueError, match="a scale is not in"):
        dequantise(values, torch.full_like(scale, 2 * LARGEST_SCALE))
    for code in (0x7F, 0xFF):
        broken = values.clone()
        broken.view(torch.uint8)[129, 255] = code
        with pytest.raises(ValueError, match="NaN among the e4m3 values"):
            dequantise(broken, scale)
    with pytest.raises(ValueError, match=r"need a matrix, the shape is \[4\]"):
        quantise(torch.ones(4))


@pytest.mark.parametrize("first, count", [(0, 300), (0, 128), (5, 200), (127, 2), (128, 1), (299, 1), (130, 0)])
def test_rows_of_a_weight(first, count):
    """A rank reads its own rows, which need not begin with a block."""
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    values, scale = quantise(weight)
    whole = dequantise(values, scale)
    rows = scale[first // 128 : -(-(first + count) // 128) if count else first // 128]
    assert torch.equal(dequantise(values[first : first + count], rows, first_row=first), whole[first : first + count])


def test_fc_01_a_block_of_zeros_and_ragged_edges():
    case = CASES["fc-01"]
    weight = torch.tensor(case["input"]["weight_4x6"])
    block, expected = tuple(case["input"]["block"]), case["expected"]
    values, scale = quantise(weight, block=block)
    assert list(scale.shape) == expected["scale_shape"]
    for i, row in enumerate(expected["scales"]):
        for j, value in enumerate(row):
            if isinstance(value, float):
                assert scale[i, j].item() == pytest.approx(value, abs=case["tolerance"])
            else:
                assert 0 < scale[i, j].item() < math.inf
    assert values.float().tolist() == expected["quantised"]
    back = dequantise(values, scale, block=block, dtype=torch.float32)
    wanted = weight.clone()
    wanted[1, 3] = expected["dequantised_equals_weight_except"]["[1][3]"]
    assert torch.allclose(back, wanted, rtol=0, atol=case["tolerance"])
    assert int(back.isnan().sum()) == expected["nan_count"]


def test_pairs_are_put_together_in_any_order():
    a, b = quantise(torch.full((2, 3), 0.5)), quantise(torch.full((4, 4), 2.0))
    norm = torch.ones(3)
    stream = [("b.weight_scale_inv", b[1]), ("a.weight", a[0]), ("norm.weight", norm), ("b.weight", b[0])]
    stream.append(("a.weight_scale_inv", a[1]))
    found = dict(dequantised(stream))
    assert list(found) == ["norm.weight", "b.weight", "a.weight"]
    assert found["norm.weight"] is norm
    assert torch.equal(found["a.weight"], torch.full((2, 3), 0.5))
    assert torch.equal(found["b.weight"], torch.full((4, 4), 2.0))


@pytest.mark.parametrize(
    "left_out, message", [("a.weight_scale_inv", "a.weight has no scales"), ("a.weight", "a.weight_scale_inv has no")]
)
def test_half_a_pair_is_refused(left_out, message):
    values, scale = quantise(torch.ones(2, 2))
    both = {"a.weight": values, "a.weight_scale_inv": scale}
    with pytest.raises(ValueError, match=message):
        list(dequantised((name, tensor) for name, tensor in both.items() if name != left_out))
    with pytest.raises(ValueError, match=r"a.weight: \[2, 2\]"):
        list(dequantised([("a.weight", values), ("a.weight_scale_inv", torch.ones(2, 1))]))
