"""Which Hugging Face tensors each Megatron parameter holds, and how they are laid out in it. Called by `loading.py`,
`weights.py` and `checkpoint.py`.

Every rule is local: a parameter of one tensor-parallel rank is made of that rank's slices of Hugging Face tensors. So
loading slices and packs, exporting unpacks and gathers, and no rank needs a whole model.

Shapes: K key/value heads of a rank, r query heads for each of them, D head size, H hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.backends.megatron.architecture import Architecture, Experts, Latent
from rlkit.backends.megatron.parallel import Chunk

Pack = Callable[[list[Tensor]], Tensor]
Unpack = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    """Dimension that is dealt over the tensor-parallel ranks; None where each has all of it."""
    is_float32: bool = False
    """Kept and sent in float32 whatever the compute dtype."""


class Parts(NamedTuple):
    """What a parameter is made of, and how."""

    pieces: tuple[Piece, ...]
    pack: Pack
    unpack: Unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A Megatron parameter (or buffer)."""

    stage: int
    chunk: int
    path: str
    """Name inside its chunk."""
    pieces: tuple[Piece, ...]
    pack: Pack
    unpack: Unpack
    expert: int | None = None
    """Number of the expert in the whole model that it belongs to."""
    is_copy: bool = False
    """A second copy of a tied matrix: loaded, never exported."""


def entries(architecture: Architecture, chunks: list[Chunk], *, expert_ranks: int = 1) -> list[Entry]:
    """All parameters of the whole model in a fixed order, the same on every rank."""
    found: list[Entry] = []
    for chunk in chunks:
        if chunk.is_first:
            found.append(_entry(chunk, "embedding.word_embeddings.weight", _vocabulary(architecture, EMBEDDING)))
        for local, layer in enumerate(chunk.layers):
            for path, expert, parts in _layer(architecture, layer, expert_ranks):
                found.append(_entry(chunk, f"decoder.layers.{local}.{path}", parts, expert=expert))
        if chunk.is_last:
            norm = _whole(Piece(name="model.norm.weight", shape=(architecture.hidden_size,), axis=None))
            found.append(_entry(chunk, "decoder.final_layernorm.weight", norm))
            found += _head(architecture, chunk)
    return found


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def _head(architecture: Architecture, chunk: Chunk) -> Iterator[Entry]:
    if architecture.is_tied and chunk.is_first:
        return  # the head reads the embedding's own matrix
    name = EMBEDDING if architecture.is_tied else HEAD
    yield _entry(chunk, "output_layer.weight", _vocabulary(architecture, name), is_copy=architecture.is_tied)


def _entry(chunk: Chunk, path: str, parts: Parts, *, expert: int | None = None, is_copy: bool = False) -> Entry:
    return Entry(
        stage=chunk.stage,
        chunk=chunk.index,
        path=path,
        pieces=parts.pieces,
        pack=parts.pack,
        unpack=parts.unpack,
        expert=expert,
        is_copy=is_copy,
    )


def padded_rows(vocab_size: int, tensor_ranks: int) -> int:
    """Rows of the vocabulary on each tensor-parallel rank; the last ranks' surplus rows are zero and never used."""
    return -(-vocab_size // tensor_ranks)


# ---- rules ---------------------------------------------------------------------------------------------------------


def _whole(piece: Piece) -> Parts:
    return Parts((piece,), _only, _as_list)


def _only(parts: list[Tensor]) -> Tensor:
    return parts[0]


def _as_list(whole: Tensor) -> list[Tensor]:
    return [whole]


def _vocabulary(architecture: Architecture, name: str) -> Parts:
    return _whole(Piece(name=name, shape=(architecture.vocab_size, architecture.hidden_size), axis=0))


def _layer(architecture: Architecture, layer: int, expert_ranks: int) -> Iterator[tuple[str, int | None, Parts]]:
    prefix = f"model.layers.{layer}."
    hidden = architecture.hidden_size

    def norm(path: str, name: str, size: int) -> tuple[str, None, Parts]:
        return path, None, _whole(Piece(name=prefix + name, shape=(size,), axis=None))

    yield norm("input_layernorm.weight", "input_layernorm.weight", hidden)
    if architecture.latent is not None:
        yield from _latent_attention(architecture, architecture.latent, prefix)
    else:
        yield from _attention(architecture, prefix)
    yield norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden)
    if architecture.is_expert_layer(layer):
        assert architecture.experts is not None
        yield from _expert_layer(architecture, architecture.experts, prefix + "mlp.", expert_ranks)
    else:
        yield from (
            (path, None, parts) for path, parts in _gated("mlp.", prefix + "mlp.", hidden, architecture.ffn_size)
        )


def _attention(architecture: Architecture, prefix: str) -> Iterator[tuple[str, None, Parts]]:
    size, hidden = architecture.head_size, architecture.hidden_size
    repeats = architecture.num_heads // architecture.num_kv_heads
    rows = {"q": architecture.num_heads * size, "k": architecture.num_kv_heads * size}
    rows["v"] = rows["k"]
    pack = partial(pack_heads, size=size, repeats=repeats)
    unpack = partial(unpack_heads, size=size, repeats=repeats)
    attention = prefix + "self_attn."
    kinds = {"weight": (hidden,), "bias": ()} if architecture.has_qkv_bias else {"weight": (hidden,)}
    for kind, rest in kinds.items():
        pieces = tuple(
            Piece(name=f"{attention}{part}_proj.{kind}", shape=(count, *rest), axis=0) for part, count in rows.items()
        )
        yield f"self_attention.linear_qkv.{kind}", None, Parts(pieces, pack, unpack)
    if architecture.has_qk_norm:
        for part in "qk":
            norm = Piece(name=f"{attention}{part}_norm.weight", shape=(size,), axis=None)
            yield f"self_attention.{part}_layernorm.weight", None, _whole(norm)
    out = Piece(name=attention + "o_proj.weight", shape=(hidden, rows["q"]), axis=1)
    yield "self_attention.linear_proj.weight", None, _whole(out)


def pack_heads(parts: list[Tensor], *, size: int, repeats: int) -> Tensor:
    """q [K r D, ...], k and v [K D, ...] -> [K (r + 2) D, ...]: for each key head its queries, then key, then value."""
    query, key, value = parts
    heads, rest = key.shape[0] // size, key.shape[1:]
    grouped = [
        query.reshape(heads, repeats * size, *rest),
        key.reshape(heads, size, *rest),
        value.reshape(heads, size, *rest),
    ]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def unpack_heads(packed: Tensor, *, size: int, repeats: int) -> list[Tensor]:
    heads, rest = packed.shape[0] // ((repeats + 2) * size), packed.shape[1:]
    parts = packed.reshape(heads, -1, *rest).split([repeats * size, size, size], dim=1)
    return [part.reshape(-1, *rest) for part in parts]


def _gated(path: str, prefix: str, hidden: int, ffn: int) -> Iterator[tuple[str, Parts]]:
    """A gated MLP: gate and up projection are one matrix."""
    pieces = tuple(Piece(name=f"{prefix}{part}_proj.weight", shape=(ffn, hidden), axis=0) for part in ("gate", "up"))
    yield f"{path}linear_fc1.weight", Parts(pieces, torch.cat, _halves)
    down = Piece(name=prefix + "down_proj.weight", shape=(hidden, ffn), axis=1)
    yield f"{path}linear_fc2.weight", _whole(down)


def _halves(packed: Tensor) -> list[Tensor]:
    return list(packed.chunk(2))


def _expert_layer(
    architecture: Architecture, experts: Experts, prefix: str, expert_ranks: int
) -> Iterator[tuple[str, int | None, Parts]]:
    hidden, local = architecture.hidden_size, experts.num_experts // expert_ranks
    router = Piece(name=prefix + "gate.weight", shape=(experts.num_experts, hidden), axis=None)
    yield "mlp.router.weight", None, _whole(router)
    if experts.has_bias:
        bias = Piece(
            name=prefix + "gate.e_score_correction_bias", shape=(experts.num_experts,), axis=None, is_float32=True
        )
        yield "mlp.router.expert_bias", None, _whole(bias)
    for expert in range(experts.num_experts):
        inner = f"mlp.experts.local_experts.{expert % local}."
        for path, parts in _gated(inner, f"{prefix}experts.{expert}.", hidden, experts.ffn_size):
            yield path, expert, parts
    if experts.shared_size:
        for path, parts in _gated("mlp.shared_experts.", prefix + "shared_experts.", hidden, experts.shared_size):
            yield path, None, parts


def _latent_attention(architecture: Architecture, latent: Latent, prefix: str) -> Iterator[tuple[str, None, Parts]]:
    hidden, heads = architecture.hidden_size, architecture.num_heads
    attention = prefix + "self_attn."
    query_rows = heads * (latent.nope_size + latent.rope_size)

    def one(path: str, name: str, shape: tuple[int, ...], axis: int | None) -> tuple[str, None, Parts]:
        return f"self_attention.{path}.weight", None, _whole(Piece(name=attention + name, shape=shape, axis=axis))

    if latent.q_rank is None:
        yield one("linear_q_proj", "q_proj.weight", (query_rows, hidden), 0)
    else:
        yield one("linear_q_down_proj", "q_a_proj.weight", (latent.q_rank, hidden), 0)
        yield one("q_layernorm", "q_a_layernorm.weight", (latent.q_rank,), None)
        yield one("linear_q_up_proj", "q_b_proj.weight", (query_rows, latent.q_rank), 0)
    yield one("linear_kv_down_proj", "kv_a_proj_with_mqa.weight", (latent.kv_rank + latent.rope_size, hidden), 0)
    yield one("kv_layernorm", "kv_a_layernorm.weight", (latent.kv_rank,), None)
    up_rows = heads * (latent.nope_size + latent.v_size)
    yield one("linear_kv_up_proj", "kv_b_proj.weight", (up_rows, latent.kv_rank), 0)
    yield one("linear_proj", "o_proj.weight", (hidden, heads * latent.v_size), 1)
