#!/usr/bin/env bash
# all-weights on v6e-8 (a host of 8 chips), by gcloud.
# Usage: tpu-vm.sh [--dry-run] [--queue] COMMAND
#   up           creates the VM; with --queue it waits in the queue for one
#   push         copies all-weights.tar.gz, which `recipe pack all-weights` makes, to every host
#   setup        Python 3.11 and the pinned packages, on every host
#   stage        the base weights, 2.47 GB on every host; WEIGHTS names another folder than /dev/shm/Llama-3.2-1B-Instruct
#   train        trains on every host, whether or not this terminal stays; starts again what was cut off
#   logs         follows the training from here
#   status       says what each host is at
#   stop         ends the training after the step that it is in, with a checkpoint
#   merge        merges on the first host
#   fetch        brings metrics, logs to results/all-weights; `fetch merged` brings the merged model
#   run [NAME]   up, push, setup, stage and train; where NAME is typed out, VMs that are taken away are replaced
#   down NAME    deletes the VM and all that is on it; the name is to be typed out
# Every command sees what is done already. --dry-run shows what would be run, and runs nothing.
# HF_TOKEN of this machine's environment goes to the hosts with push, in a file.
set -euo pipefail

name=all-weights
hosts=1
max_restarts=20
poll="${POLL_SECONDS:-30}"
dry_run=false
queue=false
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

# The value of a field of a VM or a queued resource; `absent` where there is none.
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
    if $queue; then
        state="$(describe queued-resources state.state)" || exit 1
    else
        state="$(describe tpu-vm state)" || exit 1
    fi
    case "$state" in
        absent) echo absent ;;
        READY | ACTIVE) echo ready ;;
        PREEMPTED | TERMINATED | FAILED | SUSPENDING | SUSPENDED) echo "gone $state" ;;
        *) echo "waiting $state" ;;
    esac
}

create() {
    if $queue; then
        tpus queued-resources create "$name" \
            --node-id="$name" \
            --accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e
    else
        tpus tpu-vm create "$name" \
            --accelerator-type=v6e-8 --version=v2-alpha-tpuv6e
    fi
}

delete() {
    if $queue; then
        tpus queued-resources delete "$name" --force --quiet
    else
        tpus tpu-vm delete "$name" --quiet
    fi
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

# Runs a command on every host, at once.
on_hosts() {
    tpus tpu-vm ssh "$name" --worker=all --command="$1"
}

copy() {
    tpus tpu-vm scp "$1" "$name:$2" --worker=all --scp-flag=-p
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
    printf '%s' "${WEIGHTS:+WEIGHTS=$(printf '%q' "$WEIGHTS") }bash all-weights/launch/host.sh $*"
}

# Does them on every host.
steps() {
    on_hosts "$(step "$@")"
}

push() {
    local secrets
    [[ -f all-weights.tar.gz ]] || $dry_run ||
        fail "all-weights.tar.gz is not in this folder" "recipe pack all-weights"
    patiently copy all-weights.tar.gz "" || return
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
    patiently on_hosts "flock --nonblock train.lock tar xzf all-weights.tar.gz"
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
        tpus tpu-vm ssh "$name" --worker=0 --command="$(step follow)" || true
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
    local results=results/all-weights worker
    if [[ "${1:-}" == merged ]]; then
        call mkdir -p "$results"
        tpus tpu-vm scp "$name:all-weights/merged" "$results/" --worker=0 --recurse
        return
    fi
    call mkdir -p "$results/logs"
    tpus tpu-vm scp "$name:all-weights/checkpoints/*.json*" "$results/" --worker=0
    for ((worker = 0; worker < hosts; worker++)); do
        tpus tpu-vm scp "$name:train.log" "$results/logs/host-$worker.log" --worker="$worker"
    done
}

down() {
    local now
    [[ "${1:-}" == "$name" ]] || fail "down deletes $name, and its name is to be typed out" "$0 down $name"
    # A VM of a queued resource goes with it.
    now="$(describe queued-resources state.state)" || exit 1
    if [[ "$now" != absent ]]; then queue=true; fi
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
        --queue) queue=true ;;
        *) fail "no option $1" "--dry-run or --queue" ;;
    esac
    shift
done

case "${1:-}" in
    up | push | train) "$1" ;;
    setup | stage) patiently steps "$1" ;;
    stop) steps stop ;;
    logs) tpus tpu-vm ssh "$name" --worker=0 --command="tail --lines=100 --follow=name train.log" ;;
    status)
        condition
        on_hosts "bash all-weights/launch/host.sh state; tail -n 1 train.log"
        ;;
    merge) tpus tpu-vm ssh "$name" --worker=0 --command="$(step merge)" ;;
    fetch) fetch "${2:-}" ;;
    run)
        typed="${2:-}"
        [[ -z "$typed" || "$typed" == "$name" ]] || fail "this is $name, not $typed" "$0 run $name"
        run_all
        ;;
    down) down "${2:-}" ;;
    *) fail "no command \`${1:-}\`" "up, push, setup, stage, train, logs, status, stop, merge, fetch, run or down" ;;
esac
