# DeepSeek-R1, to be sourced: what `--hf-checkpoint` must hold. See docs/megatron.md.
MODEL_ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128
    --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --vocab-size 129280 --rotary-base 10000 --norm-epsilon 1e-6
)
