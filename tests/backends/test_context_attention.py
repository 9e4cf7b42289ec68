"""Context parallelism below the model: who holds what, and attention of each rank against the whole row's."""

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from test_packed_attention import attend, random_heads
from torch import Tensor
from transformers import AttentionInterface

from rlkit.algo.context_shards import held_positions, num_padding_tokens, scored_by
from rlkit.backends.attention import kernels
from rlkit.backends.attention.context import attend_stretches, context_layout, dense_stretch
from rlkit.backends.attention.packed import PackedAttention, packed_layout
from rlkit.backends.fsdp.attention import register_attention

CASES = {case["id"]: case for case in map(json.loads, (Path(__file__).parents[1] / "data" / "cases.jsonl").open())}
ROWS = {
    "one sequence": [24],
    "many": [3, 1, 17, 18, 40, 41, 4, 4],
    "as many tokens as ranks": [1, 1, 1, 1],
    "uneven halves": [5, 7],
    "single tokens": [1] * 12,
}


def test_zigzag_case() -> None:
    given, expected = CASES["cp-01"]["input"], CASES["cp-01"]["expected"]
    length = given["prompt_len"] + given["response_len"]
    padded = length + num_padding_tokens(length, given["cp"])
    assert padded == expected["padded_len"]
    response = range(given["prompt_len"], length)
    for rank in range(given["cp"]):
        assert held_positions(padded, cp=given["cp"], rank=rank) == expected["positions"][f"rank{rank}"]
        scored = scored_by(response, padded, cp=given["cp"], rank=rank)
        assert scored == expected["response_tokens_scored_by"][f"rank{rank}"]
    assert [num_padding_tokens(*pair) for pair in given["pad_cases"]] == expected["pads"]


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 28, 29, 84])
def test_every_token_is_held_once(num_tokens: int, cp: int) -> None:
    padded = num_tokens + num_padding_tokens(num_tokens, cp)
    assert padded - num_tokens <= cp - 1
    held = [held_positions(padded, cp=cp, rank=rank) for rank in range(cp)]
    assert {len(part) for part in held} == {padded // cp}
    assert sorted(position for part in held for position in part) == list(range(padded))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("row", ROWS)
def test_ranks_one_after_the_other_give_the_whole_rows_attention(row: str, cp: int, window: int | None) -> None:
    lengths = [*ROWS[row]]
    lengths += [1] * num_padding_tokens(sum(lengths), cp)
    q, k, v = (x[0].transpose(0, 1).double().requires_grad_() for x in random_heads(sum(lengths)))
    expected = attend(
        PackedAttention.REFERENCE,
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        lengths=lengths,
        sliding_window=window,
    )
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)

    output = torch.empty_like(expected)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for rank in range(cp):
        context = context_layout([0, *accumulate(lengths)], cp=cp, rank=rank, group=None)
        mine: Tensor = q.detach()[context.positions].requires_grad_()
        part = attend_stretches(mine, k, v, context, q.shape[-1] ** -0.5, window, dense_stretch)
        output[context.positions] = part
        dq, dk, dv = torch.autograd.grad(part, (mine, k, v), upstream[context.positions])
        grads[0][context.positions] += dq
        grads[1] += dk
        grads[2] += dv
    torch.testing.assert_close(output, expected.detach(), atol=1e-6, rtol=1e-6)
    for found, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, right, atol=1e-6, rtol=1e-6)


def test_a_long_sequence_is_attended_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in random_heads(64))
    context = context_layout([0, 64], cp=2, rank=1, group=None)
    whole = attend_stretches(q[context.positions], k, v, context, 0.3, None, dense_stretch)
    monkeypatch.setattr("rlkit.backends.attention.context.MAX_SCORES", 200)
    pieces = attend_stretches(q[context.positions], k, v, context, 0.3, None, dense_stretch)
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)


LONG_ROW = [20_000, 3, 700, 5_000, 1, 7_064]  # 32,768 tokens


@pytest.mark.gpu
@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("kind", ["fa2", "varlen"])
def test_ranks_of_a_long_row_give_the_whole_rows_attention_on_a_gpu(kind: str, cp: int) -> None:
    """bf16, 16 heads of 128 over 8 key heads."""
    if kind == "fa2" and not kernels.has_flash_attn():
        pytest.skip("flash-attn is not installed")
    stretch_kernel = {"fa2": kernels.fa2_stretch, "varlen": kernels.varlen_stretch}[kind]
    whole_kind = {"fa2": PackedAttention.FA2, "varlen": PackedAttention.VARLEN}[kind]
    generator = torch.Generator("cuda").manual_seed(0)
    size = sum(LONG_ROW)
    q, k, v = (
        torch.randn(size, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (16, 8, 8)
    )
    upstream = torch.randn(size, 16, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    layout = packed_layout(torch.tensor([0, *accumulate(LONG_ROW)], dtype=torch.int32)).to(q.device)
    register_attention()
    whole = AttentionInterface()[whole_kind.value](
        torch.nn.Module(), *(x.transpose(0, 1)[None] for x in (q, k, v)), None, packed_layout=layout
    )[0][0]
    wanted = torch.autograd.grad(whole, (q, k, v), upstream)

    output = torch.empty_like(whole)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for rank in range(cp):
        context = context_layout([0, *accumulate(LONG_ROW)], cp=cp, rank=rank, group=None).to(q.device)
        mine = q.detach()[context.positions].requires_grad_()
        part = attend_stretches(mine, k, v, context, 128**-0.5, None, stretch_kernel)
        output[context.positions] = part.detach()
        dq, dk, dv = torch.autograd.grad(part, (mine, k, v), upstream[context.positions])
        grads[0][context.positions] += dq
        grads[1] += dk
        grads[2] += dv
    torch.testing.assert_close(output, whole.detach(), atol=2e-2, rtol=2e-2)
    for found, right in zip(grads, wanted, strict=True):
        # keys are pulled at by thousands of queries: compare with the size of the gradient, not entry by entry
        error = (found - right.float()).norm() / right.float().norm()
        assert error < 1e-2, error
