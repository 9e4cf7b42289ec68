"""Colocated updates: a bucket's bytes stay where the trainer has them and the engine maps them (shared memory on a
CPU, CUDA IPC on a GPU).

Every engine is served by the training ranks on its own devices: the payload for engine rank i comes from the i-th of
them, and the first of them makes the HTTP call. Only the handle travels through HTTP.
"""

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing

from rlkit.dist.collectives import all_gather_objects, barrier
from rlkit.sync.base import PushReport, push_buckets
from rlkit.sync.engine_calls import EngineCalls
from rlkit.types.errors import SyncError
from rlkit.types.ranks import EngineEndpoint, RankInfo
from rlkit.types.weights import WeightBucket, WeightSource


class IpcChannel:
    """Shared memory or CUDA IPC, one call per engine and bucket."""

    def __init__(
        self,
        rank: RankInfo,
        endpoints: Sequence[EngineEndpoint],
        *,
        max_bytes: int,
        timeout_s: float,
        with_checksums: bool,
    ) -> None:
        for endpoint in endpoints:
            if len(endpoint.colocated_ranks) != endpoint.num_gpus:
                raise SyncError(
                    f"engine {endpoint.url} shares its devices with training ranks {endpoint.colocated_ranks}, "
                    f"but has {endpoint.num_gpus} ranks; use --update-weight-transport nccl or disk"
                )
        self._rank = rank
        self._max_bytes = max_bytes
        self._with_checksums = with_checksums and rank.is_main
        self._gathers = any(endpoint.num_gpus > 1 for endpoint in endpoints)
        self._calls = EngineCalls(
            [endpoint for endpoint in endpoints if endpoint.colocated_ranks[0] == rank.rank], timeout_s=timeout_s
        )
        self._staging: torch.Tensor | None = (
            None  # uint8; reused, so that engines map one block instead of one a bucket
        )
        if rank.device == "cpu":
            # The default shares file descriptors and authenticates with the parent's key: engines are no children of
            # ours.
            torch.multiprocessing.set_sharing_strategy("file_system")

    def push(self, source: WeightSource, version: int) -> PushReport:
        report = push_buckets(
            source,
            lambda bucket: self._send(bucket, version),
            version=version,
            max_bytes=self._max_bytes,
            with_checksums=self._with_checksums,
        )
        if self._rank.device == "cuda":
            # The engine's KV cache is mapped next and needs the room of the buckets. Once a push: each call costs.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return report

    def _send(self, bucket: WeightBucket, version: int) -> None:
        payload = serialize_bucket(bucket, self._stage(bucket)) if self._calls.endpoints or self._gathers else ""
        payloads = all_gather_objects(payload) if self._gathers else [payload] * self._rank.world_size
        self._calls.all(
            lambda client, endpoint: client.update_from_tensor(
                payloads=[payloads[rank] for rank in endpoint.colocated_ranks], version=version
            )
        )
        if self._gathers:
            # the ranks that made no call must not overwrite their staging block before the engines have copied it
            barrier()

    def _stage(self, bucket: WeightBucket) -> torch.Tensor:
        """The bucket's bytes in a block that can be shared with another process."""
        size = bucket.flat.numel()
        if bucket.flat.is_cuda:
            return bucket.flat
        staging = self._staging
        if staging is None or staging.numel() < size:
            self._staging = staging = torch.empty(size, dtype=torch.uint8).share_memory_()
        staging[:size].copy_(bucket.flat)
        return staging[:size]

    def close(self) -> None:
        self._calls.close()
        self._staging = None


def serialize_bucket(bucket: WeightBucket, flat: torch.Tensor) -> str:
    """SGLang's `flattened_bucket` format: base64 of a pickle that holds a handle to `flat` and each tensor's place in
    it."""
    metadata = [
        SimpleNamespace(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=spec.dtype,
            start_idx=start,
            end_idx=start + spec.num_bytes,
            numel=spec.num_bytes // spec.dtype.itemsize,
        )
        for spec, start in zip(bucket.specs, bucket.offsets, strict=True)
    ]
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode("ascii")
