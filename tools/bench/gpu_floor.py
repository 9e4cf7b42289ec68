"""What the parts of a step cost by themselves: no trainer beside the engine, no engine beside the trainer, no Ray.

    python tools/bench/gpu_floor.py generate OUT.json ROLLOUT.jsonl ROUNDS -- FLAGS OF train.py
    python tools/bench/gpu_floor.py train    OUT.json ROLLOUT.jsonl ROUNDS -- FLAGS OF train.py

Started by `gpu_step.py` with the flags of the run that it measures: engines are launched by the same function, prompts
come in the same order, batches are packed by the same code. `generate` also puts the idle engines to sleep and wakes
them, and leaves its last round in ROLLOUT for `train`.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlkit.config.load import load_config
from rlkit.config.schema import RunConfig
from rlkit.types.generation import GenerateRequest, SamplingParams
from rlkit.types.ranks import RankInfo
from rlkit.types.samples import SampleGroup, SampleStatus

HOST = "127.0.0.1"
KV_TAGS = ("kv_cache", "cuda_graph")
COPY_BYTES = 1024**3
NUM_SLEEPS = 3


def main() -> None:
    part, out, rollout, rounds, _, *argv = sys.argv[1:]
    cfg = load_config(argv).config
    if part == "generate":
        measured = asyncio.run(measure_generation(cfg, Path(rollout), int(rounds), log_dir=Path(out).parent / "logs"))
    else:
        measured = measure_training(cfg, Path(rollout), int(rounds))
    Path(out).write_text(json.dumps(measured, indent=2) + "\n")


# ---- generation ------------------------------------------------------------------------------------------------------


async def measure_generation(cfg: RunConfig, rollout: Path, rounds: int, *, log_dir: Path) -> dict[str, Any]:
    """One warm-up round and `rounds` timed ones on plain servers, then sleep and wake where the run is colocated."""
    from rlkit.engines.client import EngineClient
    from rlkit.orchestration.startup import resolve_device
    from rlkit.rollout.debug_data import save_rollout

    began = time.perf_counter()
    device = resolve_device(cfg)
    with ExitStack() as servers:
        started = [start_server(cfg, index, device, log_dir, servers) for index in range(cfg.cluster.num_engines)]
        clients = [EngineClient(url, timeout_s=cfg.engine.engine_timeout_s) for url, _ in started]
        for client, (_, process) in zip(clients, started, strict=True):
            await wait_until_alive(client, process, timeout_s=cfg.engine.engine_start_timeout_s)
        start_s = time.perf_counter() - began
        prompts, sampling = prompts_and_sampling(cfg)
        timed: list[dict[str, float]] = []
        groups: list[SampleGroup] = []
        for number in range(rounds + 1):
            groups = open_groups(cfg, prompts.next(cfg.rollout.rollout_batch_size), number)
            for client in clients:
                await client.flush_cache()
            timed.append(await generate_round(clients, groups, sampling))
        sleeps = [await sleep_and_wake(clients) for _ in range(NUM_SLEEPS)] if cfg.cluster.colocate else []
        for client in clients:
            await client.close()
    save_rollout(rollout, 0, groups)
    return {"start_s": start_s, "warm_up": timed[0], "rounds": timed[1:], "sleeps": sleeps}


def start_server(cfg: RunConfig, index: int, device: str, log_dir: Path, servers: ExitStack) -> tuple[str, Any]:
    """(address, process) of the server that the run would start as engine `index`."""
    import os

    from rlkit.engines.base import EngineSlot, build_launch
    from rlkit.orchestration.processes import ServerProcess
    from rlkit.sync.group import free_port

    width = cfg.cluster.rollout_num_gpus_per_engine
    first_gpu = 0 if cfg.cluster.colocate else cfg.cluster.actor_num_gpus
    port = free_port(HOST)
    slot = EngineSlot(
        index=index,
        host=HOST,
        port=port,
        num_gpus=width,
        base_gpu_id=first_gpu + index * width,
        device=device,
        num_threads=max(1, (os.cpu_count() or 1) // cfg.cluster.num_engines),
        weight_version=0,
        seed=cfg.data.rollout_seed + index,
    )
    spec = build_launch(cfg, slot)
    process = ServerProcess(spec.argv, env=spec.env, log_path=log_dir / f"floor_engine{index}.log")
    servers.callback(process.stop)
    return f"http://{HOST}:{port}", process


async def wait_until_alive(client: Any, process: Any, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not await client.is_alive():
        if process.exit_status() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{client.url} does not answer; the end of {process.log_path}:\n{process.tail()}")
        await asyncio.sleep(0.2)


def prompts_and_sampling(cfg: RunConfig) -> tuple[Any, SamplingParams]:
    from rlkit.data.prompts import PromptSource
    from rlkit.data.tokenizer import eos_token_ids, load_tokenizer
    from rlkit.rollout.sampling import rollout_sampling

    tokenizer = load_tokenizer(cfg.model)
    return PromptSource(cfg.data, tokenizer), rollout_sampling(cfg, eos_token_ids(cfg.model, tokenizer))


def open_groups(cfg: RunConfig, prompts: Sequence[Any], number: int) -> list[SampleGroup]:
    from rlkit.rollout.collect import open_group

    first = number * len(prompts)
    count, seed = cfg.rollout.n_samples_per_prompt, cfg.data.rollout_seed
    return [open_group(prompt, first + i, count, run_seed=seed) for i, prompt in enumerate(prompts)]


async def generate_round(
    clients: Sequence[Any], groups: Sequence[SampleGroup], sampling: SamplingParams
) -> dict[str, float]:
    """All samples at once, whole groups on one engine; fills the samples in. Rewards are made up: every other sample of
    a group is right, so that all take part in training."""
    from rlkit.rollout.generator import append_generation

    async def one(client: Any, sample: Any) -> None:
        request = GenerateRequest(
            rid=f"floor-{sample.group_id}-{sample.index}.",
            input_ids=sample.tokens,
            sampling=sampling,
            seed=sample.seed,
        )
        append_generation(sample, await client.generate(request))
        sample.reward = float(sample.index % 2)

    began = time.perf_counter()
    await asyncio.gather(
        *(one(clients[i % len(clients)], sample) for i, group in enumerate(groups) for sample in group.samples)
    )
    seconds = time.perf_counter() - began
    samples = [sample for group in groups for sample in group.samples]
    assert all(sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED) for sample in samples)
    return {"seconds": seconds, **count_tokens(groups)}


def count_tokens(groups: Sequence[SampleGroup]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    return {
        "response_tokens": float(sum(sample.response_length for sample in samples)),
        "total_tokens": float(sum(sample.total_length for sample in samples)),
    }


async def sleep_and_wake(clients: Sequence[Any]) -> dict[str, float]:
    """Seconds of each turn, on all engines at once."""

    async def timed(call: Any) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(call(client) for client in clients))
        return time.perf_counter() - began

    async def sleep(client: Any) -> None:
        await client.flush_cache()
        await client.release_memory([*KV_TAGS, "weights"])

    return {
        "engine_sleep": await timed(sleep),
        "engine_wake": await timed(lambda client: client.resume_memory(["weights"])),
        "kv_wake": await timed(lambda client: client.resume_memory(KV_TAGS)),
    }


# ---- training --------------------------------------------------------------------------------------------------------


def measure_training(cfg: RunConfig, rollout: Path, rounds: int) -> dict[str, Any]:
    """One warm-up call of the backend and `rounds` timed ones on the batches of the recorded rollout; then bytes that a
    sleep moves, and the bandwidths that bound it."""
    import torch.multiprocessing as mp
    from torch.multiprocessing.spawn import spawn

    from rlkit.orchestration.startup import resolve_device
    from rlkit.rollout.debug_data import load_rollout
    from rlkit.rollout.training_batch import build_shards
    from rlkit.sync.group import free_port

    _, groups = load_rollout(rollout)
    world_size = cfg.cluster.actor_num_gpus
    shards = build_shards(cfg, groups, world_size)
    device, port = resolve_device(cfg), free_port(HOST)
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        # a spawned process finds this file again by its name, so nothing has to be importable
        spawn(train_rank, args=(cfg, shards, device, port, rounds, results), nprocs=world_size, join=True)
        measured = dict(results[0])
    num_batches = max(len(update.micro_batches) for shard in shards for update in shard)
    measured |= {**count_tokens(groups), "num_micro_batches": num_batches}
    return {**measured, "mfu": mfu(cfg, measured, len([sample for group in groups for sample in group.samples]))}


def mfu(cfg: RunConfig, measured: Mapping[str, Any], num_samples: int) -> float:
    from mfu import flops_per_token

    tokens = measured["total_tokens"]
    seconds = statistics.median(r["seconds"] for r in measured["rounds"])
    flops = flops_per_token(Path(cfg.model.hf_checkpoint), measured["num_params"], tokens / num_samples)
    return tokens / seconds * flops / (measured["matmul_flops_per_s"] * cfg.cluster.actor_num_gpus)


def train_rank(rank: int, cfg: RunConfig, shards: Any, device: Any, port: int, rounds: int, results: Any) -> None:
    import os

    import torch
    from mfu import matmul_rate

    from rlkit.backends.base import create_backend

    world_size = len(shards)
    if device == "cuda":
        torch.cuda.set_device(rank)
    began = time.perf_counter()
    backend = create_backend(cfg)
    info = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        master_addr=HOST,
        master_port=port,
        device=device,
        num_threads=max(1, (os.cpu_count() or 1) // world_size),
    )
    report = backend.init(cfg, info, resume_from=None)
    init_s = time.perf_counter() - began
    timed: list[dict[str, float]] = []
    for step in range(rounds + 1):
        began = time.perf_counter()
        metrics = backend.train(step, shards[rank])
        timed.append({"seconds": time.perf_counter() - began, "peak_gib": metrics["memory/train_peak_gib"]})
    weight_bytes = sum(spec.num_bytes for spec in backend.weights.specs())
    rate = matmul_rate(device)
    moved = bytes_of_a_sleep(backend, device)
    results[rank] = {
        "init_s": init_s,
        "num_params": report.num_params,
        "blocks": report.memory_plan,
        "matmul_flops_per_s": rate,
        "warm_up": timed[0],
        "rounds": timed[1:],
        "weight_bytes": weight_bytes,
        "sleep_bytes": moved,
        **(bandwidths(rank, is_split=not cfg.cluster.colocate) if device == "cuda" else {}),
    }


def bytes_of_a_sleep(backend: Any, device: str) -> int:
    """What the trainer takes off the GPU; 0 on a CPU, where nothing moves."""
    if device == "cpu":
        return 0
    import torch

    before = torch.cuda.memory_allocated()
    backend.sleep()
    return before - torch.cuda.memory_allocated()


def bandwidths(rank: int, *, is_split: bool) -> dict[str, float]:
    """GiB/s: pinned host memory to and from the GPU, and the copy that a weight update cannot do without, which is
    within one GPU or, split, from the trainer's to the engine's."""
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{rank}")
    there = torch.empty_like(here, device=f"cuda:{torch.cuda.device_count() - 1}") if is_split else here.clone()
    found = {}
    for name, target, source in (
        ("to_host_gib_s", host, here),
        ("to_device_gib_s", here, host),
        ("copy_gib_s", there, here),
    ):
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        found[name] = COPY_BYTES / 1024**3 / min(times)
    return found


if __name__ == "__main__":
    main()
