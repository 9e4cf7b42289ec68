# Qwen3-4B, to be sourced: what `--hf-checkpoint` must hold. See docs/megatron.md.
MODEL_ARGS=(
    --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728
    --num-attention-heads 32 --num-query-groups 8 --kv-channels 128
    --vocab-size 151936 --rotary-base 1000000 --norm-epsilon 1e-6
)
