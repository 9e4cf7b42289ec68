"""Times the trainer alone on fixed packed batches: no Ray, no engine, no rollouts.

    python tools/bench/train_step.py --model /models/Qwen3-0.6B                 256 samples of 92 + 1024 tokens, one GPU
    python tools/bench/train_step.py --model tiny --device cpu --num-samples 16 --prompt-len 8 --response-len 24

Each variant (eager or compiled blocks, with and without gradient checkpointing) runs in a process of its own through
the backend's public functions: `init`, `train`, `sleep`, `wake_up`, `save`. Times are medians over the steps after the
warm-up. A table comes last; `--json FILE` keeps everything, `--profile FILE` the GPU's most expensive operators.

MFU as in `mfu.py`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mfu import flops_per_token, matmul_rate

from rlkit.algo.batching import build_updates
from rlkit.backends.base import create_backend
from rlkit.backends.fsdp.compilation import num_compiled_graphs
from rlkit.config.load import load_config
from rlkit.config.schema import RunConfig
from rlkit.types.batches import Update
from rlkit.types.ranks import RankInfo
from rlkit.types.samples import Sample, SampleStatus

VARIANTS = ("eager", "eager+ckpt", "compiled", "compiled+ckpt", "auto")
COLUMNS = ("init_s", "first_step_s", "step_s", "tokens_per_s", "mfu", "peak_gib", "log_prob_s", "adamw_s")
MOVES = ("sleep_gb_per_s", "wake_gb_per_s", "save_s", "num_recompiles")
TINY = Path(__file__).resolve().parents[2] / "runs" / "bench" / "tiny"


def main() -> None:
    args = parse_args()
    if args.model == "tiny":
        make_tiny(TINY)
        args.model = str(TINY)
    if args.variant is not None:
        print(json.dumps(measure(args, args.variant)), flush=True)
        return
    report: dict[str, Any] = {"arguments": vars(args), "machine": machine(args.device), "variants": {}}
    print(json.dumps(report["machine"]), flush=True)
    for variant in args.variants:
        report["variants"][variant] = run_apart(args, variant)
        print_row(variant, report["variants"][variant])
        if args.json is not None:
            Path(args.json).write_text(json.dumps(report, indent=2))
    print_table(report["variants"])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint, or `tiny`")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-samples", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=92)
    parser.add_argument("--response-len", type=int, default=1024)
    parser.add_argument("--max-tokens-per-gpu", type=int, default=16384)
    parser.add_argument("--log-probs-chunk-size", type=int)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--no-save", action="store_true", help="leave saving out: three times the model in float32")
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--profile", help="file for a table of the 25 most expensive operators of each variant")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- one variant, in its own process -----------------------------------------------------------------------------


def run_apart(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Peak memory and compiled code of one variant must not meet those of another."""
    words = [sys.executable, str(Path(__file__).resolve()), "--variant", variant]
    for name in (
        "model",
        "device",
        "num_samples",
        "prompt_len",
        "response_len",
        "max_tokens_per_gpu",
        "log_probs_chunk_size",
        "steps",
        "warmup",
        "profile",
    ):
        if getattr(args, name) is not None:
            words += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    words += ["--no-save"] * args.no_save
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_config(args: argparse.Namespace, variant: str) -> RunConfig:
    kind, _, checkpointing = variant.partition("+")
    argv = ["--hf-checkpoint", args.model, "--prompt-data", "unused.jsonl", "--rollout-batch-size", "1"]
    argv += ["--n-samples-per-prompt", str(args.num_samples), "--num-rollout", "1000", "--lr", "1e-6"]
    argv += ["--max-tokens-per-gpu", str(args.max_tokens_per_gpu), "--rm-type", "exact", "--device", args.device]
    argv += ["--rollout-max-response-len", str(args.response_len), "--colocate", "--actor-num-gpus-per-node", "1"]
    argv += ["--num-gpus-per-node", "1"]
    if args.log_probs_chunk_size is not None:
        argv += ["--log-probs-chunk-size", str(args.log_probs_chunk_size)]
    if kind != "auto":
        argv += ["--torch-compile", "on" if kind == "compiled" else "off"]
        argv += ["--gradient-checkpointing" if checkpointing else "--no-gradient-checkpointing"]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "unused.jsonl"
        prompts.write_text('{"prompt": "x", "label": "y"}\n')
        argv[argv.index("unused.jsonl")] = str(prompts)
        argv += ["--input-key", "prompt", "--label-key", "label"]
        return load_config(argv).config


def make_updates(args: argparse.Namespace, cfg: RunConfig, seed: int) -> list[Update]:
    """One optimizer step. A few samples end early, as in a real rollout, so that packs differ in length."""
    generator = torch.Generator().manual_seed(seed)
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    samples: list[Sample] = []
    for number in range(args.num_samples):
        early = bool(torch.rand((), generator=generator) < 0.06)
        length = max(1, int(args.response_len * torch.rand((), generator=generator))) if early else args.response_len
        tokens = torch.randint(3, vocab, (args.prompt_len + length,), generator=generator).tolist()
        samples.append(
            Sample(
                group_id=number // 8,
                index=number % 8,
                seed=number,
                tokens=tokens,
                prompt_length=args.prompt_len,
                loss_mask=[1] * length,
                rollout_logprobs=[-10.0] * length,
                status=SampleStatus.COMPLETED,
                reward=float(number % 2),
            )
        )
    return build_updates(
        samples,
        [1.0 if number % 2 else -1.0 for number in range(args.num_samples)],
        dp=1,
        batch_size=args.num_samples,
        max_tokens=cfg.train.max_tokens_per_gpu,
        per_token_loss=False,
        with_rollout_logprobs=True,
        require_reward=True,
    )[0]


def measure(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    cfg = make_config(args, variant)
    backend = create_backend(cfg)
    rank = RankInfo(
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="127.0.0.1",
        master_port=0,
        device=args.device,
        num_threads=torch.get_num_threads(),
    )
    report = backend.init(cfg, rank, resume_from=None)
    result: dict[str, Any] = {"init_s": report.seconds, "num_params": report.num_params, "blocks": report.memory_plan}
    seconds: list[float] = []
    tokens: list[int] = []
    graphs_after_warmup = 0
    metrics: dict[str, float] = {}
    for step in range(args.warmup + args.steps):
        updates = make_updates(args, cfg, step)
        taken, metrics = timed(args.device, lambda step=step, updates=updates: backend.train(step, updates))
        if step == 0:
            result["first_step_s"] = taken
        if step < args.warmup:
            graphs_after_warmup = num_compiled_graphs()
        else:
            seconds.append(taken)
            tokens.append(sum(batch.num_tokens for update in updates for batch in update.micro_batches))
    result |= {
        "step_s": statistics.median(seconds),
        "steps_s": seconds,
        "tokens": tokens,
        "tokens_per_s": sum(tokens) / sum(seconds),
        "peak_gib": metrics["memory/train_peak_gib"],
        "num_graphs": num_compiled_graphs(),
        "num_recompiles": num_compiled_graphs() - graphs_after_warmup,
    }
    result["mfu"] = (
        result["tokens_per_s"]
        * flops_per_token(Path(args.model), report.num_params, args.prompt_len + args.response_len)
        / matmul_rate(args.device)
    )
    result |= log_prob_pass(args, cfg, backend)
    result |= optimizer_alone(args.device, backend)
    result |= moves(args, cfg, backend)
    if args.profile is not None:
        profile(args, cfg, backend, variant)
    return result


def timed(device: str, call: Callable[[], Any]) -> tuple[float, Any]:
    wait(device)
    start = time.perf_counter()
    value = call()
    wait(device)
    return time.perf_counter() - start, value


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- parts of a step ---------------------------------------------------------------------------------------------


def log_prob_pass(args: argparse.Namespace, cfg: RunConfig, backend: Any) -> dict[str, float]:
    """What scoring the policy before a step adds: a forward pass over all packs."""
    parts = backend._parts("be timed", "awake")
    from rlkit.backends.fsdp.trainer import micro_batch  # local: needs transformers

    batches = make_updates(args, cfg, 0)[0].micro_batches
    micro_batches = [micro_batch(batch, parts.mesh).to(parts.mesh.device) for batch in batches]
    taken = [timed(args.device, lambda: parts.trainer.score(parts.policy, micro_batches))[0] for _ in range(3)]
    return {"log_prob_s": min(taken)}


def optimizer_alone(device: str, backend: Any) -> dict[str, float]:
    """AdamW on gradients of zero, at a rate of zero: the arithmetic is that of any step, the weights stay."""
    optimizer = backend._parts("be timed", "awake").optimizer
    taken: list[float] = []
    for _ in range(3):
        for shard in optimizer._shards.values():
            shard.grad = torch.zeros_like(shard)
        taken.append(timed(device, lambda: optimizer.step(0.0))[0])
    return {"adamw_s": min(taken)}


def moves(args: argparse.Namespace, cfg: RunConfig, backend: Any) -> dict[str, Any]:
    """Sleep, wake and save, twice each: the first sleep also makes the host buffer."""
    result: dict[str, Any] = {}
    for number in range(2):
        result["sleep_s"], _ = timed(args.device, backend.sleep)
        if args.device == "cuda":
            result["asleep_reserved_gib"] = torch.cuda.memory_reserved() / 1024**3
        result["wake_s"], _ = timed(args.device, backend.wake_up)
        result.setdefault("first_sleep_s", result["sleep_s"])
        metrics = backend.train(1000 + number, make_updates(args, cfg, number))
        result |= {f"{name}_gb_per_s": metrics.get(f"{name}/gb_per_s") for name in ("sleep", "wake")}
        if args.no_save:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result["save_s"], _ = timed(args.device, lambda: backend.save(0, Path(folder), hf_directory=None))
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            result["save_bytes"] = sum(path.stat().st_size for path in files)
    return result


def profile(args: argparse.Namespace, cfg: RunConfig, backend: Any, variant: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (args.device == "cuda")
    updates = make_updates(args, cfg, 0)
    with record(activities=kinds) as recorded:
        backend.train(2000, updates)
        wait(args.device)
    order = "self_cuda_time_total" if args.device == "cuda" else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90)
    with Path(args.profile).open("a") as file:
        file.write(f"==== {variant}\n{table}\n")


# ---- what the machine can do -------------------------------------------------------------------------------------


def pinned_copy_rate(*, to_host: bool) -> float:
    """GB/s between the GPU and pinned memory, 1 GiB at a time."""
    on_gpu = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    on_host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    source, target = (on_gpu, on_host) if to_host else (on_host, on_gpu)
    timed("cuda", lambda: target.copy_(source, non_blocking=True))
    taken, _ = timed("cuda", lambda: [target.copy_(source, non_blocking=True) for _ in range(5)])
    return 5 * (1 << 30) / taken / 1e9


def machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "matmul_tflops": matmul_rate(device) / 1e12}
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
        found["pinned_to_host_gb_per_s"] = pinned_copy_rate(to_host=True)
        found["pinned_to_gpu_gb_per_s"] = pinned_copy_rate(to_host=False)
        torch.cuda.empty_cache()
    return found


def make_tiny(folder: Path) -> None:
    tool = Path(__file__).resolve().parents[1] / "make_tiny_model.py"
    subprocess.run([sys.executable, str(tool), "--output", str(folder), "--untrained"], check=True, capture_output=True)


# ---- output ------------------------------------------------------------------------------------------------------


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"


def print_row(variant: str, result: dict[str, Any]) -> None:
    text = result.get("error") or f"{result['step_s']:.3f} s a step; {result['blocks']}"
    print(f"{variant}: {text}", flush=True)


def print_table(results: dict[str, dict[str, Any]]) -> None:
    names = [*COLUMNS, *MOVES]
    print("variant".ljust(14), *(name.rjust(15) for name in names))
    for variant, result in results.items():
        values = [result["error"]] if "error" in result else [cell(result.get(name)).rjust(15) for name in names]
        print(variant.ljust(14), *values)


if __name__ == "__main__":
    main()
