"""Which channel a config means. Called by every training rank once the engines are up."""

from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from rlkit.config.quantization import Fp8Blocks, quantized_names, read_quantization
from rlkit.config.rules.paths import read_model_config
from rlkit.config.schema import RunConfig
from rlkit.engines.base import engine_kind
from rlkit.sync.base import WeightChannel
from rlkit.sync.disk import DiskChannel
from rlkit.sync.engine_weights import EngineWeightChannel, RoundTripCheck, fuses_tensors
from rlkit.sync.reload_check import ReloadCheck
from rlkit.sync.scheduled_check import ChecksumPass, ScheduledCheck
from rlkit.types.ranks import EngineEndpoint, RankInfo


def create_channel(
    cfg: RunConfig, rank: RankInfo, endpoints: Sequence[EngineEndpoint], *, run_dir: Path
) -> WeightChannel:
    """The channel that `--update-weight-transport` names; `auto` is `ipc` when colocated and `nccl` when split.

    With `--check-weight-update-equal` the embedded engine is compared by SHA-256 of each tensor, SGLang by
    `reload_check.py`; with `--check-weight-update-interval` not at every push. Engines of an fp8 checkpoint get fp8.
    """
    interval = cfg.sync.check_weight_update_interval
    check = cfg.sync.check_weight_update_equal
    compares_names = engine_kind(cfg, rank.device) == "embedded"
    scheme = read_quantization(cfg.model.hf_checkpoint)
    sums_while_sending = check and compares_names and scheme is None
    channel = _plain_channel(cfg, rank, endpoints, run_dir=run_dir, with_checksums=sums_while_sending)
    channel = _as_engines_load(cfg, channel, scheme)
    if (not check and interval is None) or sums_while_sending:
        return channel
    if compares_names:
        max_bytes = cfg.sync.update_weight_buffer_size
        if isinstance(channel, EngineWeightChannel):
            checked = RoundTripCheck(channel, max_bytes=max_bytes, is_main=rank.is_main)
        else:
            checked = ChecksumPass(channel, max_bytes=max_bytes, is_main=rank.is_main)
    else:
        disk = _disk_channel(cfg, rank, endpoints, directory=run_dir / "weights_check", with_checksums=False)
        disk = _as_engines_load(cfg, disk, scheme)
        checked = ReloadCheck(channel, disk, rank, endpoints, timeout_s=cfg.engine.engine_timeout_s)
    return checked if check or interval is None else ScheduledCheck(channel, checked, interval=interval)


def _as_engines_load(cfg: RunConfig, channel: WeightChannel, scheme: Fp8Blocks | None) -> WeightChannel:
    """`channel`, given the weights as engines load them where those are not the trainer's as they are."""
    folder = cfg.model.hf_checkpoint
    if scheme is None and not fuses_tensors(read_model_config(folder) or {}):
        return channel
    return EngineWeightChannel(channel, quantized_names(folder, scheme) if scheme else frozenset(), scheme)


def _plain_channel(
    cfg: RunConfig, rank: RankInfo, endpoints: Sequence[EngineEndpoint], *, run_dir: Path, with_checksums: bool
) -> WeightChannel:
    transport = cfg.sync.update_weight_transport
    if transport == "auto":
        transport = "ipc" if cfg.cluster.colocate else "nccl"
    max_bytes = cfg.sync.update_weight_buffer_size
    timeout_s = cfg.engine.engine_timeout_s
    match transport:
        case "ipc":
            from rlkit.sync.ipc import IpcChannel

            return IpcChannel(rank, endpoints, max_bytes=max_bytes, timeout_s=timeout_s, with_checksums=with_checksums)
        case "nccl" | "gloo":
            from rlkit.sync.group import GroupChannel

            return GroupChannel(
                rank,
                endpoints,
                backend="gloo" if rank.device == "cpu" else transport,
                max_bytes=max_bytes,
                timeout_s=timeout_s,
                with_checksums=with_checksums,
            )
        case "disk":
            folder = cfg.sync.update_weight_disk_dir
            directory = Path(folder) if folder is not None else run_dir / "weights"
            return _disk_channel(cfg, rank, endpoints, directory=directory, with_checksums=with_checksums)
        case _:
            assert_never(transport)


def _disk_channel(
    cfg: RunConfig, rank: RankInfo, endpoints: Sequence[EngineEndpoint], *, directory: Path, with_checksums: bool
) -> DiskChannel:
    return DiskChannel(
        rank,
        endpoints,
        directory=directory,
        model_dir=Path(cfg.model.hf_checkpoint),
        max_bytes=cfg.sync.update_weight_buffer_size,
        timeout_s=cfg.engine.engine_timeout_s,
        with_checksums=with_checksums,
    )
