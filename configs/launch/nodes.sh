# shellcheck shell=bash
# Starts a run on one machine or many; the scripts beside this folder source it.  docs/launch.md has the whole story.
#
#   MASTER_ADDR   address of the first machine; needed for more than one
#   NODE_RANK     0 on the first machine (default), anything else on those that join it
#   PYTHON        what runs Python (default: uv run python)
#   RAY_AUTH_MODE  token, if there is one (ray get-auth-token --generate), which all machines must have; or disabled
#   RAY_worker_niceness  of trainer and engines (default: 0; Ray's own 15 leaves them what others do not want)
#   RAY_JOB_ADDRESS  dashboard of a Ray cluster that is there already, http://HOST:8265: the run becomes a job of it

read -ra PYTHON <<<"${PYTHON:-uv run python}"
RAY=("${PYTHON[@]}" -m ray.scripts.scripts)
RAY_PORT="${RAY_PORT:-6379}"                 # Ray's own default
JOIN_TIMEOUT_S="${JOIN_TIMEOUT_S:-1800}"     # until all machines must be there
END_TIMEOUT_S="${END_TIMEOUT_S:-60}"         # for Ray, which itself takes 30 to end what still runs
RAY_FOLDER="${RAY_FOLDER:-/tmp/asyncrl-ray}" # not /tmp/ray, where other programs would find our Ray and join it
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PROGRAM="$ROOT/train_async.py"
WAIT_FOR_GPUS="$ROOT/configs/launch/wait_for_gpus.py"

# Ray's own ways to decide this differ between starting a cluster and joining it.
if [[ -z "${RAY_AUTH_MODE:-}" ]]; then
    if [[ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" || -f "$HOME/.ray/auth_token" ]]; then
        export RAY_AUTH_MODE=token
    else
        export RAY_AUTH_MODE=disabled
    fi
fi

# launch NODES GPUS_PER_NODE FLAG...
launch() {
    local nodes="$1" gpus="$2"
    shift 2
    if [[ -n "${RAY_JOB_ADDRESS:-}" ]] && ! is_dry "$@"; then
        exec "${RAY[@]}" job submit --address "$RAY_JOB_ADDRESS" -- "${PYTHON[@]}" "$PROGRAM" "$@"
    elif [[ "$nodes" -eq 1 ]] || is_dry "$@"; then
        exec "${PYTHON[@]}" "$PROGRAM" "$@"  # on one machine the program starts Ray itself, and ends it
    elif [[ -z "${MASTER_ADDR:-}" ]]; then
        echo "error: $nodes machines need MASTER_ADDR, the first one's address; see docs/launch.md" >&2
        exit 2
    elif [[ "${NODE_RANK:-0}" -ne 0 ]]; then
        join_ray "$gpus"
    else
        lead_ray "$nodes" "$gpus" "$@"
    fi
}

is_dry() {
    local dry=1 word
    for word in "$@"; do
        case "$word" in
            --dry-run | --help | -h) dry=0 ;;
            --no-dry-run) dry=1 ;;
        esac
    done
    return "$dry"
}

# A machine that lends its GPUs, until the first one ends Ray.  The first one may come later.
join_ray() {
    local deadline=$((SECONDS + JOIN_TIMEOUT_S))
    until (exec 3<>"/dev/tcp/$MASTER_ADDR/$RAY_PORT") 2>/dev/null; do
        if ((SECONDS >= deadline)); then
            echo "error: no Ray at $MASTER_ADDR:$RAY_PORT within $JOIN_TIMEOUT_S s (JOIN_TIMEOUT_S)" >&2
            exit 1
        fi
        sleep 2
    done
    exec "${RAY[@]}" start --address "$MASTER_ADDR:$RAY_PORT" --num-gpus "$1" --block --disable-usage-stats \
        --temp-dir "$RAY_FOLDER"
}

# The first machine: starts Ray, waits for the others, runs, and ends Ray everywhere.  Whatever it started is ended
# with it, at any moment; a program that runs gets the signal first, and Ray stays until it has ended.
lead_ray() {
    local nodes="$1" gpus="$2" program_pid="" code=0
    shift 2
    trap end_children EXIT
    trap 'stop INT 130' INT
    trap 'stop TERM 143' TERM
    "${RAY[@]}" start --head --node-ip-address "$MASTER_ADDR" --port "$RAY_PORT" --num-gpus "$gpus" --block \
        --disable-usage-stats --include-dashboard false --temp-dir "$RAY_FOLDER" &
    local ray_pid=$!
    export RAY_ADDRESS="$MASTER_ADDR:$RAY_PORT"
    # Beside the script, which would not hear a signal before the end of a command in front.
    "${PYTHON[@]}" "$WAIT_FOR_GPUS" "$((nodes * gpus))" "$JOIN_TIMEOUT_S" &
    wait -n || code=$?
    if ! kill -0 "$ray_pid" 2>/dev/null; then
        echo "error: Ray ended at its start (exit code $code); above is what it said" >&2
        exit 1
    fi
    [[ "$code" -eq 0 ]] || exit "$code"
    env --default-signal=INT "${PYTHON[@]}" "$PROGRAM" "$@" &  # bash has what runs beside it ignore SIGINT
    program_pid=$!
    while kill -0 "$program_pid" 2>/dev/null; do  # a signal ends the wait, not the program
        wait "$program_pid" || true
    done
    wait "$program_pid" || code=$?  # its own, also where a signal ended the last wait
    exit "$code"
}

# Set once: bash forgets a signal that comes while its trap is replaced.
stop() {
    [[ -n "$program_pid" ]] || exit "$2"
    kill "-$1" "$program_pid" 2>/dev/null || true
}

# Another signal does not cut this short; whoever does not end in time is killed.
end_children() {
    trap '' INT TERM
    local deadline=$((SECONDS + END_TIMEOUT_S))
    signal_children TERM
    while [[ -n "$(jobs -pr)" ]] && ((SECONDS < deadline)); do
        sleep 0.1
    done
    if [[ -n "$(jobs -pr)" ]]; then
        echo "error: Ray did not end within $END_TIMEOUT_S s and was killed; see what is left of it" >&2
        signal_children KILL
    fi
}

signal_children() {
    local children
    children=$(jobs -pr)
    # shellcheck disable=SC2086  # one word for each
    [[ -z "$children" ]] || kill "-$1" $children 2>/dev/null || true
}
