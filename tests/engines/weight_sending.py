"""The trainer's side of a weight update, written out: every way in which an engine can be given weights."""

import asyncio
import base64
import io
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.distributed as dist
from engine_process import free_port
from reference_model import ReferenceModel

from rlkit.dist.update_group import join_update_group, leave_update_group
from rlkit.types.weights import WeightSpec

GROUP = "contract"

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class Sender:
    """A trainer's side of `/update_weights_from_tensor`: tensors in shared memory, handles in a pickle."""

    def __init__(self, share: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._make_shared = share or (lambda tensor: tensor.clone().share_memory_())
        self._shared: list[torch.Tensor] = []  # must outlive the call

    def bucket(self, named: NamedTensors) -> str:
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in named])
        metadata, start = [], 0
        for name, tensor in named:
            end = start + tensor.numel() * tensor.itemsize
            metadata.append(
                SimpleNamespace(
                    name=name,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=end - start,
                )
            )
            start = end
        return self._pickle({"flattened_tensor": self._share(flat), "metadata": metadata})

    def named_list(self, named: NamedTensors) -> str:
        return self._pickle([(name, self._share(tensor)) for name, tensor in named])

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        self._shared.append(self._make_shared(tensor))
        return self._shared[-1]

    @staticmethod
    def _pickle(content: object) -> str:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(content)
        return base64.b64encode(buffer.getvalue()).decode()


def specs_of(named: NamedTensors) -> list[WeightSpec]:
    return [WeightSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in named]


async def by_bucket(control, model: ReferenceModel, version: int) -> None:
    """In three buckets, as a large model travels."""
    named, sender = model.named_tensors(), Sender()
    for part in (named[:7], named[7:20], named[20:]):
        await control.update_from_tensor(payloads=[sender.bucket(part)], version=version)


async def by_named_list(control, model: ReferenceModel, version: int) -> None:
    sender = Sender()
    payload = sender.named_list(model.named_tensors())
    await control.update_from_tensor(payloads=[payload], version=version, load_format=None)


async def by_group(control, model: ReferenceModel, version: int, *, load_format: str | None = None) -> None:
    """As rank 0 of a group of two; the engine is the other."""
    port, named = free_port(), model.named_tensors()
    engine_side = asyncio.create_task(
        control.init_weights_group(
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name=GROUP,
            backend="gloo",
        )
    )
    group = await asyncio.to_thread(
        join_update_group,
        backend="gloo",
        address="127.0.0.1",
        port=port,
        rank=0,
        world_size=2,
        name=GROUP,
        timeout_s=60.0,
    )
    await engine_side
    specs = specs_of(named)
    update = asyncio.create_task(
        control.update_from_distributed(specs=specs, group_name=GROUP, version=version, load_format=load_format)
    )

    def send() -> None:
        if load_format is None:
            for _, tensor in named:
                dist.broadcast(tensor.contiguous(), src=0, group=group)
        else:
            flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in named])
            dist.broadcast(flat, src=0, group=group)

    await asyncio.to_thread(send)
    await update
    await control.destroy_weights_group(group_name=GROUP)
    leave_update_group(group)


async def by_group_bucket(control, model: ReferenceModel, version: int) -> None:
    await by_group(control, model, version, load_format="flattened_bucket")


async def by_disk(control, model: ReferenceModel, version: int) -> None:
    await control.update_from_disk(path=str(model.folder), version=version)
