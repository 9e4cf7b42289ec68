"""The Megatron-Core backend: how ranks share the model, and what is recomputed."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronConfig:
    """Layout of `--train-backend megatron`. Training ranks = tensor x pipeline x context x data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every matrix of a layer. Keep them within a node."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers of the model."""
    sequence_parallel: bool = False
    """Deal norms and residuals over the tensor-parallel ranks by tokens: less memory, same traffic."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a layer; taken from the data-parallel ranks."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share the matrices of one expert; unset means `--tensor-model-parallel-size`."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage where it has more or fewer than the others."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage where it has more or fewer than the others."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Runs of layers on each pipeline rank, for the interleaved schedule; unset means one."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """`full` recomputes layers in the backward pass, `selective` attention alone; unset keeps all activations."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With `full`: `uniform` keeps the input of every `--recompute-num-layers` layers of a stage, `block` recomputes
    the first so many and keeps the others."""
    recompute_num_layers: int | None = None
    """Layers that `--recompute-method` counts with."""

    optimizer_cpu_offload: bool = False
    """Keep main parameters and moments in host memory and update them there: 12 bytes a parameter less on the GPU, 16
    more on the host, and a slower step."""

    @property
    def model_ranks(self) -> int:
        """Ranks that share one copy of the model, context parallelism aside."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def virtual_pipeline_size(self) -> int | None:
        """As Megatron counts: None where each rank has one run of layers."""
        size = self.num_virtual_stages_per_pipeline_rank
        return size if size is not None and size > 1 else None

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size
