#!/usr/bin/env bash
# Preference pairs on the quick start's model, by IPO on the CPU: 4,672 pairs of a right sum and one without its carry.
#
#   bash scripts/run-tiny-dpo.sh [flags of train.py]       e.g. --dpo-loss-type sigmoid, --num-rollout 20, --dry-run
#
# Environment: SEED (default 0) seeds the model and the data; PYTHON (default: what scripts/install.sh gives).
# The trained model is in `<run folder>/export`. Why IPO and not DPO's own loss: docs/algorithms.md, learning curves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/recipe.sh
python=$(choose_python)
seed=${SEED:-0}
model=runs/quickstart/tiny-$seed
run=runs/tiny-dpo/$(date +%Y%m%d-%H%M%S)-seed$seed

arguments=("$@")
for ((i = 0; i < $#; i++)); do
    case "${arguments[i]}" in
    --output-dir) run=${arguments[i + 1]:-$run} ;;
    --output-dir=*) run=${arguments[i]#*=} ;;
    esac
done
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if ! $is_dry_run; then
    "$python" tools/make_tiny_model.py --output "$model" --seed "$seed"
    "$python" tools/make_pairs.py --prompts "$model/data/train.jsonl" --output "$model/data/pairs.jsonl"
fi

exec "$python" train.py \
    --hf-checkpoint "$model" \
    --prompt-data "$model/data/pairs.jsonl" --input-key prompt --apply-chat-template \
    --rollout-shuffle --rollout-seed "$seed" \
    --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --device cpu \
    --loss-type dpo_loss --dpo-loss-type ipo --dpo-beta 0.2 \
    --num-rollout 60 --rollout-batch-size 64 --n-samples-per-prompt 2 \
    --lr 3e-4 --lr-decay-style linear --min-lr 1e-4 \
    --save-hf "$run/export" --output-dir "$run" "$@"
