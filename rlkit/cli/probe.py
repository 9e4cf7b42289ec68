"""`--probe`: one training step on packs of the greatest length and one weight update, by the trainer alone, with the
memory that each takes beside the estimate of `algo/phase_memory.py`.

No engine, rollout or Ray: every rank is a process that calls the backend as a run does. On a GPU the trainer's own
allocations are compared, on a CPU the resident memory of its process. Called by `cli/entry.py`.
"""

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlkit.algo.memory_plan import FIXED_BYTES, GIB
from rlkit.algo.phase_memory import CPU_RANK_HOST_BYTES, Hardware, longest_pack, longest_sample, plan_memory
from rlkit.cli.dry_run_phases import frozen_params, planned_hardware, policy_shape
from rlkit.cli.machine import cuda_devices
from rlkit.config.errors import ConfigError
from rlkit.config.load import load_config
from rlkit.config.rules.paths import read_model_config
from rlkit.config.schema import RunConfig

NUM_PACKS = 2
"""Micro-batches of the step: with the second one the gradients of the first are there."""
SAMPLE_S = 0.005
OF_A_RANK = frozenset(
    {"training ranks", "weights and moments", "scoring models", "critic", "gradients", "whole weights", "logits"}
    | {"activations", "buckets"}
)
"""Parts of a host's estimate that a probed rank holds."""
RESULT = "PROBE "
"""Begins the line in which a rank hands over its numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one phase held at most, estimated and measured, in bytes."""

    phase: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Of the estimate, relative to what was measured."""
        return self.predicted / self.measured - 1


def run_probe(argv: Sequence[str], cfg: RunConfig) -> list[Measured]:
    """Probe, print, and return the table of the fullest rank. ConfigError where this machine cannot hold the ranks."""
    from rlkit.engines.base import free_port  # local: not needed by a dry run

    if cfg.train.train_backend != "fsdp" or not cfg.starts_trainer:
        raise ConfigError(
            f"--probe runs the FSDP trainer alone; train_backend = {cfg.train.train_backend},"
            f" debug_rollout_only = {cfg.debug.debug_rollout_only}: drop --probe"
        )
    device = probed_device(cfg)
    ranks = cfg.cluster.actor_num_gpus
    if device == "cuda" and ranks > len(cuda_devices()):
        raise ConfigError(
            f"--probe runs all {ranks} training ranks on this machine, which has {len(cuda_devices())} GPUs; lower"
            " --actor-num-gpus-per-node and --actor-num-nodes"
        )
    port = free_port("127.0.0.1") if ranks > 1 else 0
    command = [sys.executable, "-m", "rlkit.cli.probe", str(ranks), str(port), device]
    processes = [
        subprocess.Popen([*command, str(rank), *argv], stdout=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if failed:
        raise ConfigError(f"the probe failed on rank {failed[0]} (exit status {processes[failed[0]].returncode})")
    found: dict[str, int] = {}
    for output in outputs:
        line = next(line for line in output.splitlines() if line.startswith(RESULT))
        for phase, size in json.loads(line.removeprefix(RESULT)).items():
            found[phase] = max(size, found.get(phase, 0))
    rows = [
        Measured(phase=phase, predicted=size, measured=found[phase])
        for phase, size in predictions(cfg, device).items()
        if phase in found
    ]
    print_table(cfg, rows, device)
    return rows


def probed_device(cfg: RunConfig) -> Literal["cuda", "cpu"]:
    if cfg.cluster.device != "auto":
        return cfg.cluster.device
    return "cuda" if cuda_devices() else "cpu"


def predictions(cfg: RunConfig, device: Literal["cuda", "cpu"]) -> dict[str, int]:
    """What one rank should hold in each probed phase. Empty where the model is not a dense decoder."""
    shape = policy_shape(cfg)
    if shape is None:
        return {}
    planned = planned_hardware(cfg)
    hardware = Hardware(
        device=device, gpu_bytes=planned.gpu_bytes, host_bytes=planned.host_bytes, static_share=planned.static_share
    )
    plan = plan_memory(cfg, shape, hardware, frozen_params=frozen_params(cfg), num_tokens=longest_pack(cfg))
    if device == "cpu":
        rows = {peak.phase: peak.parts for peak in plan.places["host"]}
        return {
            phase: sum(size for name, size in rows[phase].items() if name in OF_A_RANK) // cfg.cluster.actor_num_gpus
            for phase in ("train", "sync")
        }
    place = next(iter(plan.places))
    beside = ("contexts", "engine asleep", "engine weights")
    rows = {peak.phase: peak.parts for peak in plan.places[place]}
    return {
        phase: sum(size for name, size in rows[phase].items() if name not in beside)
        for phase in ("train", "sync")
        if phase in rows
    }


def print_table(cfg: RunConfig, rows: Sequence[Measured], device: str) -> None:
    what = (
        "allocated by the trainer on its GPU"
        if device == "cuda"
        else "memory of a training rank, without pages of files"
    )
    print(f"{what}, packs of {longest_pack(cfg):,} tokens")
    print(f"{'phase':<10}{'predicted':>12}{'measured':>12}{'error':>9}")
    for row in rows:
        print(
            f"{row.phase:<10}{row.predicted / GIB:>8.2f} GiB{row.measured / GIB:>8.2f} GiB{row.error:>+9.1%}",
            flush=True,
        )
    if device == "cuda":
        print(f"contexts come on top, about {FIXED_BYTES / GIB:.1f} GiB, and engines: see --dry-run")
    else:
        print(f"of it about {CPU_RANK_HOST_BYTES / GIB:.1f} GiB for libraries; engines are not in it: see --dry-run")


# ---- one rank, in its own process --------------------------------------------------------------------------------


def probe_rank(
    cfg: RunConfig, *, rank: int, world_size: int, port: int, device: Literal["cuda", "cpu"]
) -> dict[str, int]:
    """The peaks of this rank by phase."""
    import torch  # local: the parent does without

    from rlkit.backends.base import create_backend
    from rlkit.types.ranks import RankInfo

    backend = create_backend(cfg)
    info = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        master_addr="127.0.0.1",
        master_port=port,
        device=device,
        num_threads=max(1, torch.get_num_threads() // world_size),
        context_parallel_size=cfg.train.context_parallel_size,
    )
    backend.init(cfg, info, resume_from=None)
    updates = longest_updates(cfg)[rank // cfg.train.context_parallel_size]
    memory = PeakMemory(device)
    peaks: dict[str, int] = {}
    for step in range(2):  # the moments come into being in the first
        memory.reset()
        backend.train(step, updates)
        peaks["train"] = memory.read()
    sleeps = cfg.cluster.colocate and cfg.starts_engines
    if sleeps:
        backend.sleep()
    memory.reset()
    for bucket in backend.weights.buckets(cfg.sync.update_weight_buffer_size):
        del bucket
    peaks["sync"] = memory.read()
    if sleeps:
        backend.wake_up()
    return peaks


def longest_updates(cfg: RunConfig) -> list[Any]:
    """[data-parallel rank] -> one optimizer step of `NUM_PACKS` micro-batches that are as long as they may be."""
    from rlkit.algo.batching import build_updates
    from rlkit.types.samples import Sample, SampleStatus

    dp, cp = cfg.data_parallel_size, cfg.train.context_parallel_size
    length = longest_sample(cfg)
    vocab = int((read_model_config(cfg.model.hf_checkpoint) or {})["vocab_size"])
    budget = cfg.train.max_tokens_per_gpu * cp
    whole, rest = divmod(budget, length)
    lengths = ([length] * whole + ([rest] if rest > 1 else [])) or [length]
    samples: list[Sample] = []
    for number, size in enumerate(lengths * NUM_PACKS * dp):
        prompt = max(1, min(size - 1, cfg.data.rollout_max_prompt_len or size // 10))
        samples.append(
            Sample(
                group_id=number // 2,
                index=number % 2,
                seed=number,
                tokens=[(number + place) % vocab for place in range(size)],
                prompt_length=prompt,
                loss_mask=[1] * (size - prompt),
                rollout_logprobs=[-5.0] * (size - prompt),
                status=SampleStatus.COMPLETED,
                reward=float(number % 2),
            )
        )
    return build_updates(
        samples,
        [1.0 if number % 2 else -1.0 for number in range(len(samples))],
        dp=dp,
        batch_size=len(samples),
        max_tokens=cfg.train.max_tokens_per_gpu,
        per_token_loss=cfg.algo.calculate_per_token_loss,
        with_rollout_logprobs=not cfg.is_supervised,
        constant_length=cfg.algo.loss_constant_length,
        cp=cp,
        require_reward=not cfg.is_supervised,
        keep_groups=cfg.is_dpo,
    )


class PeakMemory:
    """The largest memory since `reset`: of torch's allocator on a GPU, else what this process holds that is not a file
    (pages of libraries and checkpoints can be dropped at any time).
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._peak = 0
        if not self._is_cuda:
            threading.Thread(target=self._sample, daemon=True).start()

    def reset(self) -> None:
        if self._is_cuda:
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what is freed but still held would count as used
            self._peak = resident_bytes()

    def read(self) -> int:
        if not self._is_cuda:
            return max(self._peak, resident_bytes())
        import torch

        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, resident_bytes())
            time.sleep(SAMPLE_S)


def resident_bytes() -> int:
    """Anonymous and shared memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def main() -> None:
    world_size, port, device, rank = sys.argv[1:5]
    assert device in ("cuda", "cpu")
    cfg = load_config(sys.argv[5:]).config
    if cfg.rollout.num_rollout is None:  # --num-epoch: schedules need an end, and the probe makes a step of any
        cfg = replace(cfg, rollout=replace(cfg.rollout, num_rollout=1))
    peaks = probe_rank(cfg, rank=int(rank), world_size=int(world_size), port=int(port), device=device)
    print(RESULT + json.dumps(peaks), flush=True)


def as_json(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """For scripts."""
    return [asdict(row) | {"error": row.error} for row in rows]


if __name__ == "__main__":
    main()
