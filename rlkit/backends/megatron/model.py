"""One pipeline stage of the model (several chunks under virtual pipelining), and how it scores tokens. Called by
`backend.py` and `pipeline.py`.

Shapes: T tokens of the row on this rank, N scored tokens, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlkit.backends.attention.packed import PackedAttention
from rlkit.backends.megatron.architecture import Architecture
from rlkit.backends.megatron.configuration import transformer_config
from rlkit.backends.megatron.layers import block_spec, set_rope_factor
from rlkit.backends.megatron.names import padded_rows
from rlkit.backends.megatron.parallel import Chunk, Ranks, deal_layers
from rlkit.backends.megatron.rope import angles, inverse_frequencies
from rlkit.backends.megatron.vocabulary import parallel_log_probs
from rlkit.config.schema import RunConfig
from rlkit.dist.context import merge_scores


class PackedGpt(GPTModel):
    """Megatron's GPT model for a packed row: angles by position, hidden states out."""

    def __init__(self, architecture: Architecture, *, ranks: Ranks, chunk: Chunk, vp_stage: int | None, **options: Any):
        super().__init__(
            vocab_size=padded_rows(architecture.vocab_size, ranks.tensor.size) * ranks.tensor.size,
            max_sequence_length=architecture.max_positions or 0,
            pre_process=chunk.is_first,
            post_process=chunk.is_last,
            share_embeddings_and_output_weights=architecture.is_tied,
            position_embedding_type="none",
            vp_stage=vp_stage,
            **options,
        )
        size = architecture.latent.rope_size if architecture.latent else architecture.head_size
        inverse, factor = inverse_frequencies(architecture.rope, size)
        for layer in self.decoder.layers:
            set_rope_factor(layer, factor)
        # no buffer: nothing of it belongs into a checkpoint
        self._inverse = inverse.to(ranks.device)
        self._ranks = ranks
        self._vocab_size = architecture.vocab_size
        self._padding_id = architecture.padding_id

    def forward(self, tokens_T: Tensor, positions_T: Tensor, handle: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[T, 1, D] (T / tensor-parallel ranks under sequence parallelism): what the next stage gets, or what `score`
        wants. `handle`: the micro-batch's layout.
        """
        hidden = None
        if self.pre_process:
            hidden = self._without_padding_grads(
                self.embedding(input_ids=tokens_T[None], position_ids=positions_T[None]), tokens_T
            )
        return self.decoder(
            hidden_states=hidden,
            attention_mask=handle,
            rotary_pos_emb=angles(self._inverse, positions_T),
        )

    def _without_padding_grads(self, hidden: Tensor, tokens_T: Tensor) -> Tensor:
        """`hidden`: [T, 1, D], or this rank's stretch of it under sequence parallelism. transformers' embedding gives
        the row of its `padding_idx` no gradient; that row is zero, so its norm would make a huge one.
        """
        if self._padding_id is None:
            return hidden
        length = hidden.shape[0]
        first = length * self._ranks.tensor.rank if self.config.sequence_parallel else 0
        is_padding_T = tokens_T[first : first + length] == self._padding_id
        return torch.where(is_padding_T[:, None, None], hidden.detach(), hidden)

    def score(
        self,
        hidden: Tensor,
        tokens_T: Tensor,
        scored_N: Tensor,
        predictors_N: Tensor,
        *,
        temperature: float,
        chunk_size: int,
        context: Any,
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies), float32, of the tokens of the row at `scored_N`; zero elsewhere. Last stage only.
        `predictors_N`: which of this rank's hidden states predicts each. `context`: the `ContextLayout`, if any.
        """
        if self.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(hidden)
        else:
            whole = copy_to_tensor_model_parallel_region(hidden)
        weight = self.shared_embedding_or_output_weight() if self._is_shared else self.output_layer.weight
        assert weight is not None
        rows = weight.shape[0]
        first = rows * self._ranks.tensor.rank
        count = max(0, min(rows, self._vocab_size - first))
        logp_N, entropy_N = parallel_log_probs(
            whole[:, 0][predictors_N],
            weight[:count],
            tokens_T[scored_N],
            first_row=first,
            group=self._ranks.tensor.group,
            temperature=temperature,
            chunk_size=chunk_size,
        )
        zeros_T = torch.zeros_like(tokens_T, dtype=torch.float32)
        logp_T, entropy_T = zeros_T.index_copy(0, scored_N, logp_N), zeros_T.index_copy(0, scored_N, entropy_N)
        if context is not None:
            logp_T, entropy_T = merge_scores(torch.stack([logp_T, entropy_T]), context.group)
        return logp_T, entropy_T

    @property
    def _is_shared(self) -> bool:
        return self.share_embeddings_and_output_weights and self.pre_process


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What one rank holds of a model."""

    architecture: Architecture
    config: TransformerConfig
    chunks: list[PackedGpt]
    """In the order of their numbers."""
    dealt: list[Chunk]
    """All chunks of all stages."""
    dtype: torch.dtype

    def named_parameters(self) -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
        """((chunk, path inside it), parameter)."""
        for index, chunk in enumerate(self.chunks):
            for path, parameter in chunk.named_parameters():
                yield (index, path), parameter

    def tensors(self) -> dict[tuple[int, str], Tensor]:
        """Parameters and buffers that a checkpoint holds."""
        found: dict[tuple[int, str], Tensor] = dict(self.named_parameters())
        for index, chunk in enumerate(self.chunks):
            for path, buffer in chunk.named_buffers():
                found[index, path] = buffer
        return found

    @property
    def last(self) -> PackedGpt:
        return self.chunks[-1]


def build_model(
    architecture: Architecture,
    cfg: RunConfig,
    ranks: Ranks,
    *,
    attention: PackedAttention,
    dtype: torch.dtype,
    trainable: bool,
) -> Model:
    """This rank's chunks with uninitialised weights. Collective: a tied matrix is compared between stages."""
    sizes = cfg.megatron
    config = transformer_config(architecture, cfg, dtype, recomputes=trainable)
    dealt = deal_layers(
        architecture.num_layers,
        stages=ranks.pipeline.size,
        chunks_per_stage=sizes.virtual_pipeline_size or 1,
        first=sizes.decoder_first_pipeline_num_layers,
        last=sizes.decoder_last_pipeline_num_layers,
    )
    chunks = []
    for chunk in sorted((c for c in dealt if c.stage == ranks.pipeline.rank), key=lambda c: c.index):
        model = PackedGpt(
            architecture,
            ranks=ranks,
            chunk=chunk,
            vp_stage=chunk.index if sizes.virtual_pipeline_size else None,
            config=config,
            transformer_layer_spec=cast(
                Any, block_spec(architecture, attention, layers=chunk.layers, has_last_norm=chunk.is_last)
            ),
        )
        chunks.append(model.train(trainable).requires_grad_(trainable))
    return Model(architecture=architecture, config=config, chunks=chunks, dealt=dealt, dtype=dtype)
