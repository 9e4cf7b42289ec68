"""Runs micro-batches through the stages with Megatron's schedules. Called by `trainer.py`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rlkit.backends.megatron.batches import MicroBatch
from rlkit.backends.megatron.model import Model

LastStage = Callable[[MicroBatch, Tensor], Tensor]
"""(micro-batch, last hidden states) -> loss, or what is scored. Called on the last stage only, in the order of the
micro-batches."""


def forward_backward(
    model: Model, chunks: Sequence[nn.Module], micro_batches: Sequence[MicroBatch], last_stage: LastStage
) -> None:
    """Forward and backward over all micro-batches; gradients are added to the buffers. Collective over the pipeline."""

    def loss_of(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        loss = last_stage(micro, hidden)
        # a count that Megatron only adds up: denominators are in the batch already
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

    _run(model, chunks, micro_batches, loss_of, forward_only=False)


def forward_only(
    model: Model, chunks: Sequence[nn.Module], micro_batches: Sequence[MicroBatch], last_stage: LastStage
) -> list[Tensor]:
    """What `last_stage` gives for each micro-batch; on other stages nothing. Collective over the pipeline."""

    def scores_of(micro: MicroBatch, hidden: Tensor, non_loss_data: bool) -> Tensor:
        return last_stage(micro, hidden)

    return _run(model, chunks, micro_batches, scores_of, forward_only=True)


def _run(
    model: Model,
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    at_the_end: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    def step(batches: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro = next(batches)
        hidden = chunk(micro.tokens_T, micro.positions_T, micro.layout.handle)
        return hidden, partial(at_the_end, micro)

    iterators = [iter(micro_batches) for _ in chunks]
    run = get_forward_backward_func()
    return run(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].tokens_T.numel(),  # the shapes themselves travel: variable_seq_lengths
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
