"""AdamW on float32 main parameters that are dealt over the data-parallel ranks (ZeRO stage 1). Called by `trainer.py`.

Gradient buffers, their reduction and the gathering of new parameters are Megatron's; the optimizer's own state is ours,
because Megatron's `DistributedOptimizer` insists on CUDA tensor types. It works on any device.

A bucket holds whole parameters end to end. Data rank r owns the r-th equal part of it, so the first and the last
parameter of a part may be cut.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rlkit.backends.megatron.model import Model
from rlkit.backends.megatron.parallel import Ranks
from rlkit.config.schema import OptimizerConfig

Key = tuple[int, str]
"""(chunk, path inside it) of a parameter."""


def wrap_for_gradients(model: Model, ranks: Ranks) -> list[DistributedDataParallel]:
    """The chunks with float32 gradient buffers, reduced over the data ranks once a step. Moves parameters into
    contiguous buffers.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,
    )
    wrapped = []
    for chunk in model.chunks:
        layout = DistributedOptimizer.compute_full_param_layout(
            list(chunk.parameters()),
            None,
            ranks.data.size,
            settings,
            expert_data_parallel_world_size=ranks.expert_data.size,
        )
        wrapped.append(
            DistributedDataParallel(model.config, settings, chunk, disable_bucketing=True, full_param_layout=layout)
        )
    return wrapped


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """The part of one parameter that this rank optimises."""

    key: Key
    start: int
    """Index of its first element in the flattened parameter of this tensor-parallel rank."""
    main: nn.Parameter
    """float32 [n]."""
    grad: Tensor
    """float32 [n]; reduced over the data ranks."""
    is_decayed: bool
    is_counted: bool
    """Whether the gradient norm counts it here: what several ranks hold alike is counted once."""
    host_grad: Tensor | None
    """Where the gradient goes for a step on the host."""

    @property
    def stop(self) -> int:
        return self.start + self.main.numel()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shard:
    """This rank's part of one bucket."""

    params: Tensor
    """In the compute dtype [n]."""
    main: Tensor
    """float32 [n]; the very tensor `params` where that is float32, unless it is on the host."""
    grads: Tensor
    """float32 [n], on the device."""
    host_grads: Tensor | None
    """float32 [n], with `--optimizer-cpu-offload`."""
    segments: list[Segment]

    @property
    def is_copy(self) -> bool:
        return self.main is not self.params


class MainOptimizer:
    """Owns main parameters and moments; parameters and gradients stay in Megatron's buffers."""

    def __init__(
        self,
        model: Model,
        wrapped: Sequence[DistributedDataParallel],
        ranks: Ranks,
        cfg: OptimizerConfig,
        *,
        on_host: bool = False,
    ) -> None:
        """`on_host`: `--optimizer-cpu-offload`."""
        self._model = model
        self._wrapped = list(wrapped)
        self._ranks = ranks
        keys = {parameter: key for key, parameter in model.named_parameters()}
        self._shards: list[_Shard] = []
        self.groups: dict[Key, ProcessGroup] = {}
        """The data ranks over which each parameter is dealt."""
        for wrapper in self._wrapped:
            ddp: Any = wrapper  # its buffers are attributes that a module's type does not show
            for buffers, is_expert in ((ddp.buffers, False), (ddp.expert_parallel_buffers, True)):
                for buffer in buffers:
                    for bucket in buffer.buckets:
                        self._shards.append(_shard(buffer, bucket, keys, ranks, is_expert=is_expert, on_host=on_host))
                        self.groups |= {keys[p]: buffer.data_parallel_group for p in bucket.params_list}
        self.segments = [segment for shard in self._shards for segment in shard.segments]
        self.num_steps = 0
        """Steps that the moments have seen."""
        self.adamw = torch.optim.AdamW(
            [
                {"params": [s.main for s in self.segments if s.is_decayed], "weight_decay": cfg.weight_decay},
                # norms and biases: shrinking a scale that the next matrix can undo regularises nothing
                {"params": [s.main for s in self.segments if not s.is_decayed], "weight_decay": 0.0},
            ],
            lr=cfg.lr,
            betas=(cfg.adam_beta1, cfg.adam_beta2),
            eps=cfg.adam_eps,
            fused=True,
        )

    def segments_by_key(self) -> dict[Key, list[Segment]]:
        found: dict[Key, list[Segment]] = {}
        for segment in self.segments:
            found.setdefault(segment.key, []).append(segment)
        return found

    def main_from_params(self) -> None:
        """Take the main parameters from the model's, after those were loaded."""
        with torch.no_grad():
            for shard in self._shards:
                shard.main.copy_(shard.params)

    def params_from_main(self) -> None:
        """Cast the main parameters and gather them. Collective over the data ranks."""
        with torch.no_grad():
            for shard in self._shards:
                if shard.is_copy:
                    shard.params.copy_(shard.main)
        for ddp in self._wrapped:
            ddp.start_param_sync(force_sync=True)

    def reduce_grads(self) -> None:
        """Add up what the ranks have: over the data ranks, over tensor-parallel ranks where they saw other tokens or
        heads, and over the stages of a tied matrix. Collective over all ranks.
        """
        finalize_model_grads(list(self._wrapped), None)

    def squared_grad_norm(self) -> Tensor:
        """float32 scalar: this rank's share."""
        grads = [segment.grad for segment in self.segments if segment.is_counted]
        if not grads:
            return torch.zeros((), device=self._ranks.device)
        norms = torch._foreach_norm(grads)  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack(norms).square().sum()

    def scale_grads(self, factor: float) -> None:
        grads = [segment.grad for segment in self.segments]
        if grads:
            torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]

    def step(self, lr: float) -> None:
        """Apply the gradients, hand the new parameters to the model, drop the gradients. Collective."""
        for shard in self._shards:
            if shard.host_grads is not None:
                shard.host_grads.copy_(shard.grads)
        for segment in self.segments:
            segment.main.grad = segment.grad if segment.host_grad is None else segment.host_grad
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.num_steps += 1
        self.zero_grad()
        self.params_from_main()

    def zero_grad(self) -> None:
        for segment in self.segments:
            segment.main.grad = None
        for ddp in self._wrapped:
            ddp.zero_grad_buffer()

    def reset(self) -> None:
        """Forget moments and step counts."""
        self.adamw.state.clear()
        self.num_steps = 0

    def free_grads(self) -> None:
        for ddp in self._wrapped:
            ddp.offload_grad_buffers(empty_cache=False)

    def restore_grads(self) -> None:
        for ddp in self._wrapped:
            ddp.restore_grad_buffers()

    def main_tensors(self) -> Iterator[Tensor]:
        """Main parameters that are no view of the model's, one a bucket, and the moments: what sleeps beside the
        parameters.
        """
        for shard in self._shards:
            if shard.is_copy and shard.host_grads is None:
                yield shard.main
        for segment in self.segments:
            if segment.host_grad is None:
                state = self.adamw.state.get(segment.main, {})
                yield from (value for value in state.values() if value.numel() > 1 or value.is_cuda)

    def moment(self, segment: Segment, name: str) -> Tensor:
        """`exp_avg` or `exp_avg_sq` of a segment, made where AdamW has none yet."""
        state = self.adamw.state[segment.main]
        if not state:
            # what AdamW(fused=True) makes at its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=segment.main.device)
            state["exp_avg"] = torch.zeros_like(segment.main.detach())
            state["exp_avg_sq"] = torch.zeros_like(segment.main.detach())
        return state[name]

    def set_num_steps(self, count: int) -> None:
        self.num_steps = count
        for segment in self.segments:
            self.moment(segment, "exp_avg")
            self.adamw.state[segment.main]["step"].fill_(float(count))

    def gather(self, key: Key, read: Callable[[Segment], Tensor], shape: tuple[int, ...]) -> Tensor:
        """A whole float32 parameter (main or moment) of this tensor-parallel rank, on the device, from its segments.
        Collective over the data ranks that share it.
        """
        whole = torch.zeros(shape, dtype=torch.float32, device=self._ranks.device)
        flat = whole.view(-1)
        for segment in self.segments:
            if segment.key == key:
                flat[segment.start : segment.stop] = read(segment)
        group = self.groups[key]
        if group.size() > 1:
            dist.all_reduce(whole, group=group)  # every element is non-zero on one rank only
        return whole


def _shard(
    buffer: Any, bucket: Any, keys: dict[nn.Parameter, Key], ranks: Ranks, *, is_expert: bool, on_host: bool
) -> _Shard:
    size = bucket.grad_data.numel() // buffer.data_parallel_world_size
    first = size * buffer.data_parallel_group.rank()
    params = bucket.param_data[first : first + size]
    grads = bucket.grad_data[first : first + size]
    host_grads = None
    if on_host:
        main, host_grads = (
            torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=params.is_cuda) for _ in range(2)
        )
    else:
        main = params if params.dtype == torch.float32 else torch.empty_like(params, dtype=torch.float32)
    segments = []
    for parameter in bucket.params_list:
        start, stop, _ = buffer.param_index_map[parameter]
        start, stop = start - bucket.offset, stop - bucket.offset
        low, high = max(start, first), min(stop, first + size)
        if low >= high:
            continue
        segments.append(
            Segment(
                key=keys[parameter],
                start=low - start,
                main=nn.Parameter(main[low - first : high - first]),
                grad=grads[low - first : high - first],
                is_decayed=parameter.dim() >= 2,
                is_counted=_is_counted(parameter, ranks, is_expert=is_expert),
                host_grad=None if host_grads is None else host_grads[low - first : high - first],
            )
        )
    return _Shard(params=params, main=main, grads=grads, host_grads=host_grads, segments=segments)


def _is_counted(parameter: nn.Parameter, ranks: Ranks, *, is_expert: bool) -> bool:
    """Megatron marks what is dealt over tensor-parallel ranks, and the second copy of a tied matrix."""
    if getattr(parameter, "shared", False):
        return False
    return is_expert or getattr(parameter, "tensor_model_parallel", False) or ranks.tensor.rank == 0
