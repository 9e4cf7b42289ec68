# Qwen3-30B-A3B, to be sourced: what `--hf-checkpoint` must hold. See docs/megatron.md.
MODEL_ARGS=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --num-query-groups 4 --kv-channels 128
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8
    --vocab-size 151936 --rotary-base 1000000 --norm-epsilon 1e-6
)
