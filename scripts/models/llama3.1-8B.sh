# Llama-3.1-8B, to be sourced: what `--hf-checkpoint` must hold. See docs/megatron.md.
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --num-query-groups 8 --kv-channels 128
    --vocab-size 128256 --rotary-base 500000 --norm-epsilon 1e-5
)
