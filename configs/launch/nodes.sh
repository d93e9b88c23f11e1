# shellcheck shell=bash
# Starts a run on one or more machines.  The scripts in configs/ source this file; docs/launch.md describes it.
#
#   MASTER_ADDR   address of the first machine; required for more than one
#   NODE_RANK     0 on the first machine (default), any other value on the machines that join it
#   PYTHON        command that runs Python (default: uv run python)
#   RAY_TOKEN_FILE  file with Ray's token that all machines read (default: RUNS/.ray_auth_token); made if it is missing
#   JOIN_AGAIN    not empty: a machine that joined waits for the next Ray of the first machine once this one has ended
#   RAY_worker_niceness  niceness of trainer and engines (default: 0; with Ray's 15 they only get spare CPU time)
#   RAY_JOB_ADDRESS  dashboard of an existing Ray cluster, http://HOST:8265; the run is submitted to it as a job

read -ra PYTHON <<<"${PYTHON:-uv run python}"
RAY=("${PYTHON[@]}" -m ray.scripts.scripts)
RAY_PORT="${RAY_PORT:-6379}"                 # Ray's default
JOIN_TIMEOUT_S="${JOIN_TIMEOUT_S:-1800}"     # time limit for all machines to join
JOINED_S="${JOINED_S:-60}"                   # with JOIN_AGAIN: a machine that was joined for less ends with an error
END_TIMEOUT_S="${END_TIMEOUT_S:-60}"         # time limit for Ray to stop; Ray itself waits 30 s for its processes
RAY_FOLDER="${RAY_FOLDER:-}"                 # default: use_folder's; not /tmp/ray, where other programs would join
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PROGRAM="$ROOT/train_async.py"
WAIT_FOR_GPUS="$ROOT/configs/launch/wait_for_gpus.py"

# launch NODES GPUS_PER_NODE FLAG...
launch() {
    local nodes="$1" gpus="$2"
    shift 2
    trap '' HUP  # a terminal that is gone ends neither the run nor Ray, which inherit this
    if [[ -n "${RAY_JOB_ADDRESS:-}" ]] && ! is_dry "$@"; then
        exec "${RAY[@]}" job submit --address "$RAY_JOB_ADDRESS" -- "${PYTHON[@]}" "$PROGRAM" "$@"
    elif [[ "$nodes" -eq 1 ]] || is_dry "$@"; then
        exec "${PYTHON[@]}" "$PROGRAM" "$@"  # on one machine the program starts and stops Ray itself
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

# Whoever has Ray's token can run programs on every machine.  Unless the caller's environment has one, the first machine
# writes a random one into the file system that all machines share anyway, readable for its owner alone.
use_token() {
    local file="${RAY_TOKEN_FILE:-${RUNS:-$PWD/runs}/.ray_auth_token}" deadline=$((SECONDS + JOIN_TIMEOUT_S)) made
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
    [[ "$RAY_AUTH_MODE" == token && -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]] || return 0
    if [[ "$1" == make && ! -s "$file" ]]; then
        mkdir -p "$(dirname "$file")"
        # Another run may make it at the same time: the first token stays, unless it is an empty file.
        made="$file.$HOSTNAME.$$"
        (umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$made")
        ln "$made" "$file" 2>/dev/null || [[ -s "$file" ]] || mv "$made" "$file"
        rm -f "$made"
    fi
    until [[ -s "$file" ]]; do
        if ((SECONDS >= deadline)); then
            echo "error: no token of Ray in $file (RAY_TOKEN_FILE) within $JOIN_TIMEOUT_S s (JOIN_TIMEOUT_S)" >&2
            exit 1
        fi
        sleep 2
    done
    chmod 600 "$file"
    export RAY_AUTH_TOKEN_PATH="$file"
}

# Ray makes its folder writable for every user of the machine, so it is in one that only this user enters.
use_folder() {
    [[ -z "$RAY_FOLDER" ]] || return 0
    local outer="/tmp/asyncrl-$UID"
    mkdir -p -m 700 "$outer"
    if [[ -L "$outer" || ! -O "$outer" ]]; then
        echo "error: $outer for Ray's files belongs to another user; remove it, or set RAY_FOLDER" >&2
        exit 1
    fi
    chmod 700 "$outer"
    RAY_FOLDER="$outer/cluster"
}

# Lend this machine's GPUs until the first machine stops Ray.  The first machine may start later.
join_ray() {
    local began code
    await_ray
    use_token wait
    use_folder
    local join=("${RAY[@]}" start --address "$MASTER_ADDR:$RAY_PORT" --num-gpus "$1" --block --disable-usage-stats
        --temp-dir "$RAY_FOLDER")
    [[ -n "${JOIN_AGAIN:-}" ]] || exec "${join[@]}"
    trap end_children EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    while true; do
        began="$SECONDS" code=0
        "${join[@]}" &
        wait "$!" || code=$?
        ((SECONDS - began >= JOINED_S)) || exit "$code"
        echo "Ray has ended (exit code $code); waiting for the next one at $MASTER_ADDR:$RAY_PORT (JOIN_AGAIN)" >&2
        await_ray
    done
}

# Wait until the first machine's Ray listens.
await_ray() {
    local deadline=$((SECONDS + JOIN_TIMEOUT_S))
    until (exec 3<>"/dev/tcp/$MASTER_ADDR/$RAY_PORT") 2>/dev/null; do
        if ((SECONDS >= deadline)); then
            echo "error: no Ray at $MASTER_ADDR:$RAY_PORT within $JOIN_TIMEOUT_S s (JOIN_TIMEOUT_S)" >&2
            exit 1
        fi
        sleep 2
    done
}

# On the first machine: start Ray, wait for the other machines, run the program, and stop Ray everywhere.  Every process
# started here ends with the script, at any moment.  A running program gets the signal first; Ray stays until it ends.
lead_ray() {
    local nodes="$1" gpus="$2" program_pid="" code=0
    shift 2
    use_token make
    use_folder
    trap end_children EXIT
    trap 'stop INT 130' INT
    trap 'stop TERM 143' TERM
    "${RAY[@]}" start --head --node-ip-address "$MASTER_ADDR" --port "$RAY_PORT" --num-gpus "$gpus" --block \
        --disable-usage-stats --include-dashboard false --no-monitor --temp-dir "$RAY_FOLDER" &
    local ray_pid=$!
    export RAY_ADDRESS="$MASTER_ADDR:$RAY_PORT"
    # In the background, because bash handles a signal only after a foreground command has ended.
    "${PYTHON[@]}" "$WAIT_FOR_GPUS" "$((nodes * gpus))" "$JOIN_TIMEOUT_S" &
    wait -n || code=$?
    if ! kill -0 "$ray_pid" 2>/dev/null; then
        echo "error: Ray failed to start (exit code $code); its output is above" >&2
        exit 1
    fi
    [[ "$code" -eq 0 ]] || exit "$code"
    env --default-signal=INT "${PYTHON[@]}" "$PROGRAM" "$@" &  # bash makes background commands ignore SIGINT
    program_pid=$!
    while kill -0 "$program_pid" 2>/dev/null; do  # a signal ends the wait, not the program
        wait "$program_pid" || true
    done
    wait "$program_pid" || code=$?  # the program's exit code, even if a signal ended the last wait
    exit "$code"
}

# This trap is set once, because bash loses a signal that arrives while its trap is replaced.
stop() {
    [[ -n "$program_pid" ]] || exit "$2"
    kill "-$1" "$program_pid" 2>/dev/null || true
}

# Further signals are ignored here.  Processes that do not end within END_TIMEOUT_S are killed.
end_children() {
    trap '' INT TERM
    local deadline=$((SECONDS + END_TIMEOUT_S))
    signal_children TERM
    while [[ -n "$(jobs -pr)" ]] && ((SECONDS < deadline)); do
        sleep 0.1
    done
    if [[ -n "$(jobs -pr)" ]]; then
        echo "error: Ray did not end within $END_TIMEOUT_S s and was killed; check for leftover processes" >&2
        signal_children KILL
    fi
}

signal_children() {
    local children
    children=$(jobs -pr)
    # shellcheck disable=SC2086  # one argument per process id
    [[ -z "$children" ]] || kill "-$1" $children 2>/dev/null || true
}
