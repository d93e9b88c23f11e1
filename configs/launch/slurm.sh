#!/usr/bin/env bash
# Starts a script of configs/ under Slurm, and requeues the job until the run has trained to the end:
#
#   sbatch --nodes 8 configs/launch/slurm.sh configs/glm4.5-355b-a32b.sh FLAG...
#
# Slurm sends SIGTERM before the time limit and at a preemption.  The run then writes a checkpoint (--grace-s), and the
# next start of the job resumes from it.  docs/launch.md describes the variables.
#SBATCH --job-name=asyncrl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@180
set -euo pipefail

GRACE_S="${GRACE_S:-120}"           # time for the checkpoint; the rest of the 180 s is for the end of all processes
MOST_RESTARTS="${MOST_RESTARTS:-3}" # restarts in a row after a failure without a new checkpoint
if [[ $# -eq 0 || ! -f "$1" ]]; then
    echo "error: the first argument must be a script of configs/, got '${1:-}'; see docs/launch.md" >&2
    exit 2
fi
SCRIPT="$1"
shift
export RUNS="${RUNS:-$PWD/runs}"
CHECKPOINTS="${CHECKPOINTS:-$RUNS/$(basename "$SCRIPT" .sh)-checkpoints}"
RESTARTS="$CHECKPOINTS/restarts"    # number of restarts in a row, and the checkpoint from which they began

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")  # on it, this script runs
export MASTER_ADDR="${MASTER_ADDR:-$first}"

# At a preemption, Slurm signals this script only with send_user_signal.  Otherwise it sends SIGTERM to the job's steps,
# which end the processes on the other machines, before the checkpoint.
settings=$(scontrol show config 2>/dev/null || true)
if [[ "$settings" == *PreemptType*preempt/* && "$settings" != *preempt/none* && "$settings" != *send_user_signal* ]]; then
    echo "warning: this cluster preempts jobs without PreemptParameters=send_user_signal: a preempted run ends without" \
        "a checkpoint and resumes from the one before; ask for it, or set --save-interval-minutes" >&2
fi

# The first machine's script is no job step, because Slurm sends a step's signals to every process of it, and trainer and
# engines must live until the checkpoint is written.
main_pid="" others_pid=""
start_all() {
    NODE_RANK=0 bash "$SCRIPT" --grace-s "$GRACE_S" "$@" &
    main_pid=$!
    if ((SLURM_NNODES > 1)); then
        NODE_RANK=1 srun --nodes "$((SLURM_NNODES - 1))" --ntasks "$((SLURM_NNODES - 1))" --exclude "$first" \
            bash "$SCRIPT" &
        others_pid=$!
    fi
}

newest() {
    cat "$CHECKPOINTS/latest_checkpointed_iteration.txt" 2>/dev/null || echo none
}

# Whether another start may help: always after SIGTERM; after a failure if there are new checkpoints or restarts left.
may_help() {
    local code="$1" count=0 before="" now
    now=$(newest)
    case "$code" in
        0 | 2) return 1 ;;
        143) rm -f "$RESTARTS"; return 0 ;;
    esac
    [[ -f "$RESTARTS" ]] && read -r count before <"$RESTARTS"
    [[ "$before" == "$now" ]] || count=0
    if ((count >= MOST_RESTARTS)); then
        echo "error: $count restarts without a new checkpoint (newest: $now); the job is not requeued (MOST_RESTARTS)" >&2
        return 1
    fi
    mkdir -p "$CHECKPOINTS"
    echo "$((count + 1)) $now" >"$RESTARTS"
}

trap '[[ -z "$main_pid" ]] || kill -TERM "$main_pid" 2>/dev/null || true' TERM
start_all "$@"
code=0
while kill -0 "$main_pid" 2>/dev/null; do  # a signal ends the wait, not the run
    wait "$main_pid" || true
done
wait "$main_pid" || code=$?
[[ -z "$others_pid" ]] || kill -TERM "$others_pid" 2>/dev/null || true
if may_help "$code"; then
    echo "exit code $code, newest checkpoint $(newest): the job is requeued" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
