#!/usr/bin/env bash
# The split layout on one GPU: trainer and engine beside each other on it, weights broadcast over gloo, because NCCL
# refuses two ranks on one GPU. The engine is an external one. Settings: tests/gpu_smoke.sh.
name=split_on_one_gpu
port=${RLKIT_SMOKE_PORT:-31999}
num_gpus=1
layout=(--actor-num-gpus-per-node 1 --rollout-external-engine-addrs "127.0.0.1:$port" --update-weight-transport gloo)

start_engine() {
    local flags=()
    [[ $device == cpu ]] || flags=(--sglang-mem-fraction-static 0.3 --sglang-cuda-graph-max-bs-decode 128)
    "$python" tests/external_engine.py "$model" "$port" "$device" "${flags[@]}" >"$folder/$name.engine.log" 2>&1 &
    engine=$!
    trap 'kill $engine 2>/dev/null || true; wait $engine 2>/dev/null || true' EXIT
    local waited=0
    until curl -fs "http://127.0.0.1:$port/health" >/dev/null; do
        kill -0 "$engine" 2>/dev/null || fail "the engine has ended; see $folder/$name.engine.log"
        ((waited++ < 300)) || fail "the engine does not answer; see $folder/$name.engine.log"
        sleep 1
    done
}
source "$(dirname "${BASH_SOURCE[0]}")/gpu_smoke.sh"
