"""What a training backend is: a few functions and a read-only view of its weights. Called by
`orchestration/train_workers.py`.

Every rank calls each function in the same order.

    NEW --init--> AWAKE <--sleep / wake_up--> ASLEEP;  train and save need AWAKE.
"""

from pathlib import Path
from typing import Protocol, assert_never

from rlkit.config.schema import RunConfig
from rlkit.types.batches import Update
from rlkit.types.gaps import TokenGaps
from rlkit.types.ranks import InitReport, MetricSet, RankInfo
from rlkit.types.weights import WeightSource


class Backend(Protocol):
    """One training rank."""

    @property
    def weights(self) -> WeightSource:
        """The policy's weights as engines want them. Valid after `init`, awake and asleep."""
        ...

    def init(self, cfg: RunConfig, rank: RankInfo, *, resume_from: Path | None) -> InitReport:
        """Join the process group, build and shard the model, load weights (from `resume_from` if given, else
        `--hf-checkpoint`)."""
        ...

    def train(self, step: int, updates: list[Update]) -> MetricSet:
        """One optimizer step per update, in order. Returns metrics reduced over all ranks (`train/...`, `time/...`,
        `memory/...`)."""
        ...

    def token_gaps(self) -> TokenGaps:
        """Log-prob differences to the engine of the samples that this rank trained on last; of ranks that share their
        samples, the others may say nothing. Not collective."""
        ...

    def save(self, step: int, directory: Path, *, hf_directory: Path | None) -> None:
        """Write model, optimizer, schedule and random state into `directory` (and a Hugging Face export). Returns when
        all ranks are done; with `--async-save` when the state is copied, and `finish_save` waits for the rest."""
        ...

    def is_save_done(self) -> bool:
        """Whether this rank has written all that `save` was given. Never waits."""
        ...

    def finish_save(self) -> None:
        """Wait until the last `save` is written on all ranks; raises what went wrong. Awake or asleep."""
        ...

    def fingerprint(self) -> dict[str, int]:
        """This rank's part of the fingerprints (`types/fingerprints.py`) of all that `save` would write now, by name in
        the checkpoint. Not collective; needs AWAKE.
        """
        ...

    def sleep(self) -> None:
        """Free the GPU: weights and optimizer go to host memory. On a CPU there is nothing to move."""
        ...

    def wake_up(self) -> None:
        """Undo `sleep`, bit for bit."""
        ...


def create_backend(cfg: RunConfig) -> Backend:
    """The backend that `--train-backend` names."""
    match cfg.train.train_backend:
        case "fsdp":
            from rlkit.backends.fsdp.backend import FsdpBackend  # local: keeps transformers out of --help

            return FsdpBackend()
        case "megatron":
            from rlkit.backends.megatron.backend import MegatronBackend  # local: Megatron-Core may be absent

            return MegatronBackend()
        case _:
            assert_never(cfg.train.train_backend)
