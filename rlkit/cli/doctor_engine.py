"""The check of `rlkit doctor` that starts an engine behind a router, as a run does, and asks it for everything that a
run relies on: generate, abort by pause, resume, load weights, count versions.
"""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from rlkit.cli.doctor import Outcome, failed, ok, skipped
from rlkit.cli.doctor_machine import installed_version
from rlkit.cli.doctor_model import NO_MODEL, broken_weights
from rlkit.cli.machine import cuda_devices
from rlkit.config.schema import RunConfig
from rlkit.engines.access import forget_token, make_token
from rlkit.engines.base import EngineSlot, build_launch, engine_kind, free_port
from rlkit.orchestration.processes import ServerProcess
from rlkit.orchestration.router import register_engines, start_router
from rlkit.types.errors import ConfigError, EngineError

HOST = "127.0.0.1"
FIRST_VERSION = 3
NUM_TOKENS = 8
TIMEOUT_S = 60.0


def engine_contract(cfg: RunConfig) -> Outcome:
    if not cfg.model.hf_checkpoint:
        return skipped(NO_MODEL)
    if broken_weights(Path(cfg.model.hf_checkpoint)):
        return skipped("the model's files are broken")
    on_gpu = bool(cuda_devices()) and cfg.cluster.device != "cpu"
    device = "cuda" if on_gpu else "cpu"
    kind = engine_kind(cfg, device)
    # one GPU and no memory saver: whether the engine serves the model is asked, not how it shares
    small = replace(cfg.cluster, rollout_num_gpus_per_engine=1, colocate=False)
    cfg = replace(cfg, cluster=small, engine=replace(cfg.engine, rollout_engine=kind, sglang={**cfg.engine.sglang}))
    make_token()
    try:
        with tempfile.TemporaryDirectory(prefix="rlkit-doctor-") as folder:
            return _ask(cfg, kind, device, Path(folder))
    finally:
        forget_token()


def _ask(cfg: RunConfig, kind: str, device: str, folder: Path) -> Outcome:
    slot = EngineSlot(
        index=0,
        host=HOST,
        port=free_port(HOST),
        num_gpus=1,
        base_gpu_id=0,
        device=device,
        num_threads=1,
        weight_version=FIRST_VERSION,
        seed=1,
    )
    processes: list[ServerProcess] = []
    log = folder / "engine.log"
    try:
        spec = build_launch(cfg, slot)
        engine = ServerProcess(spec.argv, env=spec.env, log_path=log)
        processes.append(engine)
        router, router_url = start_router(cfg, HOST, folder)
        processes.append(router)
        url = f"http://{HOST}:{slot.port}"
        asyncio.run(_ready(url, engine, cfg.engine.engine_start_timeout_s))
        register_engines(router_url, [url], router)
        told = asyncio.run(_converse(cfg, url, router_url))
    except ConfigError as error:
        return failed(str(error), "correct the flags")
    except (EngineError, OSError, TimeoutError) as error:
        return failed(f"{kind}: {' '.join(str(error).split())[:1500]}", _remedy(kind))
    finally:
        for process in reversed(processes):
            process.stop()
    return ok(f"{kind}: {told}")


async def _ready(url: str, process: ServerProcess, timeout_s: float) -> None:
    from rlkit.orchestration.engine_process import wait_until_ready  # local: Ray, while the engine starts

    await wait_until_ready(url, process, 0, timeout_s=timeout_s)


async def _converse(cfg: RunConfig, url: str, router_url: str) -> str:
    """EngineError where an answer is not what a run relies on."""
    from rlkit.engines.client import EngineClient, RouterClient  # local: torch
    from rlkit.types.generation import FinishReason, GenerateRequest, SamplingParams

    def request(rid: str, num_tokens: int) -> GenerateRequest:
        sampling = SamplingParams(temperature=1.0, max_new_tokens=num_tokens, ignore_eos=True)
        return GenerateRequest(rid=rid, input_ids=[1, 2, 3, 4], sampling=sampling, seed=7)

    async with (
        RouterClient(router_url, timeout_s=TIMEOUT_S) as router,
        EngineClient(url, timeout_s=TIMEOUT_S) as engine,
    ):
        answer = await router.generate(request("doctor-1", NUM_TOKENS))
        if len(answer.output_ids) != NUM_TOKENS or len(answer.logprobs) != NUM_TOKENS:
            raise EngineError(f"asked for {NUM_TOKENS} tokens with log-probs, got {len(answer.output_ids)}")
        if answer.weight_version != FIRST_VERSION:
            raise EngineError(f"started with weights v{FIRST_VERSION}, an answer says v{answer.weight_version}")
        await engine.pause("abort")
        waiting = asyncio.create_task(router.generate(request("doctor-2", NUM_TOKENS)))
        await asyncio.sleep(0.5)
        if waiting.done() and waiting.result().finish_reason is not FinishReason.ABORT:
            raise EngineError("a paused engine went on generating")
        await engine.update_from_disk(path=str(Path(cfg.model.hf_checkpoint).absolute()), version=FIRST_VERSION + 1)
        await engine.resume()
        held = await waiting
        if held.finish_reason is FinishReason.ABORT:
            held = await router.generate(request("doctor-3", NUM_TOKENS))
        if held.weight_version != FIRST_VERSION + 1:
            raise EngineError(f"after the update to v{FIRST_VERSION + 1} an answer says v{held.weight_version}")
        await engine.flush_cache(timeout_s=TIMEOUT_S)
        if (await engine.model_info()).weight_version != FIRST_VERSION + 1:
            raise EngineError("the engine does not tell the version of the weights that it has loaded")
    return f"generates through the router, pauses, loads weights (v{FIRST_VERSION} -> v{FIRST_VERSION + 1}), resumes"


def _remedy(kind: str) -> str:
    if kind == "sglang" and installed_version("sglang") is None:
        return "pip install sglang==0.5.17, or name the Python that has it with RLKIT_SGLANG_PYTHON"
    return "the end of the engine's log is above; try the engine alone, or another --rollout-engine"
