#!/usr/bin/env bash
# Qwen3-4B on DAPO-Math-17k by GRPO, evaluated on AIME 2024: Megatron-Core (tensor 2 with sequence parallelism) and SGLang on
# the same GPUs of one node. The same by FSDP2: run-qwen3-4B-fsdp.sh.
#
#   MODEL=/models/Qwen3-4B TRAIN_DATA=dapo-math-17k.jsonl EVAL_DATA=aime-2024.jsonl \
#       bash scripts/run-qwen3-4B.sh [flags of train.py]
#
# Both files hold one JSON object a line with `prompt` (chat messages that ask for a last line `Answer: ...`) and `label`.
# Environment: NUM_GPUS of this node (default 8, a multiple of 2), PYTHON (default: that of .venv, else python).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=${MODEL:-/models/Qwen3-4B}
train_data=${TRAIN_DATA:-/data/dapo-math-17k.jsonl}
eval_data=${EVAL_DATA:-/data/aime-2024.jsonl}
gpus=${NUM_GPUS:-8}

source scripts/recipe.sh
source scripts/models/qwen3-4B.sh
if ! $is_dry_run; then
    [[ -f "$model/config.json" ]] || {
        echo "MODEL=$model holds no config.json; set MODEL to a folder with Qwen3-4B's Hugging Face checkpoint" >&2
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
    --train-backend megatron --tensor-model-parallel-size 2 --sequence-parallel
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --max-tokens-per-gpu 9216 --sglang-mem-fraction-static 0.7
)
data=(
    --prompt-data "$train_data" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type dapo
    --eval-interval 20 --eval-prompt-data aime "$eval_data"
    --n-samples-per-eval-prompt 16 --eval-max-response-len 16384
)
rollout=(
    --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 8192 --rollout-temperature 1
)
loss=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28)
optimizer=(--lr 1e-6 --adam-beta1 0.9 --adam-beta2 0.98 --weight-decay 0.1)

export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-$here}" train.py \
    --hf-checkpoint "$model" "${MODEL_ARGS[@]}" \
    --actor-num-gpus-per-node "$gpus" --num-gpus-per-node "$gpus" --colocate \
    "${layout[@]}" "${data[@]}" "${rollout[@]}" "${loss[@]}" "${optimizer[@]}" \
    --save-interval 20 --keep-checkpoints 2 --output-dir runs/qwen3-4B-megatron \
    "$@"
