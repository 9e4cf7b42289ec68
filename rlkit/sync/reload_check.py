"""`--check-weight-update-equal` for engines whose checksums cannot be computed here: SGLang fuses tensors, splits them
over ranks, pads vocabularies and hashes on the GPU with a hash of its own.

So the engine is compared with itself. After a push its checksums are noted; then every tensor is overwritten with
random numbers, the same weights are loaded from a folder, the slow way that owes nothing to the channel, and the
checksums have to be the same. A tensor that was lost, torn or mixed up on its way differs; so does one that the trainer
never sends, because it stays random.
"""

from collections.abc import Sequence

from rlkit.sync.base import PushReport, WeightChannel
from rlkit.sync.engine_calls import EngineCalls
from rlkit.types.errors import SyncError
from rlkit.types.ranks import EngineEndpoint, RankInfo
from rlkit.types.weights import WeightSource

RankChecksums = list[dict[str, str]]
"""Of each rank of one engine: checksum by the engine's own tensor name."""


class ReloadCheck:
    """A channel around `inner` that loads everything twice. Costs a checkpoint on disk per push: a check, not a mode
    to train in."""

    def __init__(
        self,
        inner: WeightChannel,
        disk: WeightChannel,
        rank: RankInfo,
        endpoints: Sequence[EngineEndpoint],
        *,
        timeout_s: float,
    ) -> None:
        self._inner = inner
        self._disk = disk
        self._calls = EngineCalls(endpoints if rank.is_main else [], timeout_s=timeout_s)

    def push(self, source: WeightSource, version: int) -> PushReport:
        """See `WeightChannel`. SyncError, with the engine's name of the first tensor that differs."""
        report = self._inner.push(source, version)
        pushed = self._checksums()
        self._calls.all(lambda client, _: client.weights_checker("reset_tensors"))
        self._disk.push(source, version)
        for endpoint, found, expected in zip(self._calls.endpoints, pushed, self._checksums(), strict=True):
            require_equal(endpoint.url, found, expected)
        return report

    def _checksums(self) -> list[RankChecksums]:
        answers = self._calls.all(lambda client, _: client.weights_checker("checksum"))
        return [[rank["checksums"] for rank in answer["ranks"]] for answer in answers]

    def close(self) -> None:
        self._inner.close()
        self._disk.close()
        self._calls.close()


def require_equal(url: str, found: RankChecksums, expected: RankChecksums) -> None:
    """SyncError unless every rank has the same checksums in both."""
    different = [
        (name, rank)
        for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if different:
        name, rank = different[0]
        raise SyncError(
            f"{len(different)} of {sum(map(len, expected))} tensors of engine {url} differ between the update and a "
            f"load of the same weights from disk; the first is {name} of rank {rank}: "
            f"{found[rank].get(name, 'absent')[:16]}, from disk {expected[rank].get(name, 'absent')[:16]}"
        )
