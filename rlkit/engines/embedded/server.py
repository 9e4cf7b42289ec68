"""The embedded engine as a process: `python -m rlkit.engines.embedded.server --model-path FOLDER --port PORT`.

Speaks SGLang's native API over a transformers model. Started by `orchestration/` with the command of `launch.py`.
Flags that SGLang has too are called and mean the same here.
"""

import argparse
import dataclasses
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil
import torch
import transformers
import uvicorn
from transformers import PreTrainedModel

from rlkit.engines.embedded.app import create_app
from rlkit.engines.embedded.engine import Engine
from rlkit.engines.embedded.model import (
    ModelRunner,
    end_of_sequence_ids,
    load_model,
    load_tokenizer,
    model_context_length,
)
from rlkit.engines.embedded.protocol import RequestReader
from rlkit.engines.embedded.service import Service
from rlkit.engines.wire import parse_weight_version
from rlkit.types.errors import EngineError

logger = logging.getLogger("rlkit.engines.embedded")

CACHE_MEMORY_SHARE = 0.5
"""Share of the memory that is free after loading which the key-value cache may fill, unless told otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """The command line."""

    model_path: str
    host: str
    port: int
    device: str
    dtype: str
    weight_version: str
    max_running_requests: int
    context_length: int
    """0: what the model's config allows."""
    max_total_tokens: int
    """Bound on sequences x longest sequence in the cache; 0: half of the free memory."""
    prefill_tokens: int
    num_threads: int
    """Intra-op threads; 0 leaves torch's choice."""
    seed: int
    trust_remote_code: bool
    batch_invariant: bool


def parse_args(argv: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser(prog="rlkit.engines.embedded.server", allow_abbrev=False)
    parser.add_argument("--model-path", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--weight-version", default="0", help="version that the loaded weights count as, an integer")
    parser.add_argument("--max-running-requests", type=int, default=64, help="sequences decoded together")
    parser.add_argument("--context-length", type=int, default=0, help="0: the model's own")
    parser.add_argument("--max-total-tokens", type=int, default=0, help="cache size in tokens; 0: half of free memory")
    parser.add_argument("--chunked-prefill-size", type=int, default=2048, dest="prefill_tokens")
    parser.add_argument("--num-threads", type=int, default=0, help="intra-op threads; 0: torch's choice")
    parser.add_argument("--random-seed", "--seed", type=int, default=0, dest="seed")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="the same bits in any batch, as a trainer computes; one thread"
    )
    args = ServerArgs(**vars(parser.parse_args(argv)))
    for name in ("max_running_requests", "prefill_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"{name} must be at least 1, got {getattr(args, name)}")
    return args


def serve(args: ServerArgs) -> None:
    """Load the model and answer until SIGTERM."""
    start = time.perf_counter()
    parse_weight_version(args.weight_version)
    if args.num_threads or args.batch_invariant:
        torch.set_num_threads(1 if args.batch_invariant else args.num_threads)
    model = load_model(args.model_path, device=args.device, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    tokenizer = load_tokenizer(args.model_path, trust_remote_code=args.trust_remote_code)
    context_length = args.context_length or model_context_length(model)
    runner = ModelRunner(
        model,
        max_slots=args.max_running_requests,
        context_length=context_length,
        is_batch_invariant=args.batch_invariant,
    )
    bytes_per_token = runner.check_against_transformers()
    max_total_tokens = args.max_total_tokens or _affordable_tokens(runner.device, bytes_per_token)
    reader = RequestReader(
        tokenizer=tokenizer,
        eos_ids=end_of_sequence_ids(args.model_path, tokenizer),
        vocab_size=runner.vocab_size,
        context_length=context_length,
        seed=args.seed,
    )
    service = Service(
        reader,
        server_info=_server_info(args, max_total_tokens=max_total_tokens, context_length=context_length),
        model_info=_model_info(args, model),
    )
    engine = Engine(
        runner,
        weight_version=args.weight_version,
        max_running_requests=args.max_running_requests,
        max_total_tokens=max_total_tokens,
        prefill_tokens=args.prefill_tokens,
        deliver=service.deliver,
        on_crash=lambda: os._exit(1),  # supervisors see the exit status; a server without its engine helps nobody
    )

    async def on_start() -> None:
        service.bind(engine)
        engine.start()
        logger.info(
            "serving %s on %s:%d after %.1f s: %s, %s, %d sequences, %d cache tokens (%d bytes each)",
            args.model_path,
            args.host,
            args.port,
            time.perf_counter() - start,
            args.device,
            args.dtype,
            args.max_running_requests,
            max_total_tokens,
            bytes_per_token,
        )

    config = uvicorn.Config(
        create_app(service, on_start=on_start), host=args.host, port=args.port, log_level="warning", access_log=False
    )
    _Server(config).run()


class _Server(uvicorn.Server):
    """Exits at once on a signal: requests in flight are lost with the process anyway."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        logger.info("stopping on %s", signal.Signals(sig).name)
        logging.shutdown()
        os._exit(0)


def _affordable_tokens(device: torch.device, bytes_per_token: int) -> int:
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        free_bytes = psutil.virtual_memory().available
    return max(1, int(free_bytes * CACHE_MEMORY_SHARE) // bytes_per_token)


def _server_info(args: ServerArgs, *, max_total_tokens: int, context_length: int) -> dict[str, Any]:
    return dataclasses.asdict(args) | {
        "engine": "rlkit embedded",
        "version": f"transformers-{transformers.__version__}",
        "served_model_name": args.model_path,
        "tokenizer_path": args.model_path,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "context_length": context_length,
        "max_total_num_tokens": max_total_tokens,
        "max_req_input_len": context_length - 6,
        "pid": os.getpid(),
    }


def _model_info(args: ServerArgs, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "model_path": args.model_path,
        "tokenizer_path": args.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": model.config.model_type,
        "architectures": model.config.architectures,
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    transformers.utils.logging.disable_progress_bar()
    try:
        serve(parse_args(sys.argv[1:]))
    except EngineError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
