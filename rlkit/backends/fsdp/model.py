"""The policy (or reference) as one FSDP2 module: a transformers model whose output is token log-probs instead of
logits.

Called by `backend.py`. Built on the meta device, sharded, then filled: each rank reads its own rows of the checkpoint,
so no rank ever holds a whole copy.

Invariants: parameters are float32 shards where they are trained; a tied matrix is one parameter in the root's group
(sharding the embedding and the head apart would silently untie them); dropout is off, since old and new log-probs must
differ by the weights alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlkit.algo.batch_invariant import TILE
from rlkit.algo.logprobs import chunked_log_probs
from rlkit.backends.attention.packed import PackedAttention, PackedLayout, packed_layout
from rlkit.backends.fsdp.attention import register_attention
from rlkit.backends.fsdp.compilation import compile_blocks
from rlkit.backends.fsdp.lora import initial_factor, is_adapter, plain_name
from rlkit.backends.loading import CheckpointReader
from rlkit.backends.trained_parameters import trained_names
from rlkit.config.schema import ModelConfig, OptimizerConfig
from rlkit.dist.context import merge_scores
from rlkit.dist.groups import RankMesh
from rlkit.types.errors import ConfigError

PREFIX = "hf_model."


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlan:
    """How the blocks of a model are run."""

    num_checkpointed: int = 0
    """The first so many recompute their activations in the backward pass."""
    keeps_weights: bool = False
    """Whole weights stay from the first forward pass of an optimizer step to its last backward pass."""
    is_compiled: bool = False
    sentence: str = ""
    """What was chosen and why, for people."""


class ScoringModel(nn.Module):
    """Scores the tokens of a packed row. Sharded as one root, so that the head's weight is whole when the log-probs
    are made.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.plan = BlockPlan()
        self.is_batch_invariant = False
        """Log-probs are computed in tiles of one shape, as the layers then are."""

    @property
    def config(self) -> PreTrainedConfig:
        return self.hf_model.config

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        layout: PackedLayout,
        scored_N: Tensor,
        predictors_N: Tensor,
        *,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies), float32 [T], of the tokens at positions `scored_N`; zero elsewhere. T is at least
        1. `predictors_N`: which hidden state of this rank predicts each; without context parallelism the one before
        it. With it, every rank of the row gets all of the row's values.
        """
        context = layout.context
        hidden_TD = self._own_hidden(tokens_T, positions_T, layout)
        head = self._head()
        logp_N, entropy_N = chunked_log_probs(
            distinct_rows(hidden_TD, predictors_N),
            head.weight,
            tokens_T[scored_N],
            temperature=temperature,
            chunk_size=chunk_size,
            bias_V=head.bias,
            compiled=self.plan.is_compiled,
            tile=TILE if self.is_batch_invariant else None,
        )
        zeros_T = torch.zeros_like(tokens_T, dtype=torch.float32)
        logp_T, entropy_T = zeros_T.index_copy(0, scored_N, logp_N), zeros_T.index_copy(0, scored_N, entropy_N)
        if context is not None and context.group is not None:
            logp_T, entropy_T = merge_scores(torch.stack([logp_T, entropy_T]), context.group)
        return logp_T, entropy_T

    def check_scoring(self, token_ids: Tensor) -> float:
        """Largest difference between our log-probs and those of the architecture's own logits, for one sequence [T]."""
        layout = packed_layout(torch.tensor([0, len(token_ids)], dtype=torch.int32)).to(token_ids.device)
        positions_T = torch.arange(len(token_ids), device=token_ids.device)
        outputs = self.hf_model(
            input_ids=token_ids[None], position_ids=positions_T[None], use_cache=False, packed_layout=layout
        )
        theirs_TV = outputs.logits[0].float().log_softmax(-1)
        theirs_N = theirs_TV[:-1].gather(1, token_ids[1:, None]).squeeze(1)
        hidden_TD = self._hidden(token_ids, positions_T, layout)
        head = self._head()
        ours_N, _ = chunked_log_probs(
            hidden_TD[:-1], head.weight, token_ids[1:], temperature=1.0, chunk_size=len(token_ids), bias_V=head.bias
        )
        return (ours_N - theirs_N).abs().max().item()

    def _own_hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """Hidden states of the row's tokens, under context parallelism of this rank's alone."""
        if layout.context is None:
            return self._hidden(tokens_T, positions_T, layout)
        own = layout.context.positions
        return self._hidden(tokens_T[own], positions_T[own], layout)

    def _hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        outputs = self.hf_model.base_model(
            input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, packed_layout=layout
        )
        return outputs.last_hidden_state[0]

    def _head(self) -> nn.Linear:
        return cast(nn.Linear, self.hf_model.get_output_embeddings())


def build_model(
    path: Path,
    cfg: ModelConfig,
    mesh: RankMesh,
    *,
    attention: PackedAttention,
    compute_dtype: torch.dtype,
    trainable: bool,
    kind: type[ScoringModel] = ScoringModel,
    adapt: Callable[[ScoringModel], None] = lambda model: None,
    plan: Callable[[ScoringModel], BlockPlan] = lambda model: BlockPlan(),
    offload: bool = False,
) -> ScoringModel:
    """A sharded model with uninitialised parameters, from `path/config.json`. Fill it with `load_hf_weights` or a
    checkpoint.

    `adapt`, which may freeze parameters or add some, and then `plan` see the model on the meta device. Masters are
    float32 when `trainable`, else of `compute_dtype`; with `offload` they stay in host memory. Collective over all
    ranks (sharding makes no communication yet).
    """
    register_attention()
    config = AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
    _switch_off_dropout(config)
    with torch.device("meta"):
        hf_model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if trainable else compute_dtype,
            attn_implementation=attention.value,
            trust_remote_code=cfg.trust_remote_code,
        )
    hf_model.tie_weights()
    model = kind(hf_model)
    # train mode is what switches gradient checkpointing on; beside that it changes the dropout of adapters alone
    model.requires_grad_(trainable)
    adapt(model)
    model.train(trainable)
    model.plan = plan(model)
    _run_blocks_as_planned(model)
    buffers = _computed_buffers(hf_model)
    _shard(model, mesh, compute_dtype, offload=offload)
    model.to_empty(device="cpu" if offload else mesh.device)
    if offload:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(mesh.device)
    for name, value in buffers.items():
        hf_model.get_buffer(name).copy_(value)
    return model


def distinct_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] for an index without repetitions, where backward writes rows instead of adding them up in order."""
    picked: Tensor = _DistinctRows.apply(rows, index)
    return picked


class _DistinctRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, index, grad), None


def blocks_of(model: ScoringModel) -> list[nn.Module]:
    """The transformer blocks, in order."""
    names = set(model.hf_model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(
            f"{type(model.hf_model).__name__} does not name its blocks (_no_split_modules), "
            "so the FSDP backend cannot shard it"
        )
    return blocks


def _run_blocks_as_planned(model: ScoringModel) -> None:
    blocks, plan = blocks_of(model), model.plan
    if plan.num_checkpointed > 0:
        model.hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number, block in enumerate(blocks):
            if isinstance(block, GradientCheckpointingLayer):
                block.gradient_checkpointing = number < plan.num_checkpointed
    if plan.is_compiled:
        compile_blocks(blocks)


def _switch_off_dropout(config: PreTrainedConfig) -> None:
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def _shard(model: ScoringModel, mesh: RankMesh, compute_dtype: torch.dtype, *, offload: bool) -> None:
    """`fully_shard` on every block, then on the root, whose group keeps embedding, last norm and head together."""
    # Nothing needs casting on its way in: the embedding's output has the compute dtype. Asking FSDP2 to look would make
    # it walk through every argument of every block, the layout with its hundreds of lengths among them.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    home = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh.layout, "mp_policy": policy, "offload_policy": home}
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=not model.plan.keeps_weights, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "check_scoring")


def _computed_buffers(hf_model: PreTrainedModel) -> dict[str, Tensor]:
    """Values of the buffers that no checkpoint holds, such as rotary frequencies, of a model on the meta device."""
    names = [name for name, _ in hf_model.named_non_persistent_buffers()]
    owners = {name: hf_model.get_submodule(name.rpartition(".")[0]) for name in names}
    for name, owner in owners.items():
        leaf = name.rpartition(".")[2]
        buffer = owner.get_buffer(leaf)
        owner.register_buffer(leaf, torch.full_like(buffer, _unset(buffer.dtype), device="cpu"), persistent=False)
    for owner in owners.values():
        hf_model._init_weights(owner)  # parameters are on the meta device still: only buffers are computed
    for name in names:
        buffer = hf_model.get_buffer(name)
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer.dtype)
        if unset.any():
            raise ConfigError(
                f"{type(hf_model).__name__} does not say how to fill its buffer {name}; it cannot be built"
            )
    return {name: hf_model.get_buffer(name) for name in names}


def _unset(dtype: torch.dtype) -> float:
    """A value that no computed buffer holds."""
    if dtype.is_floating_point:
        return float("nan")
    return torch.iinfo(dtype).min


def fsdp(model: ScoringModel) -> FSDPModule:
    """The same object under the type that `fully_shard` gave it."""
    return cast(FSDPModule, model)


def reshard(model: ScoringModel) -> None:
    """Free the whole weights of every block and of the root, which a forward pass without a backward one leaves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_shards(model: ScoringModel) -> Iterator[tuple[str, DTensor]]:
    """(Hugging Face name, sharded parameter); a tied matrix appears once. Adapters among them."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        yield plain_name(name.removeprefix(PREFIX)), parameter


def base_shards(model: ScoringModel) -> Iterator[tuple[str, DTensor]]:
    """The same without adapters: what a Hugging Face checkpoint holds."""
    return ((name, shard) for name, shard in named_shards(model) if not is_adapter(name))


def saved_tensors(model: ScoringModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of the model's part of a checkpoint: adapters where there are any, because their base
    never changes, else all parameters and buffers.
    """
    adapters = [(name, shard) for name, shard in named_shards(model) if is_adapter(name)]
    yield from adapters or [*named_shards(model), *named_persistent_buffers(model)]


def local_shard(parameter: DTensor) -> Tensor:
    """This rank's rows as a plain tensor on the same memory."""
    return parameter.to_local().detach()


def named_persistent_buffers(model: ScoringModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, buffer) of what a checkpoint holds beside parameters; replicated on every rank."""
    temporary = {name for name, _ in model.hf_model.named_non_persistent_buffers()}
    for name, buffer in model.hf_model.named_buffers():
        if name not in temporary:
            yield name, buffer


def load_hf_weights(model: ScoringModel, reader: CheckpointReader, mesh: RankMesh) -> None:
    """Fill parameters and persistent buffers from a Hugging Face checkpoint, all but adapters; every rank reads its own
    rows only.
    """
    names = [name for name, _ in base_shards(model)]
    buffers = list(named_persistent_buffers(model))
    ignorable = getattr(model.hf_model, "all_tied_weights_keys", {})
    reader.check_names([*names, *(name for name, _ in buffers)], tied=set(ignorable))
    with torch.no_grad():
        for name, parameter in base_shards(model):
            local = local_shard(parameter)
            first_row = first_local_row(parameter, mesh)
            local.copy_(reader.read_rows(name, tuple(parameter.shape), first_row, local.shape[0]))
        for name, buffer in buffers:
            buffer.copy_(reader.read_rows(name, tuple(buffer.shape), 0, buffer.shape[0] if buffer.dim() else 1))


def freeze(model: ScoringModel, cfg: OptimizerConfig) -> None:
    """Take gradients from the parameters that are not to be trained; before `fully_shard`."""
    parameters = {name.removeprefix(PREFIX): parameter for name, parameter in model.named_parameters()}
    trained = trained_names(list(parameters), cfg)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)


def initialize_adapters(model: ScoringModel, mesh: RankMesh, seed: int) -> None:
    """First values of the adapters, the same for any number of ranks."""
    for name, parameter in named_shards(model):
        if is_adapter(name):
            local, first = local_shard(parameter), first_local_row(parameter, mesh)
            local.copy_(initial_factor(name, parameter.shape, seed)[first : first + local.shape[0]])


def first_local_row(parameter: DTensor, mesh: RankMesh) -> int:
    """Global index of this rank's first row. FSDP2 deals dimension 0 in equal chunks, the last ones shorter or
    empty.
    """
    rows_per_rank = -(-parameter.shape[0] // mesh.shard_size)
    return min(mesh.shards.get_local_rank() * rows_per_rank, parameter.shape[0])


def max_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence the architecture was built for; None where it does not say."""
    limit: Any = config.to_dict().get("max_position_embeddings")
    return int(limit) if limit else None
