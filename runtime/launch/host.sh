#!/usr/bin/env bash
# The steps that each host of a run takes. An artifact's launch/host.sh calls this with the recipe's values, in the
# folder that holds the artifact's.
#   host.sh VALUE... -- STEP...
set -euo pipefail

uv=0.13.9
python=3.11
steps="setup, stage, probe, train, start, state, follow, stop or merge"

usage() {
    cat << END
Usage: host.sh STEP... Each step skips what is already done:
  setup    an environment of Python $python with the pinned packages, in venv/
  stage    the base weights, in \$WEIGHTS ($weights)
  probe    compares the machine with the recipe in ten minutes, and writes probe.json; needs no weights
  train    trains from the newest checkpoint, or from the beginning
  start    the same, detached from the connection; its output goes to train.log
  state    says \`running\`, \`stopped\`, \`ended STATUS\` or \`not started\`
  follow   shows the log until the training ends
  stop     ends the training after the current step, with a checkpoint
  merge    writes the merged model; run it on one host only
END
}

fail() {
    printf 'error: %s\n  = help: %s\n' "$1" "$2" >&2
    exit 1
}

setup() {
    local requirements="$name/requirements-train.txt"
    if cmp --silent "$requirements" venv/installed.txt; then return; fi
    # uv installs the Python version if the system has another: a Cloud TPU VM has 3.10.
    python3 -m pip install --quiet --user uv=="$uv"
    python3 -m uv venv --quiet --clear --python "$python" venv
    python3 -m uv pip install --quiet --python venv/bin/python --requirement "$requirements"
    cp "$requirements" venv/installed.txt
}

# Another model's weights can still be in the folder, because it is kept as long as the machine runs.
refuse_others() {
    local found
    [[ -n "$folder" || ! -d "$weights" || -z "$(ls -A -- "$weights")" ]] && return
    found="files that stage did not write"
    if [[ -f "$weights/.origin" ]]; then found="$(< "$weights/.origin")"; fi
    [[ "$found" == "$origin" ]] ||
        fail "$weights holds $found, but this run begins with $origin" \
            "empty it, or name another folder in WEIGHTS; if it is the same: echo '$origin' > $weights/.origin"
}

stage() {
    local free have
    if [[ -n "$folder" ]]; then
        [[ -f "$weights/config.json" ]] ||
            fail "$weights holds no config.json" "copy $folder there, on every host"
        return
    fi
    refuse_others
    if [[ -e "$weights/.complete" ]]; then return; fi
    mkdir -p -- "$weights"
    free="$(df --output=avail --block-size=1M -- "$weights" | tail -n 1)"
    have="$(du --summarize --block-size=1M -- "$weights" | cut -f 1)"
    ((free + have >= weights_mib)) ||
        fail "$weights has room for $(((free + have) / 1024)) GiB, and the weights take \
$(((weights_mib + 1023) / 1024)) GiB" "name a folder on a larger disk in WEIGHTS"
    printf '%s\n' "$origin" > "$weights/.origin"
    venv/bin/hf download --quiet "$hub" ${revision:+--revision "$revision"} --exclude "original/*" \
        --local-dir "$weights"
    touch "$weights/.complete"
}

see_python() {
    [[ -x venv/bin/python ]] || fail "there is no environment in venv/ yet" "bash $name/launch/host.sh setup stage"
}

# Reports missing files and another model's weights before anything runs in the background.
see_what_is_there() {
    see_python
    refuse_others
}

# Also prints the file, between marks, because only the log of a pod is kept.
probe() {
    local status=0
    see_python
    venv/bin/python "$name/probe.py" --output . || status="$?"
    if [[ -f probe.json ]]; then
        # By cat, which writes it at once: bash writes a line at a time, between the lines of other hosts.
        cat << END
-----BEGIN probe.json-----
$(< probe.json)
-----END probe.json-----
END
    fi
    return "$status"
}

train() {
    see_what_is_there
    exec venv/bin/python "$name/train.py" --model "$weights" --resume
}

# A training holds the lock as long as its process exists; a crash or a restart of the machine releases it.
running() {
    ! flock --shared --nonblock train.lock true
}

start() {
    exec 9> train.lock
    if ! flock --timeout 1 9; then return; fi
    see_what_is_there
    rm -f train.pid train.status train.stopped
    setsid bash "$name/launch/host.sh" attend < /dev/null >> train.log 2>&1 &
}

# The background process that `start` leaves running.
attend() {
    local status=0
    venv/bin/python "$name/train.py" --model "$weights" --resume &
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
    flock --shared --timeout "$stop_seconds" train.lock true ||
        fail "the training has not ended in $stop_seconds s" \
            "wait, or end it without a checkpoint: kill -KILL $(< train.pid)"
}

merge() {
    see_what_is_there
    "${merge[@]}"
}

name="" hub="" revision="" folder="" weights_mib=0 stop_seconds=300 merge_flags=()
while [[ "$1" != -- ]]; do
    case "$1" in
        --name=*) name="${1#*=}" ;;
        --hub=*) hub="${1#*=}" ;;
        --revision=*) revision="${1#*=}" ;;
        --folder=*) folder="${1#*=}" ;;
        --weights=*) weights="${WEIGHTS:-${1#*=}}" ;;
        --weights-mib=*) weights_mib="${1#*=}" ;;
        --stop-seconds=*) stop_seconds="${1#*=}" ;;
        --merge-output=*) merge_flags+=(--output "${1#*=}") ;;
        --merge-checkpoint=*) merge_flags+=(--checkpoint "${1#*=}") ;;
        *) fail "no value $1" "build the artifact again: recipe build RECIPE" ;;
    esac
    shift
done
shift
origin="$hub${revision:+ at $revision}"
merge=(venv/bin/python "$name/merge.py" --model "$weights" "${merge_flags[@]}")

if [[ -f secrets.env ]]; then
    # shellcheck source=/dev/null
    source secrets.env
fi

(($# > 0)) || fail "no step is given" "$steps; host.sh --help explains them"
for step; do
    case "$step" in
        setup | stage | probe | train | start | attend | state | follow | stop | merge) ;;
        --help)
            usage
            exit
            ;;
        *) fail "no step \`$step\`" "$steps" ;;
    esac
done
for step; do "$step"; done
