#!/usr/bin/env bash
# Qwen3-30B-A3B on one node of 8 H100: Megatron-Core (tensor 4, expert 8) and one SGLang engine of 8 GPUs take turns on the
# same GPUs. GRPO on DAPO-Math-17k, evaluated on AIME 2024.
#
#   MODEL=/models/Qwen3-30B-A3B TRAIN_DATA=dapo-math-17k.jsonl EVAL_DATA=aime-2024.jsonl \
#       bash scripts/run-qwen3-30B-A3B.sh [flags of train.py]
#
# With MODEL=Qwen3-30B-A3B-FP8 (or what tools/convert_hf_to_fp8.py makes) training stays as it is and the engines get fp8.
# --dry-run needs no GPU, model or data. Environment: PYTHON (default: that of .venv, else python).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/recipe.sh
source scripts/models/qwen3-30B-A3B.sh
model=${MODEL:-/models/Qwen3-30B-A3B}
train_data=${TRAIN_DATA:-/data/dapo-math-17k.jsonl}
eval_data=${EVAL_DATA:-/data/aime-2024.jsonl}
if $is_dry_run; then
    [[ -f "$model/config.json" ]] || model=scripts/models/Qwen3-30B-A3B # its config.json alone
else
    [[ -f "$model/config.json" ]] || {
        echo "MODEL=$model holds no config.json; set MODEL to a folder with Qwen3-30B-A3B's Hugging Face checkpoint" >&2
        exit 2
    }
    for variable in TRAIN_DATA:$train_data EVAL_DATA:$eval_data; do
        [[ -f "${variable#*:}" ]] || {
            echo "${variable%%:*}=${variable#*:} does not exist; set ${variable%%:*} to a JSONL file with prompt and label" >&2
            exit 2
        }
    done
fi

layout=(
    --train-backend megatron --actor-num-gpus-per-node 8 --num-gpus-per-node 8 --colocate
    --tensor-model-parallel-size 4 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --max-tokens-per-gpu 20480 --optimizer-cpu-offload
)
data=(
    --prompt-data "$train_data" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler
    --eval-interval 20 --eval-prompt-data aime "$eval_data"
    --n-samples-per-eval-prompt 16 --eval-max-response-len 16384 --eval-top-p 0.7
)
rollout=(
    --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 8192 --rollout-temperature 1
)
loss=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28)
optimizer=(--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
engines=(--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-ep-size 8 --sglang-server-concurrency 512)

export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-$here}" train.py \
    --hf-checkpoint "$model" "${MODEL_ARGS[@]}" --gpu-type H100 \
    "${layout[@]}" "${data[@]}" "${rollout[@]}" "${loss[@]}" "${optimizer[@]}" "${engines[@]}" \
    --save-interval 20 --keep-checkpoints 2 --output-dir runs/qwen3-30B-A3B \
    "$@"
