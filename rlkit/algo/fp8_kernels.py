"""`fp8.py` on a GPU, by Triton: one program a block of 128 x 128, one pass over memory, the same bits as the torch code
(tests/algo/test_fp8_gpu.py).

Division is the correctly rounded one: Triton's own `/` is an approximation and would change some bits. Loaded only on a
GPU, so that a CPU needs no Triton.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

NUM_WARPS = 8


@triton.jit
def _quantise_kernel(
    weight_ptr,
    values_ptr,
    scale_ptr,
    num_rows,
    num_columns,
    row_stride,
    power_of_two: tl.constexpr,
    block: tl.constexpr,
):
    j, i = tl.program_id(0), tl.program_id(1)  # neighbours read on along the same rows
    row = i.to(tl.int64) * block + tl.arange(0, block)[:, None]
    column = j * block + tl.arange(0, block)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    x = tl.load(weight_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    magnitude = tl.abs(x)
    # false for NaN too, which a maximum may leave out
    is_finite = tl.min(tl.min((magnitude <= 3.4028234663852886e38).to(tl.int32), axis=1), axis=0)
    amax = tl.max(tl.max(magnitude, axis=1), axis=0)
    scale = tl.maximum(tl.div_rn(amax, 448.0), 1.1754943508222875e-38)
    scale = tl.where(amax == 0.0, 1.0, scale)
    if power_of_two:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    y = tl.div_rn(x, tl.zeros_like(x) + scale)
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    tl.store(values_ptr + row * num_columns + column, y.to(tl.float8e4nv), mask=inside)
    scale = tl.where(is_finite == 1, scale, float("nan"))
    tl.store(scale_ptr + i * tl.num_programs(0) + j, scale)


@triton.jit
def _dequantise_kernel(
    values_ptr,
    scale_ptr,
    out_ptr,
    has_nan_ptr,
    num_rows,
    num_columns,
    row_stride,
    block: tl.constexpr,
):
    j, i = tl.program_id(0), tl.program_id(1)  # neighbours read on along the same rows
    row = i.to(tl.int64) * block + tl.arange(0, block)[:, None]
    column = j * block + tl.arange(0, block)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    scale = tl.load(scale_ptr + i * tl.num_programs(0) + j)
    codes = tl.load(values_ptr + row * row_stride + column, mask=inside, other=0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    is_nan = tl.max(tl.max((values != values).to(tl.int32), axis=1), axis=0)
    if is_nan == 1:
        tl.store(has_nan_ptr, 1)
    out = values * scale
    tl.store(out_ptr + row * num_columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def quantise_blocks(weight_MN: Tensor, values_MN: Tensor, scale_mn: Tensor, *, power_of_two: bool) -> None:
    """Fill `values_MN` and `scale_mn`, both contiguous. Does not wait; a block that is not finite has the scale NaN."""
    rows, columns = weight_MN.shape
    if scale_mn.numel() == 0:
        return
    assert values_MN.is_contiguous() and scale_mn.is_contiguous()
    weight_MN = weight_MN if weight_MN.stride(1) == 1 else weight_MN.contiguous()
    with torch.cuda.device(weight_MN.device):
        launch: Any = _quantise_kernel[scale_mn.shape[1], scale_mn.shape[0]]  # pyright: ignore[reportIndexIssue]
        launch(
            weight_MN,
            values_MN,
            scale_mn,
            rows,
            columns,
            weight_MN.stride(0),
            power_of_two=power_of_two,
            block=128,
            num_warps=NUM_WARPS,
        )


def dequantise_blocks(values_MN: Tensor, scale_mn: Tensor, out_MN: Tensor) -> Tensor:
    """Fill `out_MN`, contiguous. Does not wait; what comes back, int32 [1], is 1 if there was a NaN."""
    rows, columns = values_MN.shape
    has_nan = torch.zeros(1, dtype=torch.int32, device=values_MN.device)
    if scale_mn.numel() == 0:
        return has_nan
    assert out_MN.is_contiguous()
    values_MN = values_MN if values_MN.stride(1) == 1 else values_MN.contiguous()
    with torch.cuda.device(values_MN.device):
        launch: Any = _dequantise_kernel[scale_mn.shape[1], scale_mn.shape[0]]  # pyright: ignore[reportIndexIssue]
        launch(
            values_MN.view(torch.uint8),
            scale_mn.contiguous(),
            out_MN,
            has_nan,
            rows,
            columns,
            values_MN.stride(0),
            block=128,
            num_warps=NUM_WARPS,
        )
    return has_nan
