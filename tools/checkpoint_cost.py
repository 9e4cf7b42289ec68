"""What the proof of a checkpoint costs: fingerprints of tensors, digests of files.

    python tools/checkpoint_cost.py --params 6e8 --device cuda --directory /tmp

Makes float32 weights and two moments of that many parameters on the device and as files, times both, and prints a
table.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from rlkit.backends.fsdp.fingerprint import sums
from rlkit.orchestration.manifest import digest_files

COPIES = 3
"""Weight and two moments."""
TENSORS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=5e7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    size = int(args.params * COPIES / TENSORS)
    tensors = {str(number): (torch.randn(size, device=args.device), 0) for number in range(TENSORS)}
    gigabytes = size * TENSORS * 4 / 1e9
    sums(tensors)  # the allocator's first time
    rows = [("fingerprints", timed(lambda: sums(tensors)))]
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for name, (tensor, _) in tensors.items():
            (Path(folder) / name).write_bytes(tensor.cpu().numpy().tobytes())
        rows.append(("digests of files", timed(lambda: digest_files(Path(folder)))))
    print(f"{args.params:.3g} parameters, {gigabytes:.2f} GB of weights and moments, {args.device}")
    for what, seconds in rows:
        print(f"{what:<20}{seconds:8.2f} s {gigabytes / seconds:8.2f} GB/s")


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
