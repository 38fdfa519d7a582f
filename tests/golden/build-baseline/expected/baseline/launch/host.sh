#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# Usage: host.sh STEP..., of which each sees what is done already:
#   setup    an environment of Python 3.11 with the pinned packages, in venv/
#   stage    the base weights, 16.1 GB, into $WEIGHTS (/dev/shm/Llama-3.1-8B-Instruct)
#   train    trains on from the newest checkpoint, or from the beginning
#   start    the same, detached from the connection; its output goes to train.log
#   state    says `running`, `stopped`, `ended STATUS` or `not started`
#   follow   shows the log until the training ends
#   stop     ends the training after the step that it is in, with a checkpoint
#   merge    writes the merged model and the adapter; on one host alone
set -euo pipefail

# Where baseline/ and runtime/ lie.
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

requirements=baseline/requirements-train.txt
weights="${WEIGHTS:-/dev/shm/Llama-3.1-8B-Instruct}"

fail() {
    printf 'error: %s\n  = help: %s\n' "$1" "$2" >&2
    exit 1
}

setup() {
    if cmp --silent "$requirements" venv/installed.txt; then return; fi
    # uv brings Python 3.11 where the system has another: a Cloud TPU VM has 3.10.
    python3 -m pip install --quiet --user uv==0.13.9
    python3 -m uv venv --quiet --clear --python 3.11 venv
    python3 -m uv pip install --quiet --python venv/bin/python --requirement "$requirements"
    cp "$requirements" venv/installed.txt
}

stage() {
    local free have
    if [[ -e "$weights/.complete" ]]; then return; fi
    mkdir -p -- "$weights"
    free="$(df --output=avail --block-size=1M -- "$weights" | tail -n 1)"
    have="$(du --summarize --block-size=1M -- "$weights" | cut -f 1)"
    ((free + have >= 15317)) ||
        fail "$weights has room for $(((free + have) / 1024)) GiB, and the weights take 16.1 GB" \
            "name a folder on a larger disk in WEIGHTS"
    venv/bin/hf download --quiet meta-llama/Llama-3.1-8B-Instruct --exclude "original/*" --local-dir "$weights"
    touch "$weights/.complete"
}

train() {
    exec venv/bin/python baseline/train.py --model "$weights" --resume
}

# As long as the training lives it holds the lock, which no crash and no restart of the machine leaves behind.
running() {
    ! flock --shared --nonblock train.lock true
}

start() {
    exec 9> train.lock
    if ! flock --timeout 1 9; then return; fi
    rm -f train.pid train.status train.stopped
    setsid bash baseline/launch/host.sh attend < /dev/null >> train.log 2>&1 &
}

attend() {
    local status=0
    venv/bin/python baseline/train.py --model "$weights" --resume &
    echo "$!" > train.pid
    wait "$!" || status="$?"
    echo "$status" > train.status
}

state() {
    if running; then
        echo running
    elif [[ -f train.stopped ]]; then
        echo stopped
    elif [[ -f train.status ]]; then
        echo "ended $(< train.status)"
    elif [[ -f train.log ]]; then
        echo "ended 137" # with the machine
    else
        echo "not started"
    fi
}

follow() {
    if ! running; then return; fi
    tail --lines=20 --follow=name train.log &
    trap 'kill "$!"' EXIT
    flock --shared train.lock sleep 0.5 # for the last lines
}

stop() {
    if ! running; then return; fi
    touch train.stopped
    kill -TERM "$(< train.pid)"
    flock --shared --timeout 300 train.lock true ||
        fail "the training has not ended in 300 s" "wait, or end it without a checkpoint: kill -KILL $(< train.pid)"
}

merge() {
    venv/bin/python baseline/merge.py --model "$weights"
}

if [[ -f secrets.env ]]; then
    # shellcheck source=/dev/null
    source secrets.env
fi

for step in "$@"; do
    case "$step" in
        setup | stage | train | start | attend | state | follow | stop | merge) "$step" ;;
        *) fail "no step \`$step\`" "setup, stage, train, start, state, follow, stop or merge" ;;
    esac
done
