#!/usr/bin/env bash
# Installs rlkit into .venv, makes a tiny model that half-knows how to add, and teaches it the rest by GRPO on the CPU,
# through the same train.py, router, engines and weight updates that a cluster uses. About two minutes on two
# quiet cores once it is installed.
#
#   bash scripts/quickstart.sh [flags of train.py]       e.g. --num-rollout 80, --dry-run
#
# Environment: SEED (default 0) seeds the model, the data and the samples. Installation: see scripts/install.sh.
# The last line says PASS or FAIL and the exit status agrees: greedy accuracy on held-out sums must rise from at most
# 0.5 to at least 0.85 within five minutes of training.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed=${SEED:-0}
source scripts/recipe.sh
python=$(choose_python)
model=runs/quickstart/tiny-$seed
run=runs/quickstart/$(date +%Y%m%d-%H%M%S)-seed$seed

arguments=("$@")
for ((i = 0; i < $#; i++)); do
    case "${arguments[i]}" in
    --output-dir) run=${arguments[i + 1]:-$run} ;;
    --output-dir=*) run=${arguments[i]#*=} ;;
    esac
done
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
$is_dry_run || "$python" tools/make_tiny_model.py --output "$model" --seed "$seed"

began=$SECONDS
"$python" train.py \
    --hf-checkpoint "$model" \
    --prompt-data "$model/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template \
    --rollout-shuffle --rollout-seed "$seed" \
    --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --device cpu \
    --num-rollout 40 --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps-per-rollout 2 \
    --rollout-max-response-len 8 --rm-type exact \
    --eval-interval 10 --eval-prompt-data heldout "$model/data/heldout.jsonl" --eval-temperature 0 \
    --lr 1e-3 --lr-warmup-iters 10 --lr-decay-style linear --min-lr 1e-4 --eps-clip-high 0.28 \
    --embedded-max-running-requests 256 \
    --output-dir "$run" "$@" || {
    status=$?
    $is_dry_run || echo "FAIL: train.py ended with status $status"
    exit "$status"
}
$is_dry_run && exit
exec "$python" tools/quickstart_check.py --run "$run" --seconds $((SECONDS - began))
