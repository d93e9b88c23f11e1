#!/bin/bash
# The constructs of slime's launch scripts for one machine.
pkill -9 sglang
set -ex
export PYTHONUNBUFFERED=1

LINKS=$(nvidia-smi topo -m 2>/dev/null | grep -c NV)
if [ "$LINKS" -gt 0 ]; then
    HAS_NVLINK=1
else
    HAS_NVLINK=0
fi
NUM_GPUS=${NUM_GPUS:-0}
if [ -z "$NUM_GPUS" ] || [ "$NUM_GPUS" -le 0 ]; then
    NUM_GPUS=1
fi

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/sums.sh"

CKPT_ARGS=(
    --hf-checkpoint ${BASE_DIR}/model
    #--hf-checkpoint /root/another
)
ROLLOUT_ARGS=(
    --prompt-data "${BASE_DIR}/train.jsonl"   # with a comment
    --input-key prompt
    --label-key label
    --rm-type number

    --num-rollout 3
    --rollout-batch-size 4
    --n-samples-per-prompt 2
    --rollout-max-response-len 64
    --rollout-temperature 1
)
EVAL_ARGS=(
    --eval-interval 2
    --eval-prompt-data sums ${BASE_DIR}/heldout.jsonl
)
OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --adam-beta2=0.98
)
WANDB_ARGS=(
    # --use-wandb
    # --wandb-key ${WANDB_KEY}
)
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
)
MISC_ARGS=(
    --attention-dropout 0.0
    --attention-backend flash
)

export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus ${NUM_GPUS} --disable-usage-stats

RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/:${SCRIPT_DIR}/plugins\",
    \"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"
  }
}"

ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json="${RUNTIME_ENV_JSON}" \
    -- python3 train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node ${NUM_GPUS} \
    --colocate \
    ${MODEL_ARGS[@]} \
    ${CKPT_ARGS[@]} \
    "${ROLLOUT_ARGS[@]}" \
    ${OPTIMIZER_ARGS[@]} \
    ${WANDB_ARGS[@]} \
    ${EVAL_ARGS[@]} \
    ${SGLANG_ARGS[@]} \
    ${MISC_ARGS[@]}
