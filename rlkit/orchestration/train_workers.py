"""Training ranks as Ray actors. `TrainWorker` is a shell around a `Backend`; `TrainGroup` is the driver's handle on
all of them."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef

from rlkit.backends.base import Backend, create_backend
from rlkit.backends.out_of_memory import explained
from rlkit.config.schema import RunConfig
from rlkit.engines.access import current_token, use_token
from rlkit.engines.base import free_port
from rlkit.observability.profiling import RankProfiler
from rlkit.orchestration.cluster import TRAINER_SHARE, Cluster
from rlkit.orchestration.layout import Layout
from rlkit.orchestration.waiting import Waiter
from rlkit.orchestration.worker_output import claim_output
from rlkit.sync.base import PushReport, WeightChannel
from rlkit.sync.factory import create_channel
from rlkit.types.batches import Update
from rlkit.types.fingerprints import merged
from rlkit.types.gaps import TokenGaps
from rlkit.types.ranks import EngineEndpoint, InitReport, MetricSet, RankInfo

logger = logging.getLogger(__name__)


class TrainWorker:
    """One training rank. No algorithm in here."""

    def __init__(self, cfg: RunConfig, run_dir: Path, rank: int, *, token: str | None = None) -> None:
        use_token(token)
        claim_output(run_dir, f"train_rank{rank}")
        self._cfg = cfg
        self._run_dir = run_dir
        for name in cfg.cluster.train_env_vars:
            logger.info(f"--train-env-vars: {name}={os.environ.get(name)}")
        self._profiler = RankProfiler(cfg.profile, run_dir, rank)
        self._backend: Backend = create_backend(cfg)
        self._channel: WeightChannel | None = None
        self._rank: RankInfo | None = None

    def rendezvous_port(self, address: str) -> int:
        """A free port of this node, asked of rank 0."""
        return free_port(address)

    def init(self, rank: RankInfo, resume_from: Path | None) -> InitReport:
        self._rank = rank
        with explained("building the model", self._cfg):
            return self._backend.init(self._cfg, rank, resume_from=resume_from)

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Make the weight channel to the engines."""
        assert self._rank is not None
        if self._channel is not None:
            self._channel.close()
        self._channel = create_channel(self._cfg, self._rank, endpoints, run_dir=self._run_dir)

    def train(self, step: int, shard: list[Update]) -> MetricSet:
        with explained(f"training step {step}", self._cfg), self._profiler.step(step):
            return self._backend.train(step, shard)

    def token_gaps(self) -> TokenGaps:
        return self._backend.token_gaps()

    def push_weights(self, version: int) -> PushReport:
        assert self._channel is not None
        with explained(f"sending weights v{version} to the engines", self._cfg):
            return self._channel.push(self._backend.weights, version)

    def push_weights_to(self, endpoint: EngineEndpoint, version: int) -> PushReport:
        """To one engine alone, over a channel made for the purpose."""
        assert self._rank is not None
        channel = create_channel(self._cfg, self._rank, [endpoint], run_dir=self._run_dir)
        try:
            with explained(f"sending weights v{version} to engine {endpoint.index}", self._cfg):
                return channel.push(self._backend.weights, version)
        finally:
            channel.close()

    def save(self, step: int, directory: Path, hf_directory: Path | None) -> None:
        with explained(f"saving step {step}", self._cfg):
            self._backend.save(step, directory, hf_directory=hf_directory)

    def fingerprint(self) -> dict[str, int]:
        return self._backend.fingerprint()

    def is_save_done(self) -> bool:
        return self._backend.is_save_done()

    def finish_save(self) -> None:
        self._backend.finish_save()

    def sleep(self) -> None:
        self._backend.sleep()

    def wake_up(self) -> None:
        with explained("waking up", self._cfg):
            self._backend.wake_up()


RemoteTrainWorker: Any = ray.remote(TrainWorker)


class TrainGroup:
    """All training ranks; every method returns when all ranks are done, or raises the first error of any."""

    def __init__(self, cfg: RunConfig, cluster: Cluster, layout: Layout, *, run_dir: Path, waiter: Waiter) -> None:
        self._waiter = waiter
        self._cluster = cluster
        self._layout = layout
        self.world_size = len(layout.rank_slots)
        self._cfg = cfg
        self._num_threads = cluster.threads_per_slot(compute_slots(cfg, layout))
        self._workers: list[Any] = [
            RemoteTrainWorker.options(
                **cluster.actor_options(
                    slot, share=TRAINER_SHARE, num_threads=self._num_threads, env_vars=cfg.cluster.train_env_vars
                )
            ).remote(cfg, run_dir, rank, token=current_token())
            for rank, slot in enumerate(layout.rank_slots)
        ]

    def _gather_ranks(self, refs: Sequence[ObjectRef], doing: str | None = None) -> list[Any]:
        return self._waiter.gather(refs, who="training rank", doing=doing)

    def start_init(self, resume_from: Path | None) -> list[ObjectRef]:
        """Begin loading on every rank, so that engines can start meanwhile."""
        slots = [self._cluster.slots[slot] for slot in self._layout.rank_slots]
        address = slots[0].node_ip
        port = self._gather_ranks([self._workers[0].rendezvous_port.remote(address)])[0]
        return [
            worker.init.remote(
                RankInfo(
                    rank=rank,
                    world_size=self.world_size,
                    local_rank=slot.gpu_id,
                    master_addr=address,
                    master_port=port,
                    device="cuda" if self._cluster.device == "cuda" else "cpu",
                    num_threads=self._num_threads,
                    context_parallel_size=self._cfg.train.context_parallel_size,
                    tensor_parallel_size=self._cfg.megatron.tensor_model_parallel_size,
                    pipeline_parallel_size=self._cfg.megatron.pipeline_model_parallel_size,
                ),
                resume_from,
            )
            for rank, (worker, slot) in enumerate(zip(self._workers, slots, strict=True))
        ]

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        self._gather_ranks([worker.connect.remote(endpoints) for worker in self._workers])

    def train(self, step: int, shards: Sequence[ObjectRef]) -> MetricSet:
        """`shards[d]` refers to the list of updates of data rank d; only the ranks themselves fetch it."""
        assert len(shards) == self._cfg.data_parallel_size
        calls = [
            worker.train.remote(step, shards[self._cfg.data_rank_of(rank)]) for rank, worker in enumerate(self._workers)
        ]
        return self._gather_ranks(calls, f"training step {step}")[0]

    def token_gaps(self) -> list[ObjectRef]:
        """Of each rank, for whoever keeps samples: references, so that the driver does not carry them."""
        return [worker.token_gaps.remote() for worker in self._workers]

    def push_weights(self, version: int) -> PushReport:
        pushes = [worker.push_weights.remote(version) for worker in self._workers]
        return self._gather_ranks(pushes, f"sending weights v{version} to the engines")[0]

    def push_weights_to(self, endpoint: EngineEndpoint, version: int) -> PushReport:
        pushes = [worker.push_weights_to.remote(endpoint, version) for worker in self._workers]
        return self._gather_ranks(pushes, f"sending weights v{version} to engine {endpoint.index}")[0]

    def save(self, step: int, directory: Path, hf_directory: Path | None) -> None:
        self._gather_ranks([worker.save.remote(step, directory, hf_directory) for worker in self._workers])

    def fingerprints(self) -> dict[str, str]:
        """Of weights and optimizer state as the ranks hold them, by name in a checkpoint."""
        return merged(self._gather_ranks([worker.fingerprint.remote() for worker in self._workers]))

    def is_save_done(self) -> bool:
        """Whether every rank has written the last checkpoint."""
        return all(self._gather_ranks([worker.is_save_done.remote() for worker in self._workers]))

    def finish_save(self) -> None:
        self._gather_ranks([worker.finish_save.remote() for worker in self._workers])

    def sleep(self) -> None:
        self._gather_ranks([worker.sleep.remote() for worker in self._workers])

    def wake_up(self) -> None:
        self._gather_ranks([worker.wake_up.remote() for worker in self._workers])

    def close(self) -> None:
        """Kill the ranks: after a failure some may hang in a collective, so nobody is asked."""
        for worker in self._workers:
            ray.kill(worker)


def compute_slots(cfg: RunConfig, layout: Layout) -> int:
    """How many processes compute at the same time on one node: colocated trainer and engine take turns."""
    on_node = [slot for slot in range(layout.num_slots) if layout.node_of(slot) == 0]
    if cfg.cluster.colocate:
        return max(sum(s in layout.rank_slots for s in on_node), len(layout.engines), 1)
    return max(len(on_node), 1)
