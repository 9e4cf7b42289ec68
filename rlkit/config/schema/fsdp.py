"""What belongs to the sharded trainer: how it shards, saves and offloads, adapters, half precision."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpConfig:
    """Sharding, offload and checkpoint format of the FSDP backend."""

    fsdp_replicate_size: int = 1
    """Hybrid sharding: parameters are sharded over training ranks / n and held n times. Gradients are reduced within
    the shards, then summed over the copies: less traffic between nodes for more memory."""
    fsdp_cpu_offload: bool = False
    """Keep weights, gradients and moments in host memory and run AdamW there; a GPU holds the blocks that it works on.
    Slow, for models that do not fit otherwise."""
    fsdp_full_params: bool = False
    """Checkpoints hold one file with whole tensors (`full_state.pt`) instead of one shard a rank. Rank 0 then needs
    host memory for the whole state."""
    fsdp_state_dict_cpu_offload: bool = True
    """Copy the state to host memory before it is written. Off: it is written straight from the GPU, which is slower and
    takes no host memory (with `--fsdp-full-params`: whole tensors gather on rank 0's GPU)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters (LoRA) on the policy, by `peft`; the base model is frozen."""

    lora_rank: int = 0
    """Rank of the adapters; 0 trains the whole model."""
    lora_alpha: float = 16.0
    """An adapter's product is multiplied by alpha / rank."""
    lora_dropout: float = 0.0
    """Dropout on an adapter's input, in the passes that are trained on; scoring never drops anything."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Which linear layers get adapters: last parts of their names, e.g. `q_proj v_proj`, or `all-linear`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Half precision with loss scaling."""

    fp16: bool = False
    """Compute in float16 (trainer and engines) and scale the loss; masters and moments stay in float32."""
    loss_scale: float | None = None
    """Fixed loss scale of `--fp16`; unset adapts it."""
    initial_loss_scale: float = 65536.0
    """First scale; a power of two loses no bits."""
    min_loss_scale: float = 1.0
    """An overflow at this scale is an error."""
    loss_scale_window: int = 1000
    """Optimizer steps in a row without overflow after which the scale doubles."""
    hysteresis: int = 2
    """Overflows that halve the scale only with the last of them; each still skips its optimizer step."""
