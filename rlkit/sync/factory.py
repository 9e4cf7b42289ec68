"""Which channel a config means. Called by every training rank once the engines are up."""

from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from rlkit.config.schema import RunConfig
from rlkit.sync.base import WeightChannel
from rlkit.types.ranks import EngineEndpoint, RankInfo


def create_channel(
    cfg: RunConfig, rank: RankInfo, endpoints: Sequence[EngineEndpoint], *, run_dir: Path
) -> WeightChannel:
    """The channel that `--update-weight-transport` names; `auto` is `ipc` when colocated and `nccl` when split."""
    transport = cfg.sync.update_weight_transport
    if transport == "auto":
        transport = "ipc" if cfg.cluster.colocate else "nccl"
    max_bytes = cfg.sync.update_weight_buffer_size
    timeout_s = cfg.engine.engine_timeout_s
    with_checksums = cfg.sync.check_weight_update_equal
    match transport:
        case "ipc":
            from rlkit.sync.ipc import IpcChannel

            return IpcChannel(rank, endpoints, max_bytes=max_bytes, timeout_s=timeout_s, with_checksums=with_checksums)
        case "nccl":
            from rlkit.sync.group import GroupChannel

            return GroupChannel(
                rank, endpoints, max_bytes=max_bytes, timeout_s=timeout_s, with_checksums=with_checksums
            )
        case "disk":
            from rlkit.sync.disk import DiskChannel

            directory = cfg.sync.update_weight_disk_dir
            return DiskChannel(
                rank,
                endpoints,
                directory=Path(directory) if directory is not None else run_dir / "weights",
                model_dir=Path(cfg.model.hf_checkpoint),
                max_bytes=max_bytes,
                timeout_s=timeout_s,
                with_checksums=with_checksums,
            )
        case _:
            assert_never(transport)
