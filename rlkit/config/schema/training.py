"""The trainer: optimizer, batches, memory."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW on float32 master weights."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Floor of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Shape of the schedule after the warm-up, in optimizer steps. `WSD`: warm-up, stable, decay. Formulas:
    docs/training.md."""
    lr_warmup_iters: int = 0
    """Optimizer steps of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of `--lr-decay-iters` (or of the run) instead of `--lr-warmup-iters`."""
    lr_warmup_init: float = 0.0
    """The rate from which the warm-up rises."""
    lr_decay_iters: int | None = None
    """Optimizer steps until `--min-lr`; unset means the whole run."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay."""
    lr_wsd_decay_iters: int | None = None
    """Optimizer steps of WSD's decay, the last ones before `--lr-decay-iters`. Required with WSD."""
    reset_optimizer_states: bool = False
    """Forget Adam's moments and step counts before every rollout's optimizer steps."""
    only_train_params_name_list: tuple[str, ...] = ()
    """Train only parameters whose Hugging Face name one of these regular expressions finds; all others are frozen."""
    freeze_params_name_list: tuple[str, ...] = ()
    """Freeze the parameters whose name one of these finds, train all others."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.98
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay on matrices; norms and biases are left alone."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Batching and memory of the trainer."""

    train_backend: Literal["fsdp", "megatron"] = "fsdp"
    """`fsdp`: `fully_shard` per block over all training ranks, any transformers model. `megatron`: Megatron-Core with
    tensor, pipeline and expert parallelism, for the families in docs/megatron.md."""
    global_batch_size: int | None = None
    """Samples per optimizer step; unset follows from `--num-steps-per-rollout`."""
    num_steps_per_rollout: int | None = None
    """Optimizer steps per rollout; unset follows from `--global-batch-size`, else 1."""
    max_tokens_per_gpu: int = 8192
    """Most tokens of one micro-batch on one GPU. A longer sample runs alone."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of each sample: every one holds 1 / n of a micro-batch, which may then hold n times
    `--max-tokens-per-gpu`. For responses that do not fit on one GPU."""
    log_probs_chunk_size: int | None = None
    """Tokens whose logits exist at a time; bounds memory at large vocabularies. Unset means 1024, on a GPU as many as
    fill 1 GiB in float32 if that is more."""
    gradient_checkpointing: bool | None = None
    """Recompute every block's activations in the backward pass: slower, far less memory. Unset does so for as many
    blocks as an estimate of memory demands; `--no-gradient-checkpointing` for none."""
    torch_compile: Literal["auto", "on", "off"] = "auto"
    """Compile the trainer's blocks and log-probs with torch.compile; `auto` does so on GPUs. Compiled code is kept in
    `~/.cache/rlkit` unless TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR say otherwise."""
    seed: int = 1234
    """Seed of the trainer's random state."""
    true_on_policy_mode: bool = False
    """Give sampled tokens the same log-prob in trainer and engine, bit for bit, however they are batched
    (`train/train_rollout_logprob_abs_diff` is 0). On a CPU, with the embedded engine; one thread a process, slow."""
    distributed_timeout_minutes: int = 10
    """Minutes that training ranks wait for each other, at the start and in every collective, before they give up."""
