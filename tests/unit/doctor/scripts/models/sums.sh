# The quickstart's model.
NLAYERS="${MODEL_ARGS_NUM_LAYERS:-2}"

kinds=()
for ((i = 0; i < NLAYERS; i++)); do
    kinds+=(0)
done
printf -v FREQUENCY "[%s]" "$(IFS=', '; echo "${kinds[*]}")"

MODEL_ARGS=(
    --swiglu
    --num-layers $NLAYERS
    --hidden-size 128
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --normalization "RMSNorm"
    --moe-layer-freq $FREQUENCY
)
