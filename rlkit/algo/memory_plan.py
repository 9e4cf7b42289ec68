"""What a training rank's GPU must hold, estimated from sizes alone: states, activations, logits. No torch: the dry run
uses it too.

Activations are counted tensor by tensor for a decoder block with grouped attention, a gated MLP and RMS norms: what
autograd keeps of it from the forward to the backward pass. tests/algo/test_memory_plan.py compares with measured peaks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1024**3

MASTER_BYTES, GRADIENT_BYTES, ADAM_BYTES = 4, 4, 8
"""Of a parameter: float32 weights, float32 gradient, two float32 moments."""

MARGIN = 1.05
"""Activations are multiplied by this: fragmentation, and what the count overlooks."""

FIXED_BYTES = int(1.5 * GIB)
"""CUDA context, NCCL, workspaces of matrix products."""

CHUNK_BYTES = 1 << 30
"""Of a chunk's float32 logits on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder."""

    num_params: int
    """Tied ones counted once."""
    num_layers: int
    hidden: int
    queries: int
    """Query heads x head size."""
    keys: int
    """Key heads x head size."""
    intermediate: int
    """Width of the gated MLP."""
    vocab: int


def model_shape(config: Mapping[str, Any], num_params: int) -> ModelShape | None:
    """From the contents of a config.json; None where it does not describe a dense decoder."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    is_sparse = any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if is_sparse or any(not isinstance(config.get(name), int) for name in names):
        return None
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return ModelShape(
        num_params=num_params,
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        queries=heads * head_dim,
        keys=(config.get("num_key_value_heads") or heads) * head_dim,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Bytes on one GPU while a micro-batch of `num_tokens` is trained on."""

    num_layers: int
    states: int
    """Shards of master weights and moments: what stays between steps."""
    gradients: int
    """Sharded gradient and the whole float32 one in which micro-batches add up."""
    weights: int
    """Whole weights in the compute dtype: all of them where they are kept, else two blocks and the embeddings."""
    logits: int
    """One chunk of logits, and the head's gradient."""
    block: int
    """Activations that one block keeps."""
    block_input: int
    """What a block keeps whose activations are recomputed."""

    def peak(self, num_checkpointed: int) -> int:
        """The largest sum over a step, when the first `num_checkpointed` blocks recompute their activations."""
        kept = (self.num_layers - num_checkpointed) * self.block + num_checkpointed * self.block_input
        # one block at a time is recomputed, or its kept activations meet as many gradients
        activations = MARGIN * (kept + self.block)
        return int(self.states + self.gradients + self.weights + self.logits + activations) + FIXED_BYTES


def trainer_memory(
    shape: ModelShape,
    *,
    num_ranks: int,
    num_tokens: int,
    chunk_size: int,
    is_compiled: bool,
    keeps_weights: bool,
    compute_bytes: int = 2,
    num_trained: int | None = None,
    is_offloaded: bool = False,
) -> TrainerMemory:
    """`num_tokens`: of the longest pack on one GPU. `chunk_size`: rows of logits at a time. `keeps_weights`: the whole
    weights stay from the forward to the backward pass (one rank) instead of being gathered block by block.
    `num_trained`: parameters with gradients and moments, where they are not all. `is_offloaded`: shards of masters,
    gradients and moments are in host memory.
    """
    trained = shape.num_params if num_trained is None else num_trained
    shards = (MASTER_BYTES * shape.num_params + ADAM_BYTES * trained) / num_ranks
    reduced = math.ceil(trained / num_ranks) * (num_ranks > 1)
    embedding = shape.vocab * shape.hidden
    block_params = max(0, shape.num_params - embedding) // shape.num_layers
    whole = shape.num_params if keeps_weights else min(shape.num_params, 2 * block_params + embedding)
    rows = min(chunk_size, num_tokens)
    # compiled: logits and their gradient. eager: beside them two float32 copies
    logit_bytes = 2 * compute_bytes + (0 if is_compiled else 8)
    return TrainerMemory(
        num_layers=shape.num_layers,
        states=0 if is_offloaded else math.ceil(shards),
        gradients=GRADIENT_BYTES * (reduced + trained),
        weights=compute_bytes * whole,
        logits=rows * shape.vocab * logit_bytes + embedding * (4 + 2 * compute_bytes),
        block=num_tokens * block_bytes_per_token(shape, is_compiled=is_compiled, compute_bytes=compute_bytes),
        block_input=num_tokens * shape.hidden * compute_bytes,
    )


def auto_chunk_size(vocab_size: int, *, is_cuda: bool) -> int:
    """Rows of a chunk where nobody chose: on a GPU as many as fill `CHUNK_BYTES` with float32 logits, else 1024.

    Larger chunks feed the matrix products better; the gradient of the head is added up once a chunk.
    """
    if not is_cuda:
        return 1024
    return max(1024, CHUNK_BYTES // 4 // vocab_size // 256 * 256)


def block_bytes_per_token(shape: ModelShape, *, is_compiled: bool, compute_bytes: int = 2) -> int:
    """Bytes that one block keeps of a token.

    Eager, each RMS norm keeps its input in float32 and the normalised values, and the matrix products after it its
    output; after the norms of q and k comes the rotary embedding, which keeps nothing; attention keeps q, k, v and its
    output; the MLP gate, activated gate, up and their product. Compiled, norms and products are made again from what
    the matrix products and attention need anyway.
    """
    hidden, queries, keys, wide = shape.hidden, shape.queries, shape.keys, shape.intermediate
    if is_compiled:
        # block input, both norms' outputs, the sum in between; q and k before and after norm and rotation, v twice,
        # attention's output; gate, up and their product
        return compute_bytes * (4 * hidden + 3 * queries + 3 * keys + 3 * wide)
    norm = 4 + compute_bytes
    norms = 2 * (norm + compute_bytes) * hidden + norm * (queries + keys)
    return norms + compute_bytes * (2 * queries + 2 * keys + 4 * wide)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointingPlan:
    """How many blocks recompute their activations in the backward pass, and why."""

    num_blocks: int
    reason: str


def plan_checkpointing(memory: TrainerMemory, room_bytes: int, num_tokens: int) -> CheckpointingPlan:
    """The fewest checkpointed blocks with which a pack of `num_tokens` fits into `room_bytes`; all, where none do."""
    fits = (count for count in range(memory.num_layers + 1) if memory.peak(count) <= room_bytes)
    chosen = next(fits, None)
    pack = f"a pack of {num_tokens:,} tokens"
    room = f"{room_bytes / GIB:.1f} GiB"
    if chosen is None:
        least = memory.peak(memory.num_layers) / GIB
        reason = (
            f"{pack} is estimated to need {least:.1f} GiB even so, of {room}; if memory runs out, lower"
            " --max-tokens-per-gpu"
        )
        return CheckpointingPlan(num_blocks=memory.num_layers, reason=reason)
    need = memory.peak(chosen) / GIB
    if chosen == 0:
        return CheckpointingPlan(num_blocks=0, reason=f"{pack} is estimated to need {need:.1f} of {room}")
    without = memory.peak(0) / GIB
    reason = f"{pack} is estimated to need {without:.1f} GiB without and {need:.1f} with it, of {room}"
    return CheckpointingPlan(num_blocks=chosen, reason=reason)
