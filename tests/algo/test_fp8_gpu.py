"""The Triton kernels give the bits of the torch code."""

import pytest
import torch
from fp8_cases import not_finite, weights

from rlkit.algo.fp8 import dequantise, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs e4m3 in hardware"
    ),
]


@pytest.mark.parametrize("power_of_two", [False, True], ids=["any scale", "power of two"])
@pytest.mark.parametrize("weight", weights().values(), ids=weights())
def test_quantise_bit_for_bit(weight, power_of_two):
    values, scale = quantise(weight, power_of_two=power_of_two)
    on_gpu, scale_on_gpu = quantise(weight.cuda(), power_of_two=power_of_two)
    assert torch.equal(scale_on_gpu.cpu().view(torch.int32), scale.view(torch.int32))
    assert torch.equal(on_gpu.cpu().view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight", weights().values(), ids=weights())
def test_dequantise_bit_for_bit(weight, dtype):
    values, scale = quantise(weight)
    expected = dequantise(values, scale, dtype=dtype)
    assert torch.equal(dequantise(values.cuda(), scale.cuda(), dtype=dtype).cpu(), expected)


def test_every_byte_and_a_hundred_scales():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes[torch.randint(len(codes), (1280, 1280), generator=torch.Generator().manual_seed(0))]
    scale = torch.logspace(-37, 34, 100).view(10, 10)
    for dtype in (torch.float32, torch.bfloat16):
        expected = dequantise(values.view(torch.float8_e4m3fn), scale, dtype=dtype)
        found = dequantise(values.cuda().view(torch.float8_e4m3fn), scale.cuda(), dtype=dtype).cpu()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("weight", not_finite().values(), ids=not_finite())
def test_not_finite_is_refused(weight):
    with pytest.raises(ValueError, match="rows 256 to 383, columns 128 to 255 is NaN, infinite or too large"):
        quantise(weight.cuda())


def test_nan_values_are_refused():
    values, scale = quantise(torch.ones(130, 256, device="cuda"))
    values.view(torch.uint8)[129, 255] = 0xFF
    with pytest.raises(ValueError, match="NaN among the e4m3 values"):
        dequantise(values, scale)
