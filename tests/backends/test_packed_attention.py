import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fsdp_setup import make_samples, spread_out, tiny_llama, tiny_qwen3
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from rlkit.algo.batching import pack
from rlkit.backends.attention.packed import (
    PackedAttention,
    bucket_by_length,
    choose_attention,
    packed_layout,
)
from rlkit.backends.fsdp.attention import register_attention
from rlkit.types.errors import ConfigError

CASES = Path(__file__).parents[1] / "data" / "cases.jsonl"
LENGTHS = [3, 1, 17, 18, 40, 41, 2]
ON_CPU = [PackedAttention.SDPA, PackedAttention.REFERENCE]


def cu_seqlens_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def attend(kind: PackedAttention, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **options: object) -> Tensor:
    """[1, H, T, D] in, [T, H, D] out, through the function that transformers would call."""
    register_attention()
    function = AttentionInterface()[kind.value]
    layout = packed_layout(cu_seqlens_of(lengths))
    return function(torch.nn.Module(), q, k, v, None, packed_layout=layout, **options)[0][0]


def random_heads(num_tokens: int, *, heads: int = 4, kv_heads: int = 2, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, num_tokens, size, generator=generator).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("kind", ON_CPU)
def test_attention_stays_inside_each_sample(kind: PackedAttention):
    """Equal scores give every visible key the same weight, so one-hot values show which keys a query sees."""
    rows = (json.loads(line) for line in CASES.read_text(encoding="utf-8").split("\n") if line)
    pk06 = next(row for row in rows if row["id"] == "pk-06")
    lengths, expected = pk06["input"]["sample_lengths"], pk06["expected"]
    total = sum(lengths)
    zeros, one_hot = torch.zeros(1, 1, total, total), torch.eye(total)[None, None]
    seen = attend(kind, zeros, zeros, one_hot, lengths)[:, 0] > 0
    assert seen.sum().item() == expected["allowed_pairs"]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for start, end in pairwise(starts):
        assert torch.equal(seen[start:end, start:end], torch.ones(end - start, end - start).tril().bool())

    samples = make_samples([(1, length - 1) for length in lengths])
    batch = pack(
        samples, sample_ids=[0, 1, 2], advantages=[1.0] * 3, token_weights=[1.0] * 3, with_rollout_logprobs=True
    )
    assert batch.positions_T.tolist() == expected["position_ids"]
    assert batch.cu_seqlens.tolist() == expected["cu_seqlens"]
    assert batch.max_seqlen == expected["max_seqlen"]


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("lengths", [LENGTHS, [9], [6, 6, 6], [1, 1]], ids=["mixed", "single", "equal", "ones"])
def test_dense_buckets_equal_the_reference(lengths: list[int], window: int | None):
    results = []
    for kind in ON_CPU:
        inputs = random_heads(sum(lengths))
        out = attend(kind, *inputs, lengths, scaling=0.3, sliding_window=window)
        pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append([out, *torch.autograd.grad((out * pull).sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
@pytest.mark.parametrize("kind", ON_CPU)
def test_a_packed_row_gives_each_sample_what_it_gives_alone(make, kind: PackedAttention, tmp_path: Path):
    spread_out(make()).save_pretrained(tmp_path)
    register_attention()
    packed_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=kind.value)
    plain_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    samples = make_samples([(2, length) for length in LENGTHS])
    batch = pack(
        samples,
        sample_ids=list(range(len(samples))),
        advantages=[0.0] * len(samples),
        token_weights=[0.0] * len(samples),
        with_rollout_logprobs=True,
    )
    with torch.no_grad():
        packed = run_packed(packed_model, batch.tokens_T, batch.positions_T, batch.cu_seqlens)
        for sample, start in zip(samples, batch.cu_seqlens.tolist(), strict=False):
            alone = plain_model(input_ids=torch.tensor([sample.tokens]), use_cache=False).logits[0]
            torch.testing.assert_close(packed[start : start + sample.total_length], alone, rtol=1e-4, atol=1e-4)


def run_packed(model: PreTrainedModel, tokens_T: Tensor, positions_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    outputs = model(
        input_ids=tokens_T[None],
        position_ids=positions_T[None],
        use_cache=False,
        packed_layout=packed_layout(cu_seqlens),
    )
    return outputs.logits[0]


def test_a_packed_row_costs_what_its_own_tokens_cost():
    """Score products over all buckets, against those of the bare sequences and of one row of T tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 400, (300,), generator=generator).tolist()
    layout = packed_layout(cu_seqlens_of(lengths))
    spent = sum(num * longest * longest for num, longest in layout.buckets)
    bare = sum(length * length for length in lengths)
    assert spent < 1.4 * bare
    assert spent < 0.02 * sum(lengths) ** 2
    assert len(layout.buckets) < 25


def test_no_tensor_of_t_by_t_elements_is_made():
    lengths = [8] * 16 + [9] * 16
    inputs = random_heads(sum(lengths), heads=2, kv_heads=1, size=4)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor))
            return out

    with Watch():
        attend(PackedAttention.SDPA, *inputs, lengths).sum().backward()
    assert max(sizes) < sum(lengths) ** 2 / 4


def test_buckets_hold_every_sequence_once():
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 1000, (200,), generator=generator).tolist()
    buckets = bucket_by_length(lengths)
    assert sorted(sequence for bucket in buckets for sequence in bucket) == list(range(200))
    for bucket in buckets:
        longest = max(lengths[sequence] for sequence in bucket)
        assert longest == lengths[bucket[0]]
        assert all(lengths[s] >= min(0.8 * longest, longest - 16) for s in bucket)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_attention_that_would_be_wrong_is_refused(name: str):
    with pytest.raises(ConfigError, match=name):
        attend(PackedAttention.SDPA, *random_heads(3), [3], **{name: 30.0})


@pytest.mark.parametrize(
    ("requested", "dtype", "chosen"),
    [
        ("auto", torch.float32, PackedAttention.SDPA),
        ("auto", torch.bfloat16, PackedAttention.SDPA),
        ("sdpa", torch.float32, PackedAttention.SDPA),
        ("eager", torch.float32, PackedAttention.REFERENCE),
    ],
)
def test_the_flag_chooses_on_a_cpu(requested, dtype: torch.dtype, chosen: PackedAttention):
    assert choose_attention(requested, device=torch.device("cpu"), dtype=dtype) is chosen


def test_flash_attention_without_cuda_is_refused():
    with pytest.raises(ConfigError, match="needs CUDA"):
        choose_attention("flash_attention_2", device=torch.device("cpu"), dtype=torch.float32)
