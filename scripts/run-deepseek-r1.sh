#!/usr/bin/env bash
# DeepSeek-R1 on 16 nodes of 8 H100: Megatron-Core (tensor 8, pipeline 4, context 4, expert 32) and two SGLang engines of
# 64 GPUs (expert parallel 64, attention in 8 data-parallel parts, DeepEP, EAGLE) take turns on the same GPUs. Masters are
# bfloat16 and float32, engines get fp8 in blocks of 128 x 128, as the checkpoint has it. DAPO on 32k responses.
#
#   MODEL=/models/DeepSeek-R1 TRAIN_DATA=dapo-math-17k.jsonl EVAL_DATA=aime-2024.jsonl HOSTS=hosts.txt \
#       bash scripts/run-deepseek-r1.sh [flags of train.py]
#
# HOSTS names one node a line, this one first; each is reached by ssh and runs `ray start --address` from the same folder.
# Without it a Ray cluster has to run already: start `ray start --head` here and `ray start --address HEAD:6379` on the
# other 15 nodes, or submit the recipe with scripts/slurm/run.sbatch. Model, data and the run's folder are seen by all.
#
#   bash scripts/run-deepseek-r1.sh --dry-run
#
# needs none of this: it prints every group, the memory of every stage and host, and what cannot work. Docs:
# docs/deepseek_r1.md. Environment: PYTHON, RAY_PORT (6379), NUM_NODES (16).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/recipe.sh
source scripts/models/deepseek-r1.sh
nodes=${NUM_NODES:-16}
model=${MODEL:-/models/DeepSeek-R1}
train_data=${TRAIN_DATA:-/data/dapo-math-17k.jsonl}
eval_data=${EVAL_DATA:-/data/aime-2024.jsonl}
if $is_dry_run; then
    [[ -f "$model/config.json" ]] || model=scripts/models/DeepSeek-R1 # its config.json alone
else
    [[ -f "$model/config.json" ]] || {
        echo "MODEL=$model holds no config.json; set MODEL to a folder with DeepSeek-R1's Hugging Face checkpoint" >&2
        exit 2
    }
    for variable in TRAIN_DATA:$train_data EVAL_DATA:$eval_data; do
        [[ -f "${variable#*:}" ]] || {
            echo "${variable%%:*}=${variable#*:} does not exist; set ${variable%%:*} to a JSONL file with prompt and label" >&2
            exit 2
        }
    done
    source scripts/join_hosts.sh # starts Ray on the nodes of HOSTS
fi

layout=(
    --train-backend megatron --actor-num-nodes "$nodes" --actor-num-gpus-per-node 8 --num-gpus-per-node 8 --colocate
    --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
    --decoder-last-pipeline-num-layers 13 --context-parallel-size 4
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --max-tokens-per-gpu 16384 --optimizer-cpu-offload
)
data=(
    --prompt-data "$train_data" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler
    --eval-interval 20 --eval-prompt-data aime "$eval_data"
    --n-samples-per-eval-prompt 8 --eval-max-response-len 32768 --eval-top-p 0.7
)
rollout=(
    --num-rollout 3000 --rollout-batch-size 128 --n-samples-per-prompt 8 --over-sampling-batch-size 256
    --dynamic-sampling-filter-path check_reward_nonzero_std --num-steps-per-rollout 4
    --rollout-max-response-len 32768 --rollout-temperature 1
)
loss=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --calculate-per-token-loss)
optimizer=(--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
engines=(
    --rollout-num-gpus-per-engine 64 --sglang-mem-fraction-static 0.7
    --sglang-ep-size 64 --sglang-enable-dp-attention --sglang-dp-size 8
    --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head --sglang-disable-radix-cache
    --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto
    --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3
    --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4
    --sglang-server-concurrency 1024
)

export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-$here}" train.py \
    --hf-checkpoint "$model" "${MODEL_ARGS[@]}" --gpu-type H100 --ray-address auto \
    "${layout[@]}" "${data[@]}" "${rollout[@]}" "${loss[@]}" "${optimizer[@]}" "${engines[@]}" \
    --save-interval 20 --keep-checkpoints 2 --output-dir runs/deepseek-r1 \
    "$@"
