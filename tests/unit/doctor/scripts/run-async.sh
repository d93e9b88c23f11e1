#!/bin/bash
# Several machines, user functions, and flags that asyncrl lacks.
if [ -z "${BASE_DIR:-}" ]; then
    echo "BASE_DIR is not set"
    exit 1
fi
MASTER_ADDR=${MASTER_ADDR:-10.0.0.1}
STAMP=$(date +%s)
source scripts/models/sums.sh
source /root/there/scripts/models/sums.sh
source /root/there/scripts/models/nowhere.sh

ARGS=(--hf-checkpoint "${BASE_DIR}/model" --prompt-data "${BASE_DIR}/train.jsonl" --label-key label)
ARGS+=(--num-rollout $((2 * 4)) --rollout-batch-size 4 --n-samples-per-prompt 2)
ARGS+=(
    --custom-rm-path rewards.rm
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --buffer-filter-path picks.pick
    --custom-generate-function-path generation.generate
    --rollout-function-path slime.rollout.other.generate_rollout
    --custom-advantage-function-path nowhere.advantages
)
ARGS+=(--optimizer sgd --made-up-flag 3 --lr fast --save "/data/run-${STAMP}" --load "${RESUME_DIR}/run")
ARGS+=(--num-rollout 9)

for WORKER in $(cat hosts); do
    ssh root@"${WORKER}" "ray stop --force ; ray start --address=${MASTER_ADDR}:6379" &
done
ray start --head
RUNTIME_ENV_JSON=$(cat <<EOF_JSON
{
  "env_vars": {
    "MASTER_ADDR": "${MASTER_ADDR}",
    "PYTHONPATH": "$(dirname "$0")/plugins"
  }
}
EOF_JSON
)
ray job submit --runtime-env-json "${RUNTIME_ENV_JSON}" -- python3 train_async.py "${ARGS[@]}" 2>&1 | tee log
