#!/usr/bin/env bash
# The quick start's task by asynchronous training: trainer and engine side by side on a core each, generation never stops.
#
#   bash scripts/run-tiny-async.sh [flags of train_async.py]       e.g. --async-mode one-step, --max-staleness 1, --dry-run
#
# Environment: SEED (default 0) seeds the model, the data and the samples; PYTHON (default: what scripts/install.sh gives).
# The last line says PASS or FAIL, as in the quick start. Measured: docs/performance.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/recipe.sh
python=$(choose_python)
seed=${SEED:-0}
model=runs/quickstart/tiny-$seed
run=runs/tiny-async/$(date +%Y%m%d-%H%M%S)-seed$seed

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
"$python" train_async.py \
    --hf-checkpoint "$model" \
    --prompt-data "$model/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template \
    --rollout-shuffle --rollout-seed "$seed" \
    --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --num-gpus-per-node 2 --device cpu \
    --async-mode full \
    --num-rollout 40 --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps-per-rollout 2 \
    --rollout-max-response-len 8 --rm-type exact --use-rollout-logprobs \
    --eval-interval 10 --eval-prompt-data heldout "$model/data/heldout.jsonl" --eval-temperature 0 \
    --lr 1e-3 --lr-warmup-iters 10 --lr-decay-style linear --min-lr 1e-4 --eps-clip-high 0.28 \
    --embedded-max-running-requests 256 \
    --output-dir "$run" "$@" || {
    status=$?
    $is_dry_run || echo "FAIL: train_async.py ended with status $status"
    exit "$status"
}
$is_dry_run && exit
exec "$python" tools/quickstart_check.py --run "$run" --seconds $((SECONDS - began))
