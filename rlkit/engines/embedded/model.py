"""The transformers model behind the embedded engine: loading, and the two kinds of forward pass over the slot cache.

Everything here runs on the engine thread. `scheduler.py` says what to run, `engine.py` calls.

Shapes: B sequences, T packed tokens, R rows of logits asked for, V vocabulary.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlkit.algo.batch_invariant import make_batch_invariant
from rlkit.config.quantization import read_quantization
from rlkit.engines.embedded.attention import ATTENTION_NAME, DecodeStep, PrefillBlock, PrefillPass, register
from rlkit.engines.embedded.kv_cache import SlotCache
from rlkit.engines.embedded.weights import WeightStore
from rlkit.types.errors import EngineError

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPiece:
    """Part of a sequence that one prefill pass computes."""

    slot: int
    tokens: list[int]
    start: int
    """Position of the first token."""
    logit_rows: list[int]
    """Which of the tokens' logits are wanted, as offsets into `tokens`."""


class ModelRunner:
    """A causal language model and its slot cache."""

    def __init__(
        self, model: PreTrainedModel, *, max_slots: int, context_length: int, is_batch_invariant: bool = False
    ) -> None:
        """`is_batch_invariant`: compute every token as `algo/batch_invariant.py` says."""
        self.model = model
        self.is_batch_invariant = is_batch_invariant
        if is_batch_invariant:
            make_batch_invariant(model)
        self.device = model.device
        self.cache = SlotCache(max_slots=max_slots, max_length=context_length)
        self.vocab_size: int = model.config.get_text_config().vocab_size

    def prefill(self, pieces: Sequence[PromptPiece]) -> Tensor:
        """Compute and cache the pieces; the wanted logits [R, V], piece by piece in the order given.

        Pieces of one length that start at 0 share an attention call, so callers need not sort.
        """
        blocks, order = _blocks(pieces)
        tokens_T, positions_T, row_of = [], [], {}
        for index in order:
            piece = pieces[index]
            row_of[index] = [len(tokens_T) + row for row in piece.logit_rows]
            tokens_T.extend(piece.tokens)
            positions_T.extend(range(piece.start, piece.start + len(piece.tokens)))
        rows = [row for index in range(len(pieces)) for row in row_of[index]]
        logits = self._forward(
            torch.tensor([tokens_T], device=self.device),
            torch.tensor([positions_T], device=self.device),
            slots=PrefillPass(cache=self.cache, blocks=blocks, is_batch_invariant=self.is_batch_invariant),
            logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=self.device),
        )
        return logits[0]

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """One step of the sequences in slots 0..B-1: cache `tokens` at position `lengths`, next-token logits [B, V]."""
        lengths_B = torch.tensor(lengths, device=self.device)
        logits = self._forward(
            torch.tensor(tokens, device=self.device)[:, None],
            lengths_B[:, None],
            slots=DecodeStep(
                cache=self.cache,
                lengths_B=lengths_B,
                max_length=max(lengths) + 1,
                is_batch_invariant=self.is_batch_invariant,
            ),
            logits_to_keep=0,
        )
        return logits[:, 0]

    def _forward(self, tokens: Tensor, positions: Tensor, **options: Any) -> Tensor:
        return self.model(input_ids=tokens, position_ids=positions, use_cache=False, **options).logits

    @torch.inference_mode()
    def check_against_transformers(self) -> int:
        """Compare a prefill in two pieces and three decode steps with transformers' own attention.

        Returns the cache's bytes per token. EngineError when this architecture needs more than
        plain (grouped, sliding-window) causal attention.
        """
        ids = [(17 * i + 3) % self.vocab_size for i in range(11)]
        try:
            self.cache.reserve(1, len(ids))
            rows = [
                self.prefill([PromptPiece(slot=0, tokens=ids[:5], start=0, logit_rows=[4])]),
                self.prefill([PromptPiece(slot=0, tokens=ids[5:8], start=5, logit_rows=[2])]),
            ]
            rows += [self.decode([ids[i]], [i]) for i in range(8, len(ids))]
            ours = torch.cat(rows).float()
            bytes_per_token = self.cache.num_bytes // (self.cache.num_slots * self.cache.length)
            self.model.set_attn_implementation("sdpa")
            reference = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()
        except (TypeError, NotImplementedError, RuntimeError, KeyError) as error:
            raise EngineError(f"{self._name} cannot run on the embedded engine ({error}); use SGLang") from error
        finally:
            self.cache.free()
            self.model.set_attn_implementation(ATTENTION_NAME)
        expected = reference[[4, 7, 8, 9, 10]]
        error = ((ours - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item()
        limit = 1e-4 if self.model.dtype == torch.float32 else 5e-2
        if not error <= limit:
            raise EngineError(
                f"{self._name}: logits of the embedded engine differ from transformers' by {error:.2e} (relative, "
                f"limit {limit:g}); this architecture is not supported, use SGLang"
            )
        return bytes_per_token

    @property
    def _name(self) -> str:
        return f"model type {self.model.config.model_type!r}"


def _blocks(pieces: Sequence[PromptPiece]) -> tuple[list[PrefillBlock], list[int]]:
    """Attention blocks, and the order in which the pieces' tokens are packed for them."""
    same_length: dict[int, list[int]] = {}
    alone: list[int] = []
    for index, piece in enumerate(pieces):
        if piece.start == 0:
            same_length.setdefault(len(piece.tokens), []).append(index)
        else:
            alone.append(index)
    blocks = [
        PrefillBlock(slots=[pieces[index].slot for index in members], num_tokens=length, start=0)
        for length, members in same_length.items()
    ]
    blocks += [
        PrefillBlock(slots=[pieces[i].slot], num_tokens=len(pieces[i].tokens), start=pieces[i].start) for i in alone
    ]
    return blocks, [index for members in same_length.values() for index in members] + alone


def load_model(path: str, *, device: str, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """The checkpoint in `path`, on `device`, with the slot attention. EngineError when weights are missing."""
    register()
    if read_quantization(path) is not None:
        return _load_quantised(path, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=DTYPES[dtype],
        attn_implementation=ATTENTION_NAME,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    model, info = loaded
    if info["missing_keys"] or info["mismatched_keys"]:
        raise EngineError(f"{path}: tensors missing {info['missing_keys']}, of another shape {info['mismatched_keys']}")
    model = model.to(torch.device(device)).eval().requires_grad_(False)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # its own storage: a memory-mapped file cannot be freed, nor written to
    return model


def _load_quantised(path: str, *, device: str, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """An fp8 checkpoint, dequantised: transformers computes in fp8 on some GPUs only."""
    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    del config.quantization_config
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME, trust_remote_code=trust_remote_code
    )
    model = model.to(torch.device(device)).eval().requires_grad_(False)
    WeightStore(model).load_folder(Path(path))
    return model


def load_tokenizer(path: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def end_of_sequence_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a response unless `ignore_eos`: those of `generation_config.json` (or of the model's config where
    there is none) and the tokenizer's."""
    source = GenerationConfig if (Path(path) / "generation_config.json").exists() else AutoConfig
    ids: int | list[int] | None = source.from_pretrained(path).eos_token_id
    found = {ids} if isinstance(ids, int) else set(ids or ())
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def model_context_length(model: PreTrainedModel) -> int:
    """Longest sequence that the model's config allows."""
    length = model.config.get_text_config().max_position_embeddings
    assert isinstance(length, int)
    return length
