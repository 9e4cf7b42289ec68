"""The Triton kernels compile for Hopper, without a GPU, and their arithmetic is what bit-for-bit equality needs."""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from rlkit.algo import fp8_kernels


def ptx_of(kernel, pointers: dict[str, str], **constants: object) -> str:
    signature = pointers | dict.fromkeys(("num_rows", "num_columns", "row_stride"), "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(list(signature).index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fp8_kernels.NUM_WARPS}).asm["ptx"]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_quantising_divides_and_rounds_correctly(monkeypatch, tmp_path, dtype, power_of_two):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"weight_ptr": f"*{dtype}", "values_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    ptx = ptx_of(fp8_kernels._quantise_kernel, pointers, power_of_two=power_of_two, block=128)
    assert "div.rn.f32" in ptx and not re.search(r"div\.(full|approx)", ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert ".ftz" not in ptx, "subnormal numbers would become zero"


def test_dequantising_rounds_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"values_ptr": "*u8", "scale_ptr": "*fp32", "out_ptr": "*bf16", "has_nan_ptr": "*i32"}
    ptx = ptx_of(fp8_kernels._dequantise_kernel, pointers, block=128)
    assert "cvt.rn.bf16.f32" in ptx or "cvt.rn.bf16x2.f32" in ptx
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    assert "fma" not in ptx and ".ftz" not in ptx
