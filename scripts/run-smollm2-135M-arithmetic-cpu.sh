#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns arithmetic in words by GRPO on the CPU, within 24 GiB.
#
#   bash scripts/run-smollm2-135M-arithmetic-cpu.sh [flags of train.py]
#
# Measured curve: docs/performance.md. Environment: PYTHON and MODEL as in run-smollm2-135M-cpu.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/recipe.sh
python=$(choose_python smollm2)
model=${MODEL:-runs/models/SmolLM2-135M-Instruct}
data=runs/arithmetic
if ! $is_dry_run; then
    "$python" tools/get_smollm2.py --output "$model"
    "$python" tools/make_arithmetic_data.py --output "$data"
fi

export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "$python" train.py \
    --hf-checkpoint "$model" \
    --prompt-data "$data/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --custom-rm-path scripts/rewards/partial_credit.py:score --reward-key score --eval-reward-key correct \
    --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --device cpu \
    --num-rollout 30 --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 20 \
    --max-tokens-per-gpu 2048 --lr 2e-5 --lr-warmup-iters 3 --eps-clip-high 0.28 \
    --eval-interval 10 --eval-prompt-data heldout "$data/heldout.jsonl" --eval-temperature 0 \
    --output-dir runs/smollm2-arithmetic \
    "$@"
