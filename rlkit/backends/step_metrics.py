"""Adds up what the losses report, on the device, and turns it into metrics once per `train` call. Called by
`trainer.py`.

No value is read back before the end, so accumulating costs no synchronisation inside the micro-batch loop.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkit.algo.losses import WEIGHTED
from rlkit.dist.collectives import max_over_data, sum_over_data
from rlkit.dist.groups import RankMesh
from rlkit.types.ranks import MetricSet


class StepMetrics:
    """Sums and maxima of one optimizer step on this rank."""

    def __init__(self, sum_names: Sequence[str], max_names: Sequence[str], device: torch.device) -> None:
        """The names are fixed in advance: a rank that sees only dummies must take part in the same reduction."""
        self._sums = {name: torch.zeros((), device=device) for name in sum_names}
        self._maxima = {name: torch.zeros((), device=device) for name in max_names}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self._sums[name] += value

    def add_max(self, name: str, value: Tensor) -> None:
        self._maxima[name] = torch.maximum(self._maxima[name], value)

    def share(self, group: ProcessGroup) -> None:
        """Take what the group has in total, where all but one of its ranks have added nothing: the stages of a
        pipeline. Collective over `group`.
        """
        names = list(self._sums)
        total = self.sums
        dist.all_reduce(total, group=group)
        self._sums = dict(zip(names, total.unbind(), strict=True))
        if self._maxima:
            largest = self.maxima
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            self._maxima = dict(zip(list(self._maxima), largest.unbind(), strict=True))

    @property
    def loss(self) -> Tensor:
        """This rank's share of the step's loss so far."""
        return self._sums["loss"]

    @property
    def sums(self) -> Tensor:
        return torch.stack(list(self._sums.values()))

    @property
    def maxima(self) -> Tensor:
        return torch.stack(list(self._maxima.values())) if self._maxima else torch.zeros(0)


def reduce_metrics(
    steps: Sequence[StepMetrics],
    *,
    num_loss_tokens: Sequence[int],
    sum_names: Sequence[str],
    max_names: Sequence[str],
    mesh: RankMesh,
) -> MetricSet:
    """Metrics over all ranks: weighted sums are the mean over optimizer steps, plain sums the mean over all trained
    tokens.

    With several optimizer steps `ppo_kl` of the first stands apart as `train/first_ppo_kl`: it must be 0, the policy
    has not moved. Collective over the data ranks.
    """
    sums = sum_over_data(torch.stack([step.sums for step in steps]), mesh).tolist()
    metrics: MetricSet = {}
    for column, name in enumerate(sum_names):
        total = sum(row[column] for row in sums)
        metrics[f"train/{name}"] = total / (len(steps) if name in WEIGHTED else sum(num_loss_tokens))
    if len(steps) > 1 and "ppo_kl" in sum_names:
        metrics["train/first_ppo_kl"] = sums[0][list(sum_names).index("ppo_kl")] / num_loss_tokens[0]
    if max_names:
        maxima = max_over_data(torch.stack([step.maxima for step in steps]), mesh).amax(dim=0).tolist()
        metrics.update((f"train/{name}", value) for name, value in zip(max_names, maxima, strict=True))
    return metrics
