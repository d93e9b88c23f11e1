#!/usr/bin/env bash
# DeepSeek-R1, answers of up to 32k tokens, on 16 machines of 8 GPUs (288 GB): 8 train, 8 generate.
#
# The released model is in fp8.  Engines serve it as is, with 85 GB on each of their 8 GPUs, and the trainer starts from
# the dequantized weights.  In bfloat16 it would take 170 GB per GPU, more than an H200 has.  Each of the trainer's 64
# ranks needs 223 GB in either case, so the dry run refuses 128 H200s (docs/launch.md).
#
#   MASTER_ADDR=HOST MODEL=DIR TRAIN_DATA=FILE.jsonl EVAL_DATA=FILE.jsonl bash configs/deepseek-r1.sh    on the first
#   MASTER_ADDR=HOST NODE_RANK=1 bash configs/deepseek-r1.sh                                         on each other
#   MODEL=DIR bash configs/deepseek-r1.sh --dry-run
#
# Flags on the command line override those here.  docs/launch.md describes further settings.
set -euo pipefail
# shellcheck source=configs/launch/nodes.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch/nodes.sh"

RUNS="${RUNS:-$PWD/runs}"
NAME=deepseek-r1

model=(
    --hf-checkpoint "${MODEL:-$PWD/models/DeepSeek-R1}"
)
places=(
    --actor-num-nodes 8
    --actor-num-gpus-per-node 8
    --rollout-num-gpus 64
    --rollout-num-gpus-per-engine 8
    --gpu-memory-gb "${GPU_MEMORY_GB:-288}"
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
    --rollout-max-response-len 32768
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
    --advantage-estimator gspo      # one ratio per answer, because experts may be chosen differently in training
    --eps-clip 3e-4                 # clip ranges of GSPO, arXiv 2507.18071
    --eps-clip-high 4e-4
)
optimizer=(
    --lr 1e-6
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)
layout=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 8
    --decoder-last-pipeline-num-layers 5    # it also has the output layer; 8 on each other rank
    --expert-model-parallel-size 8  # 32 experts of each layer per rank
    --context-parallel-size 2       # two ranks share an answer of 32k tokens
    --max-tokens-per-gpu 17408
    --recompute-granularity full
    --balance-data
)
engines=(
    --sglang-mem-fraction-static 0.85
    --sglang-server-concurrency 256
)
checkpoints_and_deadlines=(
    --save "$RUNS/$NAME-checkpoints"
    --load "$RUNS/$NAME-checkpoints" # resume from the last checkpoint, if any
    --save-interval 20
    --start-timeout-s 3600          # time to read the weights from a shared file system
    --train-timeout-s 14400
    --distributed-timeout-minutes 60
    --control-timeout-s 600
    --request-timeout-s 900
    --watchdog-timeout-s 14400
    --run-dir "$RUNS/$NAME-$(date +%Y%m%d-%H%M%S)"
)

launch 16 8 "${model[@]}" "${places[@]}" "${data[@]}" "${rollout[@]}" "${asynchronous[@]}" "${evaluation[@]}" \
    "${algorithm[@]}" "${optimizer[@]}" "${layout[@]}" "${engines[@]}" "${checkpoints_and_deadlines[@]}" "$@"
