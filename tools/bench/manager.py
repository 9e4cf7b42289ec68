"""How many samples a second the rollout manager takes in and packs, and how long its event loop is held up meanwhile.

    python tools/bench/manager.py                              10,000 samples of 2,000 tokens
    python tools/bench/manager.py --samples 2000 --rows 100000

Three stages, without engines and Ray: raw answers of an engine become samples (`ingest`); samples are filtered,
normalised, planned and packed for two ranks (`pack`), as `RolloutManager.generate` does it; a prompt file of a million
rows of 1 kB is opened (`open`). A ticker on the same event loop measures the lag. The last lines are a table.
"""

import argparse
import asyncio
import gc
import json
import random
import resource
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from rlkit.config.schema import (
    AlgoConfig,
    ClusterConfig,
    DataConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from rlkit.data.jsonl import JsonlRows
from rlkit.engines.wire import parse_generation
from rlkit.orchestration.rollout_worker import GC_THRESHOLDS
from rlkit.rollout.generator import append_generation
from rlkit.rollout.guard_facts import guard_facts
from rlkit.rollout.hooks import check_reward_nonzero_std
from rlkit.rollout.metrics import rollout_metrics
from rlkit.rollout.training_batch import build_shards
from rlkit.types.generation import GenerateRequest, SamplingParams
from rlkit.types.samples import Prompt, Sample, SampleGroup

PROMPT_TOKENS = 100
TICK_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2_000, help="of a response")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--arrays", action="store_true", help="pack from arrays instead of lists")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the prompt file; 0 leaves it out")
    args = parser.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    rows = [("stage", "amount", "seconds", "processor", "per second", "lag of the loop")]
    rows += asyncio.run(measure(args.samples, args.tokens, args.group, arrays=args.arrays))
    if args.rows:
        rows.append(open_rows(args.rows))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


class Ticker:
    """Wakes every 2 ms and remembers the longest delay."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_busy_s = 0.0
        """Processor time of this process between two wakes: the lag of a machine that nobody else uses."""

    async def __aenter__(self) -> "Ticker":
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0.05)
        self.longest_s = self.longest_busy_s = 0.0
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            began, busy = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - began - TICK_S)
            self.longest_busy_s = max(self.longest_busy_s, time.process_time() - busy)


async def measure(num_samples: int, num_tokens: int, group_size: int, *, arrays: bool) -> list[tuple[str, ...]]:
    rng = random.Random(0)
    answers = [raw_answer(rng, num_tokens) for _ in range(32)]
    groups = [
        SampleGroup(
            group_id=number,
            prompt=Prompt(position=number, epoch=0, token_ids=[1] * PROMPT_TOKENS, text="prompt"),
            samples=[empty_sample(number, index) for index in range(group_size)],
        )
        for number in range(num_samples // group_size)
    ]
    samples = [sample for group in groups for sample in group.samples]
    async with Ticker() as ticker:
        began = Clock()
        for number, sample in enumerate(samples):
            ingest(sample, answers[number % len(answers)])
            await asyncio.sleep(0)  # as between two answers that arrive
        ingested = stage("ingest", len(samples), began, ticker)
    for sample in samples:
        sample.reward = float(rng.random() < 0.5)
        if arrays:
            as_arrays(sample)
    cfg = config(num_samples // group_size, group_size, 2 * (num_tokens + PROMPT_TOKENS))
    packed = []
    for name, work in (
        ("filter", lambda: [check_reward_nonzero_std(group).keep for group in groups]),
        ("metrics", lambda: (rollout_metrics(groups, seconds=1.0), guard_facts(cfg, groups, {2}))),
        ("pack", lambda: build_shards(cfg, groups, 2)),
    ):
        packed.append(await timed(name, len(samples), work))
    return [ingested, *packed]


async def timed(name: str, amount: int, work: Callable[[], Any]) -> tuple[str, ...]:
    async with Ticker() as ticker:
        began = Clock()
        await asyncio.to_thread(work)
        return stage(name, amount, began, ticker)


class Clock:
    """Started when it is made: wall-clock and processor seconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def seconds(self) -> tuple[float, float]:
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def stage(name: str, amount: int, clock: Clock, ticker: Ticker | None) -> tuple[str, ...]:
    """A row of the table. The rate is that of the processor's time: others may use the machine too."""
    wall_s, processor_s = clock.seconds()
    lag = ""
    if ticker is not None:
        lag = f"{1000 * ticker.longest_busy_s:.0f} ms ({1000 * ticker.longest_s:.0f} by the clock)"
    return name, f"{amount:,}", f"{wall_s:.2f}", f"{processor_s:.2f}", f"{amount / processor_s:,.0f}", lag


def config(num_prompts: int, group_size: int, max_tokens: int) -> RunConfig:
    return RunConfig(
        cluster=ClusterConfig(actor_num_gpus_per_node=2, device="cpu"),
        data=DataConfig(prompt_data="unused.jsonl"),
        rollout=RolloutConfig(rollout_batch_size=num_prompts, n_samples_per_prompt=group_size),
        reward=RewardConfig(rm_type="exact"),
        algo=AlgoConfig(),
        train=TrainConfig(max_tokens_per_gpu=max_tokens),
    )


def raw_answer(rng: random.Random, num_tokens: int) -> bytes:
    """An engine's JSON with ids and log-probs, as SGLang writes it."""
    ids = [rng.randrange(150_000) for _ in range(num_tokens - 1)] + [2]
    meta = {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": PROMPT_TOKENS,
        "weight_version": "0",
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "output_token_logprobs": [[-rng.expovariate(3.0), token, None] for token in ids],
        "e2e_latency": 12.5,
    }
    return orjson.dumps({"text": "word " * num_tokens, "output_ids": ids, "meta_info": meta})


def empty_sample(group: int, index: int) -> Sample:
    return Sample(group_id=group, index=index, seed=0, tokens=[1] * PROMPT_TOKENS, prompt_length=PROMPT_TOKENS)


def as_arrays(sample: Sample) -> None:
    """The same sample with its tokens in arrays."""
    parts: dict[str, Any] = {
        "tokens": array("q", sample.tokens),
        "loss_mask": array("b", sample.loss_mask),
        "rollout_logprobs": array("f", sample.rollout_logprobs),
    }
    for name, part in parts.items():
        setattr(sample, name, part)


def ingest(sample: Sample, answer: bytes) -> None:
    """What the client and the generator do with one answer."""
    request = GenerateRequest(rid="r", input_ids=sample.tokens, sampling=SamplingParams(), seed=0)
    append_generation(sample, parse_generation(orjson.loads(answer), request))


def open_rows(num_rows: int) -> tuple[str, ...]:
    """Time and private memory of opening a prompt file; the file itself is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        filler = "x" * 960
        with path.open("w", encoding="utf-8") as file:
            for number in range(num_rows):
                file.write(json.dumps({"input": f"{number}", "label": "1", "more": filler}) + "\n")
        before = private_bytes()
        clock = Clock()
        rows = JsonlRows(str(path))
        first, last = rows[0], rows[num_rows - 1]
        name, amount, took, processor, speed, _ = stage("open", num_rows, clock, None)
        assert (first["input"], last["input"]) == ("0", str(num_rows - 1))
        more = (private_bytes() - before) / 2**20
        rows.close()
    return name, f"{amount} rows, {more:+.0f} MB private", took, processor, speed, ""


def private_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


if __name__ == "__main__":
    main()
