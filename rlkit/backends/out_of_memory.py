"""What to do when a GPU is full, said where it happened. Called by the shell of a training rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlkit.config.schema import RunConfig
from rlkit.types.errors import TrainError

_GIB = 1024**3


@contextmanager
def explained(phase: str, cfg: RunConfig) -> Iterator[None]:
    """Turn CUDA's out-of-memory error into a TrainError that names the phase, the numbers and the flags to turn."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).split("\n", 1)[0]
        raise TrainError(f"the GPU is full while {phase}: {first} {memory_numbers()}. {remedies(cfg)}") from error


def memory_numbers() -> str:
    """This process's memory beside the GPU's, in GiB."""
    if not torch.cuda.is_available():
        return "(no GPU)"
    free, total = torch.cuda.mem_get_info()
    held, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    others = total - free - held
    return (
        f"This rank holds {held / _GIB:.1f} GiB (at most {peak / _GIB:.1f} allocated), other processes and contexts "
        f"{others / _GIB:.1f}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB are free"
    )


def remedies(cfg: RunConfig) -> str:
    """The flags that lower the peak, the cheapest first."""
    train, cluster = cfg.train, cfg.cluster
    flags = [f"lower --max-tokens-per-gpu (now {train.max_tokens_per_gpu})"]
    if train.gradient_checkpointing is not True:
        flags.append("pass --gradient-checkpointing")
    flags.append("lower --log-probs-chunk-size")
    if cluster.actor_num_gpus > train.context_parallel_size:
        flags.append(f"raise --context-parallel-size (now {train.context_parallel_size})")
    flags.append(f"train on more GPUs (now {cluster.actor_num_gpus})")
    if cluster.colocate and cfg.starts_engines:
        flags.append("lower --sglang-mem-fraction-static if the engine holds memory while it sleeps")
    return "Remedies: " + "; ".join(flags)
