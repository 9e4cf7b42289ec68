"""Memory of the GPUs that `--gpu-type` knows."""

from collections.abc import Mapping
from types import MappingProxyType

GPU_MEMORY_GIB: Mapping[str, float] = MappingProxyType(
    {"A100": 80.0, "H100": 79.6, "H200": 140.4, "B200": 179.1, "L40S": 45.0}
)
"""What the driver reports for these cards; the 80 GB variants of A100 and H100. Others: `--gpu-memory-gib`."""
