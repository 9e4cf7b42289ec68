"""Weights in fp8 (e4m3) with a float32 scale for each block of 128 x 128: the format of DeepSeek-V3's checkpoints
(DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2; there `weight_scale_inv` is what one multiplies by).

A block's scale is its largest magnitude / 448; a weight is divided by it, rounded to the nearest e4m3 (ties to even)
and clipped to +-448. On GPUs that Triton knows fp8 on, `fp8_kernels.py` does the same with the same bits.

Shapes: M x N a weight, m x n its blocks: m = ceil(M / 128), n = ceil(N / 128).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlkit.config.quantization import SCALE_SUFFIX

BLOCK = (128, 128)
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: where amax / 448 would be smaller, the block keeps fewer bits instead."""
LARGEST_SCALE = 2.0**119
"""448 times this is still a float32: 2.98e38, the largest weight that can be quantised."""

Quantised = tuple[Tensor, Tensor]
"""e4m3 [M, N], float32 scales [m, n]"""


def grid(shape: tuple[int, ...] | torch.Size, block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """(m, n): blocks of a weight. ValueError unless it is a matrix."""
    if len(shape) != 2:
        raise ValueError(f"blocks need a matrix, the shape is {list(shape)}")
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def quantise(
    weight_MN: Tensor,
    *,
    block: tuple[int, int] = BLOCK,
    power_of_two: bool = False,
    out: Quantised | None = None,
    check: bool = True,
) -> Quantised:
    """e4m3 values and scales, into `out` where given. Any floating dtype, any M and N; a block of zeros has scale 1.

    `power_of_two` rounds scales up to powers of two (`scale_fmt` ue8m0). ValueError where a weight is NaN, infinite or
    beyond 2.98e38; without `check`, which on a GPU waits for the result, such a block has a scale that is NaN or larger
    than `LARGEST_SCALE`.
    """
    m, n = grid(weight_MN.shape, block)
    if out is None:
        values_MN = torch.empty(weight_MN.shape, dtype=E4M3, device=weight_MN.device)
        out = values_MN, torch.empty(m, n, dtype=torch.float32, device=weight_MN.device)
    if block == BLOCK and _has_kernels(weight_MN):
        from rlkit.algo.fp8_kernels import quantise_blocks

        quantise_blocks(weight_MN, *out, power_of_two=power_of_two)
    else:
        _quantise_stripes(weight_MN, *out, block=block, power_of_two=power_of_two)
    if check and not bool((out[1] <= LARGEST_SCALE).all()):
        row, column = (~(out[1] <= LARGEST_SCALE)).nonzero()[0].tolist()
        raise ValueError(
            f"a weight in rows {row * block[0]} to {(row + 1) * block[0] - 1}, columns {column * block[1]} to"
            f" {(column + 1) * block[1] - 1} is NaN, infinite or too large"
        )
    return out


def _quantise_stripes(
    weight_MN: Tensor, values_MN: Tensor, scale_mn: Tensor, *, block: tuple[int, int], power_of_two: bool
) -> None:
    """One row of blocks at a time: it stays in the cache, and bounds the float32 copy."""
    rows, columns = block
    m, n = scale_mn.shape
    num_columns = weight_MN.shape[1]
    for i in range(m):
        stripe = weight_MN[i * rows : (i + 1) * rows].float()
        padded = _padded(stripe, n * columns)
        tiles = padded.view(stripe.shape[0], n, columns)
        scale_n = _scales(tiles.abs().amax(dim=(0, 2)), power_of_two=power_of_two)
        scale_mn[i] = scale_n
        rounded = (tiles / scale_n[None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).view(padded.shape)
        values_MN[i * rows : (i + 1) * rows] = rounded[:, :num_columns].to(E4M3)


def _scales(amax_n: Tensor, *, power_of_two: bool) -> Tensor:
    """Of blocks with these largest magnitudes; not finite where those are not."""
    scale_n = torch.where(amax_n == 0, 1.0, (amax_n / E4M3_MAX).clamp_min(SMALLEST_SCALE))
    if power_of_two:  # a mantissa other than 0 carries into the exponent
        rounded = scale_n.view(torch.int32).add(0x7FFFFF).bitwise_and(0x7F800000).view(torch.float32)
        scale_n = torch.where(scale_n.isfinite(), rounded, scale_n)
    return scale_n


def dequantise(
    values_MN: Tensor,
    scale_mn: Tensor,
    *,
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.bfloat16,
    first_row: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """float32(value) x scale, rounded once to `dtype`. `first_row`: where these rows begin in the whole weight, whose
    block row `first_row // 128` then comes first in `scale_mn`.

    ValueError for scales of another grid, scales that no weight can have, and NaN among the values.
    """
    skipped = first_row % block[0]
    expected = grid((values_MN.shape[0] + (skipped if values_MN.shape[0] else 0), values_MN.shape[1]), block)
    if values_MN.dtype != E4M3 or tuple(scale_mn.shape) != expected:
        raise ValueError(
            f"{list(values_MN.shape)} {values_MN.dtype} in blocks of {list(block)} has scales {list(expected)}, "
            f"got {list(scale_mn.shape)}"
        )
    if scale_mn.numel() and not bool(((scale_mn > 0) & (scale_mn <= LARGEST_SCALE)).all()):
        raise ValueError(f"a scale is not in (0, {LARGEST_SCALE:.3g}]")
    if out is None:
        out = torch.empty(values_MN.shape, dtype=dtype, device=values_MN.device)
    if block == BLOCK and skipped == 0 and _has_kernels(values_MN):
        from rlkit.algo.fp8_kernels import dequantise_blocks

        has_nan = bool(dequantise_blocks(values_MN, scale_mn.float(), out).item())
    else:
        has_nan = _dequantise_stripes(values_MN, scale_mn.float(), out, block=block, skipped=skipped)
    if has_nan:
        raise ValueError("NaN among the e4m3 values")
    return out


def _dequantise_stripes(
    values_MN: Tensor, scale_mn: Tensor, out_MN: Tensor, *, block: tuple[int, int], skipped: int
) -> bool:
    """Whether there was a NaN. One row of blocks at a time, in the cache.

    torch casts e4m3 to float32 one value after the other. Shifted left by 7, its bits are those of a float16 that is
    256 times smaller, subnormal values included, and that cast is vectorised: six times as fast on one core.
    """
    rows, columns = block
    m, n = scale_mn.shape
    num_columns = values_MN.shape[1]
    scale_mn = scale_mn * 256.0
    bits_MN = values_MN.view(torch.int8)
    has_nan = False
    for i in range(m):
        first, last = max(0, i * rows - skipped), min(values_MN.shape[0], (i + 1) * rows - skipped)
        stripe = bits_MN[first:last]
        has_nan |= bool((stripe & 0x7F).max() == 0x7F) if stripe.numel() else False
        # widening copies the sign into the upper byte: clear the bit between sign and exponent
        halves = stripe.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
        wide = _padded(halves.float(), n * columns)
        wide.view(last - first, n, columns).mul_(scale_mn[i][None, :, None])
        out_MN[first:last] = wide[:, :num_columns]
    return has_nan


def dequantised(
    named: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """The tensors with every fp8 weight and its `_scale_inv` made one; the two may come in either order, with others in
    between. What is not fp8 passes through. ValueError for a weight without scales or scales without a weight.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in named:
        is_scale = name.endswith(SCALE_SUFFIX)
        if not is_scale and tensor.dtype != E4M3:
            yield name, tensor
            continue
        weight_name = name.removesuffix(SCALE_SUFFIX)
        partner = waiting.pop(weight_name if is_scale else name + SCALE_SUFFIX, None)
        if partner is None:
            waiting[name] = tensor
            continue
        values, scale = (partner, tensor) if is_scale else (tensor, partner)
        try:
            yield weight_name, dequantise(values, scale, dtype=dtype)
        except ValueError as error:
            raise ValueError(f"{weight_name}: {error}") from error
    if waiting:
        name = next(iter(waiting))
        lacking = "no weight" if name.endswith(SCALE_SUFFIX) else "no scales"
        raise ValueError(f"{name} has {lacking} beside it ({len(waiting)} such tensors)")


def _padded(rows_RN: Tensor, num_columns: int) -> Tensor:
    """Zeros behind the last column; the tensor itself where it is wide enough."""
    missing = num_columns - rows_RN.shape[1]
    return torch.nn.functional.pad(rows_RN, (0, missing)) if missing else rows_RN.contiguous()


def _has_kernels(tensor: Tensor) -> bool:
    """Whether Triton can cast to e4m3 here: compute capability 8.9 and later."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 9)
