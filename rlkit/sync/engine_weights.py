"""The trainer's weights as engines load them: quantised where the engine's checkpoint is (fp8 in blocks), and tensors
that SGLang fuses while it loads side by side in one bucket. Made in `factory.py`.

Order: a quantised `x.weight` is followed by its `x.weight_scale_inv`, never in another bucket: SGLang may compute with
both as soon as one load is over (DeepSeek's `kv_b_proj`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlkit.algo.fp8 import E4M3, LARGEST_SCALE, dequantise, grid, quantise
from rlkit.config.quantization import SCALE_SUFFIX, Fp8Blocks
from rlkit.sync.base import PushReport, WeightChannel, push_buckets
from rlkit.types.errors import SyncError
from rlkit.types.weights import WeightBucket, WeightSource, WeightSpec

FUSED = ((".q_a_proj.", ".kv_a_proj_with_mqa."),)
"""Pairs that SGLang concatenates when it has seen both in one load; one alone is forgotten (SGLang 0.5.17,
`deepseek_weight_loader.py`)."""

_Part = tuple[WeightSpec, Tensor]


class EngineWeights:
    """A `WeightSource` around another."""

    def __init__(self, source: WeightSource, quantised: frozenset[str], *, power_of_two: bool = False) -> None:
        """`quantised`: names that travel in fp8. SyncError where the trainer has none of them."""
        self._source = source
        self._quantised = quantised
        self._power_of_two = power_of_two
        names = {spec.name for spec in source.specs()}
        if quantised and not quantised & names:
            raise SyncError(
                f"the checkpoint holds {len(quantised)} tensors in fp8, the first is {min(quantised)}, but the trainer"
                " has no tensor of any of these names"
            )
        self._partner = _partners(names)
        self._buffer: Tensor | None = None

    def specs(self) -> list[WeightSpec]:
        """See `WeightSource`."""
        held: dict[str, WeightSpec] = {}
        found: list[WeightSpec] = []
        for spec in self._source.specs():
            partner = self._partner.get(spec.name)
            if partner is None or partner in held:
                together = [spec] if partner is None else [held.pop(partner), spec]
                found += [sent for part in together for sent in self._sent(part)]
            else:
                held[spec.name] = spec
        return found

    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """See `WeightSource`. Tensors that SGLang fuses travel together even where they exceed `max_bytes`."""
        held: dict[str, _Part] = {}
        for bucket in self._source.buckets(max_bytes):
            units: list[list[_Part]] = []
            for spec, (name, tensor) in zip(bucket.specs, bucket.tensors(), strict=True):
                partner = self._partner.get(name)
                if partner is None:
                    units.append([(spec, tensor)])
                elif partner in held:
                    units.append([held.pop(partner), (spec, tensor)])
                else:
                    held[name] = (spec, tensor.clone())  # the bucket's memory is used again
            yield from self._pack(units, bucket.flat.device, max_bytes)
        assert not held, f"half of a pair: {sorted(held)}"

    def _pack(self, units: Sequence[list[_Part]], device: torch.device, max_bytes: int) -> Iterator[WeightBucket]:
        chosen: list[_Part] = []
        for unit in units:
            if chosen and self._size([*chosen, *unit]) > max_bytes:
                yield self._filled(chosen, device)
                chosen = []
            chosen += unit
        if chosen:
            yield self._filled(chosen, device)

    def _size(self, parts: Sequence[_Part]) -> int:
        return _layout([sent for spec, _ in parts for sent in self._sent(spec)])[1]

    def _filled(self, parts: Sequence[_Part], device: torch.device) -> WeightBucket:
        specs = [sent for spec, _ in parts for sent in self._sent(spec)]
        offsets, size = _layout(specs)
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        bucket = WeightBucket(specs=specs, offsets=offsets, flat=self._buffer[:size])
        targets = iter([tensor for _, tensor in bucket.tensors()])
        scales: dict[str, Tensor] = {}
        for spec, tensor in parts:
            if spec.name in self._quantised:
                out = next(targets), next(targets)
                quantise(tensor, power_of_two=self._power_of_two, out=out, check=False)
                scales[spec.name] = out[1]
            else:
                next(targets).copy_(tensor)
        _check(scales)
        return bucket

    def _sent(self, spec: WeightSpec) -> list[WeightSpec]:
        if spec.name not in self._quantised:
            return [spec]
        if len(spec.shape) != 2:
            raise SyncError(f"{spec.name} has shape {list(spec.shape)}; only matrices are quantised in blocks")
        scale = WeightSpec(name=spec.name + SCALE_SUFFIX, shape=grid(spec.shape), dtype=torch.float32)
        return [replace(spec, dtype=E4M3), scale]


class RoundTripped:
    """The weights that an engine holds which multiplies fp8 weights by their scales: what `inner` sends, dequantised to
    the trainer's compute dtype. To compare with the embedded engine.
    """

    def __init__(self, source: WeightSource, inner: EngineWeights) -> None:
        self._dtype_of = {spec.name: spec.dtype for spec in source.specs()}
        self._inner = inner

    def specs(self) -> list[WeightSpec]:
        """See `WeightSource`."""
        kept = [spec for spec in self._inner.specs() if spec.name in self._dtype_of]
        return [replace(spec, dtype=self._dtype_of[spec.name]) for spec in kept]

    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """See `WeightSource`. Larger than `max_bytes` by as much as the dtype is than fp8."""
        for bucket in self._inner.buckets(max_bytes):
            tensors = dict(bucket.tensors())
            specs = [spec for spec in bucket.specs if spec.name in self._dtype_of]
            specs = [replace(spec, dtype=self._dtype_of[spec.name]) for spec in specs]
            offsets, size = _layout(specs)
            plain = WeightBucket(specs=specs, offsets=offsets, flat=bucket.flat.new_empty(size))
            for name, target in plain.tensors():
                if tensors[name].dtype == E4M3:
                    dequantise(tensors[name], tensors[name + SCALE_SUFFIX], out=target)
                else:
                    target.copy_(tensors[name])
            yield plain


class EngineWeightChannel:
    """`inner`, which gets `EngineWeights`."""

    def __init__(self, inner: WeightChannel, quantised: frozenset[str], scheme: Fp8Blocks | None) -> None:
        self._inner = inner
        self._quantised = quantised
        self._power_of_two = scheme is not None and scheme.power_of_two

    def prepared(self, source: WeightSource) -> EngineWeights:
        """What `inner` is given."""
        return EngineWeights(source, self._quantised, power_of_two=self._power_of_two)

    def push(self, source: WeightSource, version: int) -> PushReport:
        """See `WeightChannel`."""
        return self._inner.push(self.prepared(source), version)

    def close(self) -> None:
        self._inner.close()


class RoundTripCheck:
    """Quantises a second time after a push of `inner`, for the checksums that the updater compares with those of an
    embedded engine."""

    def __init__(self, inner: EngineWeightChannel, *, max_bytes: int, is_main: bool) -> None:
        self._inner = inner
        self._max_bytes = max_bytes
        self._is_main = is_main

    def push(self, source: WeightSource, version: int) -> PushReport:
        """See `WeightChannel`."""
        report = self._inner.push(source, version)
        held = RoundTripped(source, self._inner.prepared(source))
        again = push_buckets(
            held, lambda _: None, version=version, max_bytes=self._max_bytes, with_checksums=self._is_main
        )
        return replace(report, checksums=again.checksums)

    def close(self) -> None:
        self._inner.close()


def fuses_tensors(model: dict) -> bool:
    """Whether SGLang fuses tensors of this architecture while it loads, by its config.json: MLA with compressed
    queries."""
    return bool(model.get("q_lora_rank"))


def _partners(names: set[str]) -> dict[str, str]:
    """Of each tensor that has one: the tensor beside which it must travel."""
    partner: dict[str, str] = {}
    for first, second in FUSED:
        for name in names:
            other = name.replace(first, second)
            if first in name and other in names:
                partner |= {name: other, other: name}
    return partner


def _layout(specs: Sequence[WeightSpec]) -> tuple[list[int], int]:
    """(byte offsets, bytes of all together); every tensor begins where its dtype may."""
    offsets: list[int] = []
    end = 0
    for spec in specs:
        start = -(-end // spec.dtype.itemsize) * spec.dtype.itemsize
        offsets.append(start)
        end = start + spec.num_bytes
    return offsets, end


def _check(scales: dict[str, Tensor]) -> None:
    """SyncError for a weight that is not finite. Waits for the GPU once for all of them."""
    if not scales or bool(torch.stack([(scale <= LARGEST_SCALE).all() for scale in scales.values()]).all()):
        return
    name = next(name for name, scale in scales.items() if not bool((scale <= LARGEST_SCALE).all()))
    raise SyncError(
        f"{name} cannot be quantised: it holds NaN, infinite or too large values; the training has diverged"
    )
