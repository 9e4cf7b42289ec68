#!/usr/bin/env bash
# Two GPUs, each shared by a training rank and an engine; weights go over CUDA IPC. Settings: tests/gpu_smoke.sh.
name=colocated_2xGPU
layout=(--actor-num-gpus-per-node 2 --colocate)
source "$(dirname "${BASH_SOURCE[0]}")/gpu_smoke.sh"
