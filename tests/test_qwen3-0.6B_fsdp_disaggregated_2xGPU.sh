#!/usr/bin/env bash
# One GPU trains, the other generates; weights go through a process group. Settings: tests/gpu_smoke.sh.
name=disaggregated_2xGPU
layout=(--actor-num-gpus-per-node 1 --rollout-num-gpus 1)
source "$(dirname "${BASH_SOURCE[0]}")/gpu_smoke.sh"
