"""An engine that no run owns: the command that rlkit itself would start, on this process.

python tests/external_engine.py MODEL PORT cuda|cpu [flags of train.py]
"""

import os
import sys

from rlkit.config.load import load_config
from rlkit.engines.base import EngineSlot, build_launch


def main() -> None:
    model, port, device, *flags = sys.argv[1:]
    basics = ["--hf-checkpoint", model, "--prompt-data", f"{model}/config.json", "--rm-type", "random"]
    basics += ["--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "2", "--device", device]
    cfg = load_config([*basics, "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", *flags]).config
    slot = EngineSlot(
        index=0,
        host="127.0.0.1",
        port=int(port),
        num_gpus=1,
        base_gpu_id=0,
        device="cuda" if device == "cuda" else "cpu",
        num_threads=1,
        weight_version=0,
        seed=1,
    )
    spec = build_launch(cfg, slot)
    environment = {key: value for key, value in (os.environ | spec.env).items() if value is not None}
    os.execvpe(spec.argv[0], spec.argv, environment)


if __name__ == "__main__":
    main()
