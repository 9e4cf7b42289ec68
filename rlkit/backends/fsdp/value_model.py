"""The critic's module: the policy's backbone with a scalar head. Called by `critic.py`.

Its parameters are called as in transformers' token classifiers of one label (`model....`, `score.weight`), so that such
a checkpoint is a critic's and the other way round.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rlkit.backends.attention.packed import PackedLayout
from rlkit.backends.fsdp.export import BUCKET_BYTES
from rlkit.backends.fsdp.model import (
    ScoringModel,
    distinct_rows,
    first_local_row,
    local_shard,
    named_persistent_buffers,
    named_shards,
)
from rlkit.backends.fsdp.weights import FsdpWeights
from rlkit.backends.hf_writer import MAX_FILE_BYTES, HfWriter, copy_companions
from rlkit.backends.loading import CheckpointReader
from rlkit.dist.collectives import barrier
from rlkit.dist.context import merge_scores
from rlkit.dist.groups import RankMesh
from rlkit.types.errors import CheckpointError

HEAD = "score.weight"
UNUSED = {"lm_head.weight", "lm_head.bias", "score.bias"}
"""What checkpoints may hold and a critic has no use for."""


class ValueModel(ScoringModel):
    """A value for every token of a packed row, instead of its log-prob."""

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__(hf_model)
        width = self._head().weight.shape[1]
        hf_model.set_output_embeddings(nn.Identity())
        with torch.device("meta"):
            self.score = nn.Linear(width, 1, bias=False, dtype=torch.float32)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # a trainer of its own calls it
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        layout: PackedLayout,
        scored_N: Tensor,
        predictors_N: Tensor,
    ) -> Tensor:
        """Values, float32 [T], of the states in which the tokens at `scored_N` were sampled; zero elsewhere. The
        arguments are those of `ScoringModel.forward`.
        """
        hidden_ND = distinct_rows(self._own_hidden(tokens_T, positions_T, layout), predictors_N)
        values_N = linear(hidden_ND.float(), self.score.weight.float()).squeeze(1)
        values_T = torch.zeros_like(tokens_T, dtype=torch.float32).index_copy(0, scored_N, values_N)
        if layout.context is not None and layout.context.group is not None:
            values_T = merge_scores(values_T, layout.context.group)
        return values_T


def load_value_weights(model: ValueModel, reader: CheckpointReader, mesh: RankMesh) -> None:
    """Fill the model from a policy's or a critic's checkpoint; every rank reads its own rows only. A head that is not
    there becomes zero: all values are 0 until the critic has learned something.
    """
    shards, buffers = dict(named_shards(model)), list(named_persistent_buffers(model))
    read = [name for name in shards if name != HEAD or reader.has(HEAD)]
    reader.check_names([*read, *(name for name, _ in buffers)], tied=UNUSED)
    with torch.no_grad():
        for name, parameter in shards.items():
            local = local_shard(parameter)
            if name in read:
                first = first_local_row(parameter, mesh)
                local.copy_(reader.read_rows(name, tuple(parameter.shape), first, local.shape[0]))
            else:
                local.zero_()
        for name, buffer in buffers:
            buffer.copy_(reader.read_rows(name, tuple(buffer.shape), 0, buffer.shape[0] if buffer.dim() else 1))


def export_critic(model: ValueModel, mesh: RankMesh, source: CheckpointReader, directory: Path) -> None:
    """Write `directory` as a token classifier of one label, in the dtypes of `source`, the head in float32. Collective;
    rank 0 writes. `config.json` comes last.
    """
    if directory.resolve() == source.path.resolve():
        raise CheckpointError(f"refusing to export over {directory}: the critic started from it; choose another folder")
    tensors = [*named_shards(model), *named_persistent_buffers(model)]
    dtypes = {name: torch.float32 if name == HEAD else source.dtype(name) for name, _ in tensors}
    weights = FsdpWeights(model, mesh, dtype_of=dtypes)
    writer = HfWriter(directory, weights.specs(), MAX_FILE_BYTES) if mesh.is_main else None
    for bucket in weights.buckets(BUCKET_BYTES):
        if writer is not None:
            for name, tensor in bucket.tensors():
                writer.add(name, tensor)
    if writer is not None:
        writer.finish()
        copy_companions(source.path, directory)
        _name_head(directory / "config.json")
    barrier()


def _name_head(path: Path) -> None:
    """Say in the configuration what the checkpoint is."""
    config = json.loads(path.read_text(encoding="utf-8"))
    names = [name.replace("ForCausalLM", "ForTokenClassification") for name in config.get("architectures") or ()]
    config |= {
        "architectures": names,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
