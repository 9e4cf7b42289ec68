"""Split updates: trainer rank 0 broadcasts each bucket to every engine rank over one process group: NCCL on GPUs, gloo
on a CPU or where NCCL cannot be had.

The names and shapes of a bucket go by HTTP first; the engine then waits in the broadcast that rank 0 enters.
"""

import logging
import secrets
from collections.abc import Sequence
from typing import Literal

from torch.distributed import ProcessGroup

from rlkit.dist.update_group import broadcast, join_update_group, leave_update_group
from rlkit.engines.base import free_port
from rlkit.sync.base import PushReport, push_buckets
from rlkit.sync.engine_calls import EngineCalls
from rlkit.types.errors import EngineError
from rlkit.types.ranks import EngineEndpoint, RankInfo
from rlkit.types.weights import WeightBucket, WeightSource

logger = logging.getLogger(__name__)


class GroupChannel:
    """One broadcast group, made at the first push and kept."""

    def __init__(
        self,
        rank: RankInfo,
        endpoints: Sequence[EngineEndpoint],
        *,
        backend: Literal["nccl", "gloo"],
        max_bytes: int,
        timeout_s: float,
        with_checksums: bool,
    ) -> None:
        self._rank = rank
        self._backend = backend
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._with_checksums = with_checksums and rank.is_main
        self._calls = EngineCalls(endpoints if rank.is_main else [], timeout_s=timeout_s)
        self._group: ProcessGroup | None = None
        self._group_name = f"rlkit_weights_{secrets.token_hex(4)}"
        """A name of its own: an engine that outlives a run may still hold the group of the previous one."""

    def push(self, source: WeightSource, version: int) -> PushReport:
        if self._rank.is_main and self._group is None:
            self._group = self._connect()
        return push_buckets(
            source,
            lambda bucket: self._send(bucket, version),
            version=version,
            max_bytes=self._max_bytes,
            with_checksums=self._with_checksums,
        )

    def _connect(self) -> ProcessGroup:
        address, port = self._rank.master_addr, free_port(self._rank.master_addr)
        offsets, world_size = {}, 1
        for endpoint in self._calls.endpoints:
            offsets[endpoint.index] = world_size
            world_size += endpoint.num_gpus
        wait = self._calls.start(
            lambda client, endpoint: client.init_weights_group(
                master_address=address,
                master_port=port,
                rank_offset=offsets[endpoint.index],
                world_size=world_size,
                group_name=self._group_name,
                backend=self._backend,
            )
        )
        group = join_update_group(
            backend=self._backend,
            address=address,
            port=port,
            rank=0,
            world_size=world_size,
            name=self._group_name,
            timeout_s=self._timeout_s,
        )
        wait()
        return group

    def _send(self, bucket: WeightBucket, version: int) -> None:
        if self._group is None:
            return  # only rank 0 is in the group; the others took part in the all-gather that made the bucket
        # Tensors of different dtypes are aligned, which leaves gaps that SGLang's flattened format does not know.
        is_dense = bucket.flat.numel() == sum(spec.num_bytes for spec in bucket.specs)
        wait = self._calls.start(
            lambda client, _: client.update_from_distributed(
                specs=bucket.specs,
                group_name=self._group_name,
                version=version,
                load_format="flattened_bucket" if is_dense else None,
            )
        )
        for part in [bucket.flat] if is_dense else [tensor for _, tensor in bucket.tensors()]:
            broadcast(part, group=self._group)
        wait()

    def close(self) -> None:
        if self._group is not None:
            try:
                self._calls.all(lambda client, _: client.destroy_weights_group(group_name=self._group_name))
            except EngineError as error:  # one that has died needs no goodbye
                logger.info(f"leaving the weight group: {error}")
            leave_update_group(self._group)
            self._group = None
        self._calls.close()
