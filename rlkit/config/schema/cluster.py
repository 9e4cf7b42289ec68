"""Where ranks and engines run."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """How many GPUs (or, without CUDA, rank slots) train and generate, and whether they share them."""

    actor_num_nodes: int = 1
    """Nodes that hold training ranks."""
    actor_num_gpus_per_node: int = 8
    """Training ranks per node, one GPU each."""
    colocate: bool = False
    """Trainer and engines take turns on the same GPUs; otherwise each has its own."""
    rollout_num_gpus: int | None = None
    """GPUs of all engines together. Required when split; colocated it defaults to the trainer's number."""
    rollout_num_gpus_per_engine: int = 1
    """GPUs of one engine (tensor x pipeline parallel)."""
    num_gpus_per_node: int = 8
    """GPUs that one node of the cluster has; fewer than 8 must be said here."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` takes CUDA where torch sees it. On `cpu` a "GPU" in the other flags is a rank slot: a process with its
    share of the cores."""
    train_env_vars: dict[str, Any] = field(default_factory=dict[str, Any])
    """JSON object of environment variables for the training ranks, e.g. '{"NCCL_DEBUG": "INFO"}'."""
    ray_address: str | None = None
    """Address of a running Ray cluster (`auto` inside `ray job submit`); unset starts a private one that ends with the
    run."""
    placement_timeout_s: float = 600.0
    """Seconds to wait for the cluster to provide the GPUs, said aloud meanwhile, before giving up."""
    gpu_type: str | None = None
    """Name of the GPU that `--dry-run` plans for on a machine without it, e.g. `H200`."""
    gpu_memory_gib: float | None = None
    """Memory of that GPU in GiB, for `--dry-run`."""
    host_memory_gib: float | None = None
    """Memory of one node in GiB, for `--dry-run`; unset takes this machine's."""

    @property
    def actor_num_gpus(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def engine_num_gpus(self) -> int:
        """GPUs of all engines."""
        if self.rollout_num_gpus is not None:
            return self.rollout_num_gpus
        return self.actor_num_gpus if self.colocate else 0

    @property
    def num_engines(self) -> int:
        return self.engine_num_gpus // self.rollout_num_gpus_per_engine

    @property
    def slots_per_node(self) -> int:
        """GPUs of a node that this run counts with: several trainer nodes each give exactly their training ranks."""
        return self.actor_num_gpus_per_node if self.actor_num_nodes > 1 else self.num_gpus_per_node
