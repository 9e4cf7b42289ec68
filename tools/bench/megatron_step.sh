#!/usr/bin/env bash
# Megatron-Core on one GPU, unattended: its GPU tests, then a GRPO step of W1 (0.6B, engine and trainer on the same GPU) timed
# with either backend. Prints a short table last.
#
#   bash tools/bench/megatron_step.sh TOKENIZER_FOLDER PROMPTS.jsonl [OUTPUT_FOLDER]
#
# Needs megatron-core 0.19 and triton besides what train.py needs. Environment: PYTHON (default: python), STEPS (default 7),
# LIMIT_S (default 420: seconds for each backend's loop).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

tokenizer=${1:?names no folder with a tokenizer}
prompts=${2:?names no JSONL file with prompts}
output=${3:-runs/bench/megatron}
python=${PYTHON:-python}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$output"

"$python" -m pytest -q -m gpu tests/backends/test_megatron_gpu.py -p no:cacheprovider >"$output/tests.log" 2>&1
tests=$(tail -n 1 "$output/tests.log")

for backend in fsdp megatron; do
    "$python" tools/bench/gpu_step.py --workload W1 --parts loop --steps "${STEPS:-7}" --loop-limit-s "${LIMIT_S:-420}" \
        --tokenizer "$tokenizer" --prompts "$prompts" --output "$output/$backend" -- --train-backend "$backend" \
        >"$output/$backend.log" 2>&1
    echo "$backend: gpu_step.py ended with status $?" >>"$output/$backend.log"
done

echo "GPU tests: $tests"
for backend in fsdp megatron; do
    echo "---- $backend"
    tail -n 25 "$output/$backend.log"
done
