"""Writes the policy as an ordinary Hugging Face checkpoint. Called by `backend.py` at a save.

Tensors keep names and dtypes of the checkpoint that the run started from, but fp8 becomes bfloat16; a tied head is left
out, as transformers does; configuration, tokenizer and generation files are copied as they are. Adapters are merged,
and also written by themselves into `adapter/`, as peft writes them.
"""

from pathlib import Path

from torch import Tensor

from rlkit.backends.fsdp.lora import adapter_files, is_adapter, lora_scaling
from rlkit.backends.fsdp.model import (
    ScoringModel,
    base_shards,
    local_shard,
    named_persistent_buffers,
    named_shards,
)
from rlkit.backends.fsdp.weights import FsdpWeights
from rlkit.backends.hf_writer import MAX_FILE_BYTES, HfWriter, copy_companions
from rlkit.backends.loading import CheckpointReader
from rlkit.config.schema import LoraConfig
from rlkit.dist.collectives import barrier, gather_rows
from rlkit.dist.groups import RankMesh
from rlkit.types.errors import CheckpointError

BUCKET_BYTES = 1024**3


def export_hf(
    model: ScoringModel,
    mesh: RankMesh,
    source: CheckpointReader,
    directory: Path,
    *,
    lora: LoraConfig,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `directory`. Collective; rank 0 writes, holding at most one file's tensors. Returns when the files are
    complete.

    `config.json` is written last: a folder without it is not taken for a checkpoint.
    """
    if directory.resolve() == source.path.resolve():
        raise CheckpointError(f"refusing to export over {directory}: the run started from it; choose another folder")
    dtypes = {name: source.dtype(name) for name, _ in [*base_shards(model), *named_persistent_buffers(model)]}
    weights = FsdpWeights(model, mesh, dtype_of=dtypes, lora_scaling=lora_scaling(lora))
    writer = HfWriter(directory, weights.specs(), max_file_bytes) if mesh.is_main else None
    for bucket in weights.buckets(BUCKET_BYTES):
        if writer is not None:
            for name, tensor in bucket.tensors():
                writer.add(name, tensor)
    factors: dict[str, Tensor] = {}
    for name, shard in named_shards(model):
        if is_adapter(name):
            factors[name] = gather_rows(local_shard(shard), shard.shape[0], mesh).cpu()
    if writer is not None:
        writer.finish()
        if factors:
            adapter_files(directory / "adapter", factors, lora, source.path)
        copy_companions(source.path, directory)
    barrier()
