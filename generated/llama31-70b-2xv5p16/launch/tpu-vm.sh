#!/usr/bin/env bash
# llama31-70b-2xv5p16 on 2 slices of v5p-16 (2 hosts of 4 chips each), by gcloud.
# Usage: tpu-vm.sh [--dry-run] COMMAND
#   up           asks for the VMs by a queued resource, and waits for them
#   push         copies llama31-70b-2xv5p16.tar.gz, which `recipe pack llama31-70b-2xv5p16` makes, to every host
#   setup        Python 3.11 and the pinned packages, on every host
#   stage        the base weights, 141 GB on every host; WEIGHTS names another folder than /dev/shm/Llama-3.1-70B-Instruct
#   train        trains on every host, whether or not this terminal stays; starts again what was cut off
#   logs         follows the training from here
#   status       says what each host is at
#   stop         ends the training after the step that it is in, with a checkpoint
#   merge        merges on the first host
#   fetch        brings metrics, logs and the adapter to results/llama31-70b-2xv5p16; `fetch merged` brings the merged model
#   run [NAME]   up, push, setup, stage and train; where NAME is typed out, VMs that are taken away are replaced
#   down NAME    deletes the VMs and all that is on them; the name is to be typed out
# Every command sees what is done already. --dry-run shows what would be run, and runs nothing.
# HF_TOKEN of this machine's environment goes to the hosts with push, in a file.
set -euo pipefail

name=llama31-70b-2xv5p16
nodes=(llama31-70b-2xv5p16-0 llama31-70b-2xv5p16-1)
hosts=4
max_restarts=20
poll="${POLL_SECONDS:-30}"
dry_run=false
typed="" # the name, where it was typed out

fail() {
    printf 'error: %s\n  = help: %s\n' "$1" "$2" >&2
    exit 1
}

say() {
    printf '%s\n' "$*" >&2
}

[[ -n "${ZONE:-}" ]] || fail "no zone is named" "export ZONE=us-east5-a, or give launch.zone in the recipe"
where=(--zone="$ZONE")

# Runs a command, or shows it.
call() {
    if $dry_run; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}

tpus() {
    call gcloud compute tpus "$@" "${where[@]}"
}

# The value of a field of the queued resource; `absent` where there is none.
describe() {
    local answer
    if $dry_run; then
        echo absent
    elif answer="$(gcloud compute tpus "$1" describe "$name" --format="value($2)" "${where[@]}" 2>&1)"; then
        tail -n 1 <<< "$answer"
    elif [[ "$answer" == *NOT_FOUND* || "$answer" == *"not found"* ]]; then
        echo absent
    else
        fail "gcloud cannot tell the state of $name: $(tail -n 1 <<< "$answer")" "gcloud auth login"
    fi
}

# What there is of it: `ready`, `absent`, `gone STATE` or `waiting STATE`.
condition() {
    local state
    state="$(describe queued-resources state.state)" || exit 1
    case "$state" in
        absent) echo absent ;;
        READY | ACTIVE) echo ready ;;
        PREEMPTED | TERMINATED | FAILED | SUSPENDING | SUSPENDED) echo "gone $state" ;;
        *) echo "waiting $state" ;;
    esac
}

create() {
    tpus queued-resources create "$name" \
        --node-count=2 --node-prefix="$name" \
        --accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5
}

delete() {
    tpus queued-resources delete "$name" --force --quiet
}

up() {
    local now
    while true; do
        now="$(condition)" || exit 1
        case "$now" in
            ready) return ;;
            absent) create || return ;;
            gone*)
                [[ "$typed" == "$name" ]] ||
                    fail "$name is ${now#gone }" "$0 run $name replaces it; $0 down $name deletes it"
                delete || return
                ;;
            *STOPPED) fail "$name is stopped" "gcloud compute tpus tpu-vm start $name ${where[*]}" ;;
            *)
                say "$name: ${now#waiting }"
                sleep "$poll"
                ;;
        esac
        if $dry_run; then return; fi
    done
}

# Runs a gcloud command for every slice, at once; fails where one of them does.
slices() {
    local node job failed=0 jobs=()
    for node in "${nodes[@]}"; do
        "$@" "$node" &
        jobs+=("$!")
        if $dry_run; then wait "$!"; fi
    done
    for job in "${jobs[@]}"; do
        wait "$job" || failed=1
    done
    return "$failed"
}

ssh_slice() {
    tpus tpu-vm ssh "$2" --worker=all --command="$1"
}

copy_slice() {
    tpus tpu-vm scp "$1" "$3:$2" --worker=all --scp-flag=-p
}

# Runs a command on every host, at once.
on_hosts() {
    slices ssh_slice "$1"
}

copy() {
    slices copy_slice "$1" "$2"
}

# The same until it succeeds, three times at most: a new VM may not know the key yet, and connections break.
patiently() {
    local try
    for try in 1 2 3; do
        if "$@"; then return; fi
        if ((try < 3)); then
            say "a host failed; once more in $poll s"
            sleep "$poll"
        fi
    done
    return 1
}

# The command that does steps of host.sh.
step() {
    printf '%s' "${WEIGHTS:+WEIGHTS=$(printf '%q' "$WEIGHTS") }bash llama31-70b-2xv5p16/launch/host.sh $*"
}

# Does them on every host.
steps() {
    on_hosts "$(step "$@")"
}

push() {
    local secrets
    [[ -f llama31-70b-2xv5p16.tar.gz ]] || $dry_run ||
        fail "llama31-70b-2xv5p16.tar.gz is not in this folder" "recipe pack llama31-70b-2xv5p16"
    patiently copy llama31-70b-2xv5p16.tar.gz "" || return
    if [[ -n "${HF_TOKEN:-}" ]]; then
        secrets="$(mktemp)"
        printf 'export HF_TOKEN=%q\n' "$HF_TOKEN" >> "$secrets"
        if ! patiently copy "$secrets" secrets.env; then
            rm -f "$secrets"
            return 1
        fi
        rm -f "$secrets"
    fi
    # Not while a training runs from these files.
    patiently on_hosts "flock --nonblock train.lock tar xzf llama31-70b-2xv5p16.tar.gz"
}

train() {
    patiently steps start || return
    if $dry_run; then return; fi
    trap 'say "The training goes on without this terminal: $0 logs follows it, $0 stop ends it."; exit 130' INT
    watch
}

# Shows the log, and starts again what was cut off; returns 1 where a host is gone, or new.
watch() {
    local states now restarts=0
    while true; do
        tpus tpu-vm ssh "${nodes[0]}" --worker=0 --command="$(step follow)" || true
        states="$(steps state 2> /dev/null | grep -E '^(running|stopped|not started|ended [0-9]+)$')" || true
        if grep -q -E '^ended [12]$' <<< "$states"; then
            on_hosts "tail -n 5 train.log" >&2 || true
            fail "the training ended with an error" "mend what the log says, then: $0 push, and $0 train"
        elif grep -q '^stopped' <<< "$states"; then
            say "The training was stopped; $0 train goes on from its checkpoint."
            return
        elif (($(grep -c . <<< "$states") < hosts)); then
            now="$(condition)" || exit 1
            if [[ "$now" != ready ]]; then
                say "$name is ${now#* }"
                return 1
            fi
            say "not every host answers; asking again in $poll s"
        elif ! grep -q -v '^ended 0$' <<< "$states"; then
            say "The training is done."
            return
        elif grep -q '^not started$' <<< "$states"; then
            say "A host has lost its files: $0 push, setup and stage bring them back, and train goes on."
            return 1
        elif ! grep -q '^running$' <<< "$states"; then
            ((restarts < max_restarts)) || fail "it was cut off $restarts times" "see $0 logs; $0 train goes on"
            restarts=$((restarts + 1))
            say "The training was cut off; starting it again ($restarts of $max_restarts)."
            steps start || true
        fi
        sleep "$poll"
    done
}

run_all() {
    local now tries=0
    while true; do
        if up && push && patiently steps setup stage; then
            if train; then return; fi
        else
            now="$(condition)" || exit 1
            [[ "$now" != ready ]] || fail "a step failed on a host" "see what it says; the same command goes on"
        fi
        tries=$((tries + 1))
        ((tries <= max_restarts)) || fail "$name was taken away or refused $tries times" "the same command goes on"
        sleep "$poll"
    done
}

fetch() {
    local results=results/llama31-70b-2xv5p16 node worker
    if [[ "${1:-}" == merged ]]; then
        call mkdir -p "$results"
        tpus tpu-vm scp "${nodes[0]}:/dev/shm/llama31-70b-2xv5p16/merged" "$results/" --worker=0 --recurse
        return
    fi
    call mkdir -p "$results/logs"
    # All but the steps' own folders.
    call gcloud storage rsync --recursive --exclude='(^|.*/)[0-9]+/.*' gs://my-bucket/llama31-70b-2xv5p16 "$results"
    for node in "${nodes[@]}"; do
        for ((worker = 0; worker < hosts / 2; worker++)); do
            tpus tpu-vm scp "$node:train.log" "$results/logs/$node-$worker.log" --worker="$worker"
            tpus tpu-vm scp "$node:llama31-70b-2xv5p16/logs/*" "$results/logs/" --worker="$worker" ||
                say "Host $worker of $node has no log of its process."
        done
    done
    tpus tpu-vm scp "${nodes[0]}:/dev/shm/llama31-70b-2xv5p16/merged-adapter" "$results/" --worker=0 --recurse ||
        say "There is no adapter yet: $0 merge writes it."
}

down() {
    local now
    [[ "${1:-}" == "$name" ]] || fail "down deletes $name, and its name is to be typed out" "$0 down $name"
    now="$(condition)" || exit 1
    if [[ "$now" == absent ]] && ! $dry_run; then
        say "$name is not there."
    else
        delete
    fi
}

while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --dry-run) dry_run=true ;;
        *) fail "no option $1" "--dry-run" ;;
    esac
    shift
done

case "${1:-}" in
    up | push | train) "$1" ;;
    setup | stage) patiently steps "$1" ;;
    stop) steps stop ;;
    logs) tpus tpu-vm ssh "${nodes[0]}" --worker=0 --command="tail --lines=100 --follow=name train.log" ;;
    status)
        condition
        on_hosts "bash llama31-70b-2xv5p16/launch/host.sh state; tail -n 1 train.log"
        ;;
    merge) tpus tpu-vm ssh "${nodes[0]}" --worker=0 --command="$(step merge)" ;;
    fetch) fetch "${2:-}" ;;
    run)
        typed="${2:-}"
        [[ -z "$typed" || "$typed" == "$name" ]] || fail "this is $name, not $typed" "$0 run $name"
        run_all
        ;;
    down) down "${2:-}" ;;
    *) fail "no command \`${1:-}\`" "up, push, setup, stage, train, logs, status, stop, merge, fetch, run or down" ;;
esac
