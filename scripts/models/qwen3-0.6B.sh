# Qwen3-0.6B, to be sourced: what `--hf-checkpoint` must hold. See docs/megatron.md.
MODEL_ARGS=(
    --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072
    --num-attention-heads 16 --num-query-groups 8 --kv-channels 128
    --vocab-size 151936 --rotary-base 1000000 --norm-epsilon 1e-6
)
