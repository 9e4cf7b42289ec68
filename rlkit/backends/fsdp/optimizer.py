"""AdamW on float32 master shards, and the norm of the whole gradient. Called by `trainer.py`."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlkit.backends.fsdp.model import ScoringModel, local_shard, named_shards
from rlkit.config.schema import OptimizerConfig
from rlkit.dist.groups import cpu_mesh


class ShardOptimizer:
    """AdamW over this rank's shards of the parameters that are trained, as plain tensors.

    The tensors share memory with the DTensors of the model. Stepping DTensors themselves costs a dispatch per parameter
    and operation, which for a small model on a CPU is more than the arithmetic.
    """

    def __init__(self, model: ScoringModel, cfg: OptimizerConfig) -> None:
        self._shards = {name: shard for name, shard in named_shards(model) if shard.requires_grad}
        self._host_mesh: DeviceMesh | None = None
        self._locals = {name: nn.Parameter(local_shard(shard)) for name, shard in self._shards.items()}
        decayed = [self._locals[name] for name, shard in self._shards.items() if shard.dim() >= 2]
        others = [self._locals[name] for name, shard in self._shards.items() if shard.dim() < 2]
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": cfg.weight_decay},
                # norms and biases: shrinking a scale that the next matrix can undo regularises nothing
                {"params": others, "weight_decay": 0.0},
            ],
            lr=cfg.lr,
            betas=(cfg.adam_beta1, cfg.adam_beta2),
            eps=cfg.adam_eps,
            fused=True,
        )

    def squared_grad_norm(self) -> Tensor:
        """float32 scalar: the sum of squares of this rank's gradient shards."""
        grads = list(self._local_grads())
        norms = torch._foreach_norm(grads)  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack(norms).square().sum()

    def scale_grads(self, factor: float) -> None:
        torch._foreach_mul_(list(self._local_grads()), factor)  # pyright: ignore[reportPrivateImportUsage]

    def step(self, lr: float) -> None:
        """Apply the model's gradients at this learning rate, then drop them."""
        for name, shard in self._shards.items():
            self._locals[name].grad = None if shard.grad is None else _local(shard.grad)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.zero_grad()

    def reset(self) -> None:
        """Forget moments and step counts, as if no step had been taken."""
        for state in self.adamw.state.values():
            for tensor in state.values():
                tensor.zero_()

    def zero_grad(self) -> None:
        for name, shard in self._shards.items():
            shard.grad = self._locals[name].grad = None

    def state_tensors(self) -> Iterator[Tensor]:
        """Everything the optimizer keeps on the device: what sleeps with the weights."""
        for state in self.adamw.state.values():
            yield from state.values()

    def sharded_state(self) -> dict[str, DTensor | Tensor]:
        """Moments as DTensors laid out like their parameters, under `exp_avg.<name>` and `exp_avg_sq.<name>`, and
        `step.<name>`.

        Made on the first call where AdamW has none yet, so a checkpoint can be read into them. Writing to them writes
        to the optimizer.
        """
        tensors: dict[str, DTensor | Tensor] = {}
        for name, shard in self._shards.items():
            local = self._locals[name]
            state = self.adamw.state[local]
            if not state:
                # what AdamW(fused=True) makes at its first step
                state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
                state["exp_avg"] = torch.zeros_like(local.detach())
                state["exp_avg_sq"] = torch.zeros_like(local.detach())
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{key}.{name}"] = DTensor.from_local(
                    state[key],
                    self._mesh_of(shard),
                    shard.placements,
                    run_check=False,
                    shape=shard.shape,
                    stride=shard.stride(),
                )
            tensors[f"step.{name}"] = state["step"]
        return tensors

    def _mesh_of(self, shard: DTensor) -> DeviceMesh:
        """Where moments of the shard lie. torch would move a shard in host memory to the device of its mesh."""
        if not local_shard(shard).is_cpu:
            return shard.device_mesh
        if self._host_mesh is None:
            self._host_mesh = cpu_mesh(shard.device_mesh)
        return self._host_mesh

    def _local_grads(self) -> Iterator[Tensor]:
        for shard in self._shards.values():
            if shard.grad is not None:
                yield _local(shard.grad)


def _local(grad: Tensor) -> Tensor:
    assert isinstance(grad, DTensor)
    return grad.to_local()
