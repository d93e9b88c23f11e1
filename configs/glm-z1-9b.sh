#!/usr/bin/env bash
# GLM-Z1-9B-0414, answers of up to 30k tokens (it has 32k positions), on one machine of 8 GPUs (141 GB): 4 train, 4 generate.
#
#   MODEL=DIR TRAIN_DATA=FILE.jsonl EVAL_DATA=FILE.jsonl bash configs/glm-z1-9b.sh [--any-flag value ...]
#   MODEL=DIR bash configs/glm-z1-9b.sh --dry-run
#
# Flags on the command line override those here.  docs/launch.md describes further settings.
set -euo pipefail
# shellcheck source=configs/launch/nodes.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch/nodes.sh"

RUNS="${RUNS:-$PWD/runs}"
NAME=glm-z1-9b

model=(
    --hf-checkpoint "${MODEL:-$PWD/models/GLM-Z1-9B-0414}"
)
places=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
    --gpu-memory-gb "${GPU_MEMORY_GB:-141}"
)
data=(
    --prompt-data "${TRAIN_DATA:-$PWD/data/dapo-math-17k.jsonl}"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rollout-max-prompt-len 2048
    --rm-type number                # the last number of the answer is the label
)
rollout=(
    --num-rollout 500
    --rollout-batch-size 64
    --n-samples-per-prompt 8
    --rollout-max-response-len 30720
    --rollout-temperature 1.0
)
asynchronous=(
    --update-weights-interval 1     # publish after every step, without draining
    --max-staleness 2               # no trained token is older than two steps
    --weight-update-mode in_place   # answers in flight keep their KV cache
    --dynamic-sampling-filter-path asyncrl.filters.check_reward_nonzero_std
    --over-sampling-batch-size 128  # most groups in flight, to replace those that the filter rejects
    --partial-rollout               # interrupted groups keep their tokens and resume later
    --follow-kv-cache               # limit answers in flight to what the KV caches hold
)
evaluation=(
    --eval-prompt-data aime "${EVAL_DATA:-$PWD/data/aime-2024.jsonl}"
    --eval-interval 20
    --n-samples-per-eval-prompt 8
    --eval-temperature 0.6
)
algorithm=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28            # clip-higher: DAPO, arXiv 2503.14476
)
optimizer=(
    --lr 1e-6
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)
layout=(
    --tensor-model-parallel-size 2  # the number of KV heads
    --context-parallel-size 2       # two ranks share an answer of 32k tokens
    --max-tokens-per-gpu 16384
    --recompute-granularity full
    --balance-data
)
engines=(
    --sglang-mem-fraction-static 0.85
    --sglang-server-concurrency 256
)
checkpoints=(
    --save "$RUNS/$NAME-checkpoints"
    --load "$RUNS/$NAME-checkpoints" # resume from the last checkpoint, if any
    --save-interval 20
    --run-dir "$RUNS/$NAME-$(date +%Y%m%d-%H%M%S)"
)

launch 1 8 "${model[@]}" "${places[@]}" "${data[@]}" "${rollout[@]}" "${asynchronous[@]}" "${evaluation[@]}" \
    "${algorithm[@]}" "${optimizer[@]}" "${layout[@]}" "${engines[@]}" "${checkpoints[@]}" "$@"
