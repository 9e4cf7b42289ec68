"""How close the fp8 kernels come to the memory's bandwidth, on one GPU:

    python tools/bench/fp8_cast.py [--output OUT.json]

For shapes of DeepSeek-R1 and others, quantising bfloat16 and float32 and dequantising to bfloat16 are timed, and
beside them a copy on the device of as many bytes as the kernel reads and writes. Ends with a table: GB/s, the copy's
GB/s, the share. The kernels move every byte once, so the copy is their floor. Exit status 1 where the median share of
dequantising or of quantising bfloat16 on the large shapes is below 80 %.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlkit.algo.fp8 import E4M3, dequantise, grid, quantise
from rlkit.algo.fp8_kernels import dequantise_blocks, quantise_blocks

SHAPES = {
    "expert up": (2048, 7168),
    "8 experts": (8 * 2048, 7168),
    "o_proj": (7168, 16384),
    "dense up": (18432, 7168),
    "kv_b_proj": (32768, 512),
    "ragged": (7101, 5003),
    "lm_head": (129280, 7168),
}
LARGE = ("8 experts", "o_proj", "dense up", "lm_head")
TARGET = 0.8
NUM_ROUNDS = 20
WARMUP = 5
FLUSH_BYTES = 256 * 1024**2
"""Written between rounds, so that nothing is in the cache."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Any]] = []
    for name, (m, n) in SHAPES.items():
        rows += measure_shape(name, m, n, flush)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {NUM_ROUNDS}")
    print(f"{'shape':<12}{'M x N':>16}  {'kernel':<18}{'us':>9}{'GB/s':>8}{'copy GB/s':>11}{'share':>8}  bits")
    for row in rows:
        size = f"{row['rows']} x {row['columns']}"
        print(
            f"{row['shape']:<12}{size:>16}  {row['kernel']:<18}{row['us']:>9.1f}{row['gb_per_s']:>8.0f}"
            f"{row['copy_gb_per_s']:>11.0f}{row['share']:>8.0%}  {'equal' if row['is_equal'] else 'DIFFERENT'}"
        )
    shares = {
        kernel: statistics.median(row["share"] for row in rows if row["kernel"] == kernel and row["shape"] in LARGE)
        for kernel in ("quantise bf16", "dequantise bf16")
    }
    print("median share on large shapes: " + ", ".join(f"{kernel} {share:.0%}" for kernel, share in shares.items()))
    if args.output is not None:
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "median": shares}
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if min(shares.values()) >= TARGET and all(row["is_equal"] for row in rows) else 1


def measure_shape(name: str, m: int, n: int, flush: torch.Tensor) -> list[dict[str, Any]]:
    weight = torch.randn(m, n, device="cuda") * 0.02
    values = torch.empty(m, n, dtype=E4M3, device="cuda")
    scale = torch.empty(grid((m, n)), dtype=torch.float32, device="cuda")
    half, out = weight.bfloat16(), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    kernels: dict[str, tuple[Callable[[], Any], int]] = {
        "quantise fp32": (lambda: quantise_blocks(weight, values, scale, power_of_two=False), 5),
        "quantise bf16": (lambda: quantise_blocks(half, values, scale, power_of_two=False), 3),
        "dequantise bf16": (lambda: dequantise_blocks(values, scale, out), 3),
    }
    rows: list[dict[str, Any]] = []
    for kernel, (run, bytes_each) in kernels.items():
        num_bytes = bytes_each * m * n
        seconds = timed(run, flush)
        rows.append(
            {
                "shape": name,
                "rows": m,
                "columns": n,
                "kernel": kernel,
                "us": seconds * 1e6,
                "gb_per_s": num_bytes / seconds / 1e9,
                "copy_gb_per_s": num_bytes / timed_copy(num_bytes, flush) / 1e9,
                "is_equal": is_equal(half if "bf16" in kernel else weight, values, scale, out, kernel),
            }
        )
        rows[-1]["share"] = rows[-1]["gb_per_s"] / rows[-1]["copy_gb_per_s"]
    return rows


def is_equal(weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, kernel: str) -> bool:
    """Whether the first rows are what the CPU says, bit for bit."""
    count = min(256, weight.shape[0])
    if kernel.startswith("dequantise"):
        expected = dequantise(values[:count].cpu(), scale[: grid((count, 1))[0]].cpu())
        return torch.equal(expected, out[:count].cpu())
    expected_values, expected_scale = quantise(weight[:count].cpu())
    found = values[:count].cpu().view(torch.uint8)
    return torch.equal(expected_values.view(torch.uint8), found) and torch.equal(
        expected_scale, scale[: expected_scale.shape[0]].cpu()
    )


def timed_copy(num_bytes: int, flush: torch.Tensor) -> float:
    """Seconds of a copy that reads and writes `num_bytes` together."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), flush)


def timed(run: Callable[[], Any], flush: torch.Tensor) -> float:
    """Median seconds of the device alone."""
    seconds: list[float] = []
    for number in range(WARMUP + NUM_ROUNDS):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= WARMUP:
            seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
