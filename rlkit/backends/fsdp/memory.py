"""How blocks are run, from the memory of this rank's GPU: which recompute their activations, whether whole weights are
kept. Called by `backend.py`; the estimates are in `algo/memory_plan.py`.
"""

import torch

from rlkit.algo.memory_plan import TrainerMemory, auto_chunk_size, model_shape, plan_checkpointing, trainer_memory
from rlkit.algo.phase_memory import ASLEEP_BYTES, FREE_SHARE, longest_pack
from rlkit.backends.fsdp.compilation import is_compiled
from rlkit.backends.fsdp.model import BlockPlan, ScoringModel, blocks_of
from rlkit.config.schema import RunConfig
from rlkit.dist.groups import RankMesh


def choose_blocks(
    cfg: RunConfig, model: ScoringModel, mesh: RankMesh, dtype: torch.dtype, *, num_resident_bytes: int = 0
) -> BlockPlan:
    """The plan of a model that is trained, on the meta device. `--gradient-checkpointing` and its `--no-` form win over
    the estimate. `num_resident_bytes`: what lies on the GPU beside it.
    """
    compiled = is_compiled(cfg.train.torch_compile, mesh.device)
    num_layers = len(blocks_of(model))
    alone = mesh.shard_size == 1
    manner = "compiled" if compiled else "eager"

    def chosen(num_checkpointed: int, keeps_weights: bool, reason: str) -> BlockPlan:
        return BlockPlan(
            num_checkpointed=num_checkpointed,
            keeps_weights=keeps_weights,
            is_compiled=compiled,
            sentence=f"{manner} blocks, gradient checkpointing of {num_checkpointed} of {num_layers}: {reason}",
        )

    forced = cfg.train.gradient_checkpointing
    if forced is not None:
        return chosen(num_layers * forced, alone, "as the flag says")
    if mesh.device.type != "cuda":
        return chosen(0, alone, "only GPUs are planned")
    num_params = sum(parameter.numel() for parameter in model.parameters())
    shape = model_shape(model.config.get_text_config().to_dict(), num_params)
    if shape is None:
        return chosen(num_layers, alone, "this architecture's memory is not known; --no-gradient-checkpointing")
    num_tokens = longest_pack(cfg)

    def memory(keeps_weights: bool) -> TrainerMemory:
        return trainer_memory(
            shape,
            num_ranks=mesh.shard_size,
            num_tokens=num_tokens,
            chunk_size=chunk_size(cfg, shape.vocab, mesh.device),
            is_compiled=compiled,
            keeps_weights=keeps_weights,
            compute_bytes=dtype.itemsize,
            num_trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            is_offloaded=cfg.fsdp.fsdp_cpu_offload,
        )

    total = torch.cuda.get_device_properties(mesh.device).total_memory
    shared = ASLEEP_BYTES if cfg.cluster.colocate and cfg.starts_engines else 0
    room = int(FREE_SHARE * total) - shared - num_resident_bytes
    keeps_weights = alone and memory(True).peak(num_layers) <= room
    plan = plan_checkpointing(memory(keeps_weights), room, num_tokens)
    return chosen(plan.num_blocks, keeps_weights, plan.reason)


def chunk_size(cfg: RunConfig, vocab_size: int, device: torch.device) -> int:
    """`--log-probs-chunk-size`, or what suits the device."""
    return cfg.train.log_probs_chunk_size or auto_chunk_size(vocab_size, is_cuda=device.type == "cuda")
