#!/usr/bin/env bash
# Teaches a tiny model to ask a calculator and to use its answer, on the CPU: makes a model that half-knows how, then
# trains it by GRPO over several turns. A few minutes on two quiet cores.
#
#   bash scripts/run-tiny-calculator.sh [flags of train.py]      e.g. --num-rollout 10, --dry-run
#   AGENT=1 bash scripts/run-tiny-calculator.sh                  the same by an agent that speaks HTTP (docs/agents.md)
#
# Environment: SEED (default 0) seeds the model, the data and the samples; PYTHON (default: what scripts/install.sh gives).
# The last line says PASS or FAIL and the exit status agrees: greedy accuracy on held-out products must rise from at most
# 0.65 to at least 0.9.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/recipe.sh
python=$(choose_python)
seed=${SEED:-0}
model=runs/calculator/model-$seed
run=runs/calculator/$(date +%Y%m%d-%H%M%S)-seed$seed
example=examples/calculator

arguments=("$@")
for ((i = 0; i < $#; i++)); do
    case "${arguments[i]}" in
    --output-dir) run=${arguments[i + 1]:-$run} ;;
    --output-dir=*) run=${arguments[i]#*=} ;;
    esac
done
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
$is_dry_run || "$python" $example/make_model.py --output "$model" --seed "$seed"

by=(--custom-generate-function-path $example/tool.py:generate)
[[ -z "${AGENT:-}" ]] || by=(--custom-agent-path $example/agent.py:run)

began=$SECONDS
"$python" train.py \
    --hf-checkpoint "$model" \
    --prompt-data "$model/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template \
    --rollout-shuffle --rollout-seed "$seed" \
    "${by[@]}" --custom-rm-path $example/tool.py:reward \
    --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --device cpu \
    --num-rollout 20 --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 2 \
    --rollout-max-response-len 48 \
    --eval-interval 10 --eval-prompt-data heldout "$model/data/heldout.jsonl" --eval-temperature 0 \
    --lr 5e-4 --lr-warmup-iters 5 --eps-clip-high 0.28 \
    --embedded-max-running-requests 128 \
    --output-dir "$run" "$@" || {
    status=$?
    $is_dry_run || echo "FAIL: train.py ended with status $status"
    exit "$status"
}
$is_dry_run && exit
exec "$python" tools/quickstart_check.py --run "$run" --seconds $((SECONDS - began)) --max-before 0.65 --min-after 0.9
