"""What engines are sent, without an engine: names, order, buckets, and the pairs that SGLang fuses."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from rlkit.algo.fp8 import E4M3, quantise
from rlkit.sync.engine_weights import EngineWeights, RoundTripped
from rlkit.types.errors import SyncError
from rlkit.types.weights import WeightBucket, WeightSpec


class ListSource:
    """Tensors in buckets of at most `max_bytes`, all in one block of memory that is used again, like a trainer's."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def specs(self) -> list[WeightSpec]:
        return [WeightSpec(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in self._tensors.items()]

    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        memory = torch.empty(max(max_bytes, max(t.nbytes for t in self._tensors.values())), dtype=torch.uint8)
        chosen: list[WeightSpec] = []
        offsets: list[int] = []
        end = 0
        for spec in self.specs():
            if chosen and end + spec.num_bytes > max_bytes:
                yield WeightBucket(specs=chosen, offsets=offsets, flat=memory[:end])
                memory.fill_(255)
                chosen, offsets, end = [], [], 0
            memory[end : end + spec.num_bytes] = self._tensors[spec.name].reshape(-1).view(torch.uint8)
            chosen.append(spec)
            offsets.append(end)
            end += spec.num_bytes
        yield WeightBucket(specs=chosen, offsets=offsets, flat=memory[:end])


def deepseek_layer() -> dict[str, Tensor]:
    """In the order of transformers' parameters, which has a norm between the two halves of the fused matrix."""
    torch.manual_seed(0)
    layer = "model.layers.0."
    shapes = {
        "self_attn.q_a_proj.weight": (48, 130),
        "self_attn.q_a_layernorm.weight": (48,),
        "self_attn.q_b_proj.weight": (96, 48),
        "self_attn.kv_a_proj_with_mqa.weight": (20, 130),
        "self_attn.kv_b_proj.weight": (64, 16),
        "mlp.gate.weight": (4, 130),
        "mlp.experts.0.up_proj.weight": (33, 130),
        "mlp.experts.0.down_proj.weight": (130, 33),
    }
    return {layer + name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def quantised_names(tensors: dict[str, Tensor]) -> frozenset[str]:
    return frozenset(name for name, t in tensors.items() if t.dim() == 2 and "mlp.gate." not in name)


def collected(buckets: Iterator[WeightBucket]) -> list[dict[str, Tensor]]:
    return [{name: tensor.clone() for name, tensor in bucket.tensors()} for bucket in buckets]


@pytest.mark.parametrize("max_bytes", [1, 7_000, 13_000, 1 << 20])
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "plain"])
def test_names_values_and_neighbours(max_bytes, is_fp8):
    tensors = deepseek_layer()
    names = quantised_names(tensors) if is_fp8 else frozenset()
    weights = EngineWeights(ListSource(tensors), names)
    buckets = collected(weights.buckets(max_bytes))
    sent = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    expected: dict[str, Tensor] = dict(tensors)
    for name in names:
        expected[name], expected[f"{name}_scale_inv"] = quantise(tensors[name])
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert sent[name].dtype == tensor.dtype
        assert torch.equal(sent[name].view(torch.uint8), tensor.view(torch.uint8)), name
    bucket_of = {name: number for number, bucket in enumerate(buckets) for name in bucket}
    for name in names:
        assert bucket_of[name] == bucket_of[f"{name}_scale_inv"]
    attention = "model.layers.0.self_attn."
    assert bucket_of[f"{attention}q_a_proj.weight"] == bucket_of[f"{attention}kv_a_proj_with_mqa.weight"]
    assert [spec.name for spec in weights.specs()] == [name for bucket in buckets for name in bucket]
    assert [(spec.shape, spec.dtype) for spec in weights.specs()] == [(tuple(t.shape), t.dtype) for t in sent.values()]
    if max_bytes == 1 << 20:
        assert len(buckets) == 1


def test_buckets_keep_to_their_size():
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(128, 64) for i in range(20)}
    weights = EngineWeights(ListSource(tensors), frozenset(tensors))
    sizes = [bucket.flat.numel() for bucket in weights.buckets(100_000)]
    assert max(sizes) <= 100_000 and sum(sizes) == 20 * (128 * 64 + 4)


def test_what_an_engine_holds_that_dequantises():
    tensors = deepseek_layer()
    names = quantised_names(tensors)
    source = ListSource(tensors)
    held = RoundTripped(source, EngineWeights(source, names))
    found = {name: tensor for bucket in collected(held.buckets(7_000)) for name, tensor in bucket.items()}
    assert found.keys() == tensors.keys() == {spec.name for spec in held.specs()}
    for name, tensor in tensors.items():
        values, scale = quantise(tensor) if name in names else (tensor, torch.ones(1, 1))
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[-1]]
        expected = (values.float() * wide).bfloat16() if name in names else tensor
        assert torch.equal(found[name], expected), name


def test_refusals():
    tensors = {"a.weight": torch.ones(4, 4)}
    with pytest.raises(SyncError, match=r"holds 1 tensors in fp8, the first is b.weight, but the trainer"):
        EngineWeights(ListSource(tensors), frozenset({"b.weight"}))
    tensors["a.weight"][0, 0] = torch.nan
    with pytest.raises(SyncError, match=r"a.weight cannot be quantised: it holds NaN"):
        collected(EngineWeights(ListSource(tensors), frozenset({"a.weight"})).buckets(100))
    with pytest.raises(SyncError, match=r"a.weight has shape \[2, 2, 2\]; only matrices"):
        EngineWeights(ListSource({"a.weight": torch.ones(2, 2, 2)}), frozenset({"a.weight"})).specs()


def test_powers_of_two():
    tensors = {"a.weight": torch.randn(130, 4)}
    weights = EngineWeights(ListSource(tensors), frozenset(tensors), power_of_two=True)
    (bucket,) = collected(weights.buckets(1 << 20))
    mantissas, _ = torch.frexp(bucket["a.weight_scale_inv"])
    assert (mantissas == 0.5).all() and bucket["a.weight"].dtype == E4M3


def test_a_source_is_read_again():
    tensors: Sequence[str] = list(deepseek_layer())
    weights = EngineWeights(ListSource(deepseek_layer()), frozenset())
    assert len(collected(weights.buckets(100))) == len(collected(weights.buckets(100))) == len(tensors) - 1
