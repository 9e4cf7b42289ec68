# Qwen2.5-7B, to be sourced: what `--hf-checkpoint` must hold. See docs/megatron.md.
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944
    --num-attention-heads 28 --num-query-groups 4 --kv-channels 128
    --vocab-size 152064 --rotary-base 1000000 --norm-epsilon 1e-6
)
