"""When and from where a rank's checkpoint is written. Called by `backend.py`; the files are `checkpoint.py`'s."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from rlkit.backends.fsdp.checkpoint import BackgroundWrite, TrainerMeta, copy_state, write
from rlkit.backends.sleep import HostSwap
from rlkit.config.schema import RunConfig
from rlkit.dist.groups import RankMesh, cpu_mesh, new_cpu_group


class StateSaver:
    """Writes the trainer's state, at once or (`--async-save`) beside the next step."""

    def __init__(self, cfg: RunConfig, mesh: RankMesh, swap: HostSwap, *, timeout_s: float) -> None:
        """`swap`: its buffer holds the copy of a save that is waited for. Collective."""
        self._mesh = mesh
        self._is_async = cfg.checkpoint.async_save
        self._is_full = cfg.fsdp.fsdp_full_params
        self._to_host = cfg.fsdp.fsdp_state_dict_cpu_offload
        self.stage = HostSwap(mesh.device) if self._is_async else swap
        """Where the copy lies; an asynchronous save needs a buffer of its own."""
        self._host_mesh = cpu_mesh(mesh.layout)
        self._group = new_cpu_group(timeout_s=timeout_s) if self._is_async else None
        self._write: BackgroundWrite | None = None

    def save(self, directory: Path, tensors: Mapping[str, Tensor], meta: TrainerMeta) -> None:
        """Collective; returns when the state is copied (asynchronous) or written."""
        self.finish()
        self.stage.hold(self._to_copy(tensors))
        state = copy_state(
            tensors,
            self._mesh,
            self.stage.host_view,
            host_mesh=self._host_mesh,
            meta=meta,
            is_full=self._is_full,
            to_host=self._to_host,
        )
        if self._is_async:
            self._write = BackgroundWrite(partial(write, directory, state, self._mesh, group=self._group))
            return
        try:
            write(directory, state, self._mesh)
        finally:
            self.stage.release()

    @property
    def is_done(self) -> bool:
        return self._write is None or self._write.is_done

    def finish(self) -> None:
        """Wait for the write in progress, if any; raises what went wrong."""
        if self._write is None:
            return
        pending, self._write = self._write, None
        try:
            pending.wait()
        finally:
            self.stage.release()

    def _to_copy(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """What would change, or is slow to read, while it is written. Gathered tensors are copies already, and what
        lies in host memory can be read in place by those who wait.
        """
        if self._is_full or not self._to_host:
            return []
        plain = [t.to_local().detach() if isinstance(t, DTensor) else t.detach() for t in tensors.values()]
        return [tensor for tensor in plain if self._is_async or tensor.is_cuda]
