#!/usr/bin/env bash
# A few steps of train.py on GPUs, then a look at what they left behind; sourced by the smoke tests beside it, each of
# which names its layout in `layout`, its run in `name`, and may define `num_gpus` (2) and `start_engine`.
#
# Environment:
#   RLKIT_SMOKE_MODEL      a checkpoint folder (default: random weights in the shape of Qwen3-0.6B, made on the spot)
#   RLKIT_SMOKE_TOKENIZER  a folder whose tokenizer the random model gets; needed unless RLKIT_SMOKE_MODEL is set
#   RLKIT_SMOKE_DEVICE     cuda (default), or cpu: the tiny model of the quick start on two rank slots
#   RLKIT_SMOKE_DIR        where model and run go (default: runs/smoke)
#   PYTHON                 default: python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python}
device=${RLKIT_SMOKE_DEVICE:-cuda}
folder=${RLKIT_SMOKE_DIR:-runs/smoke}
run=$folder/$name
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

fail() {
    echo "FAIL: $name: $*" >&2
    exit 1
}

case "$device" in
cpu)
    model=${RLKIT_SMOKE_MODEL:-$folder/tiny}
    [[ -n "${RLKIT_SMOKE_MODEL:-}" ]] || "$python" tools/make_tiny_model.py --untrained --output "$model"
    prompts=$model/data/train.jsonl
    size=(--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 --max-tokens-per-gpu 256)
    ;;
cuda)
    model=${RLKIT_SMOKE_MODEL:-$folder/qwen3-0.6B}
    if [[ -z "${RLKIT_SMOKE_MODEL:-}" ]]; then
        tokenizer=${RLKIT_SMOKE_TOKENIZER:?names no folder with a tokenizer, and RLKIT_SMOKE_MODEL no checkpoint}
        "$python" tools/make_random_model.py --shape qwen3-0.6B --tokenizer "$tokenizer" --device cuda --output "$model"
    fi
    "$python" tools/make_arithmetic_data.py --output "$folder/arithmetic"
    prompts=$folder/arithmetic/train.jsonl
    size=(--rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 128 --max-tokens-per-gpu 8192)
    ;;
*) fail "RLKIT_SMOKE_DEVICE=$device: it must be cuda or cpu" ;;
esac

rm -rf "$run"
if declare -F start_engine >/dev/null; then start_engine; fi
"$python" train.py \
    --hf-checkpoint "$model" --prompt-data "$prompts" --input-key prompt --label-key label --apply-chat-template \
    --rm-type random --num-rollout 3 --lr 1e-5 --device "$device" "${size[@]}" "${layout[@]}" --num-gpus-per-node "${num_gpus:-2}" \
    --check-weight-update-equal --save-hf "$run/hf-{rollout_id}" --output-dir "$run" "$@" || fail "train.py ended with status $?"

# log-probs: bfloat16 kernels of two implementations on a GPU, float32 on a CPU
"$python" tools/check_smoke_run.py --run "$run" --steps 3 --export "$run/hf-2" \
    --max-logprob-diff "$([[ $device == cpu ]] && echo 1e-4 || echo 0.03)" || fail "see above"
