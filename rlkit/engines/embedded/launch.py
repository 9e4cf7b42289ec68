"""The command that starts the embedded engine. Called by `engines/base.py`."""

import sys

from rlkit.config.schema import RunConfig
from rlkit.engines.base import EngineSlot, LaunchSpec, engine_dtype
from rlkit.types.errors import ConfigError


def embedded_launch(cfg: RunConfig, slot: EngineSlot) -> LaunchSpec:
    """One process of one rank. ConfigError when the slot spans several GPUs."""
    if slot.num_gpus != 1:
        raise ConfigError(
            f"the embedded engine runs on one GPU, but --rollout-num-gpus-per-engine is {slot.num_gpus}; "
            "use --rollout-engine sglang or --rollout-num-gpus-per-engine 1"
        )
    options = {
        "model-path": cfg.model.hf_checkpoint,
        "host": slot.host,
        "port": slot.port,
        "device": "cpu" if slot.device == "cpu" else f"cuda:{slot.base_gpu_id}",
        "dtype": engine_dtype(cfg, slot),
        "weight-version": slot.weight_version,
        "max-running-requests": cfg.engine.embedded_max_running_requests,
        "num-threads": slot.num_threads,
        "random-seed": slot.seed,
    }
    argv = [sys.executable, "-m", "rlkit.engines.embedded.server"]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    if cfg.train.true_on_policy_mode:
        argv.append("--batch-invariant")
    if cfg.model.trust_remote_code:
        argv.append("--trust-remote-code")
    # Threads also by environment: OpenMP sizes its pool before the command line is read.
    env: dict[str, str | None] = {"OMP_NUM_THREADS": str(slot.num_threads)} if slot.device == "cpu" else {}
    return LaunchSpec(argv=argv, env=env)
