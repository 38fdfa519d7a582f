#!/usr/bin/env bash
# Runs a recipe on Cloud TPU VMs with gcloud. An artifact's launch/tpu-vm.sh calls this with its values.
#   tpu-vm.sh SCRIPT VALUE... -- COMMAND
# SCRIPT is the caller's name, for messages. This also runs on laptops, so it needs no bash newer than 3.2.
set -euo pipefail

# account, owner_label, default_name and see_name are in runtime/launch/owner.sh, which runtime/launch/__main__.py
# puts before this script.

help="one of name, up, push, setup, stage, probe, train, logs, status, stop, merge, fetch, run and down"

usage() {
    cat << END
Usage: $script [--dry-run] [--queue] COMMAND, with the options anywhere
  name         prints the VM's name, $name-USER; VM names another
  up           creates the VM; with --queue, or if the recipe says so, by a queued resource, for which it waits
  push         copies $name.tar.gz, which \`recipe pack $name\` makes, to every host
  setup        Python 3.11 and the pinned packages, on every host
  stage        the base weights, on every host; WEIGHTS names another folder than the recipe's
  probe NAME   up, push and setup, then probe.py on every host, for ten minutes and without weights; copies probe.json to
               results/$name, and deletes what up created; type the VM's name
  train        trains on every host, even if this terminal closes; restarts an interrupted training
  logs         follows the training from here
  status       shows the state of each host
  stop         ends the training after the current step, with a checkpoint
  merge        merges on the first host
  fetch        copies metrics, logs and the adapter to results/$name; \`fetch merged\` copies the merged model
  run [NAME]   up, push, setup, stage and train; with the VM's name, it also replaces preempted VMs
  down NAME    deletes what up created, with all its files; type the VM's name
Every command skips what is already done. --dry-run prints the commands without running them.
The zone is the recipe's, or ZONE if the recipe has none. Labels say who created a VM, and from which recipe. Only logs,
status and fetch read another person's VM.
END
    [[ -z "$tokens" ]] || echo "push copies these variables of this machine's environment to the hosts, in a file:$tokens"
}

fail() {
    printf 'error: %s\n  = help: %s\n' "$1" "$2" >&2
    exit 1
}

say() {
    printf '%s\n' "$*" >&2
}

# Runs a command, or prints it for --dry-run.
call() {
    if $dry_run; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}

tpus() {
    call gcloud compute tpus "$@" "${place[@]}"
}

# Prints the state of a VM or a queued resource, and its labels owner, recipe and artifact; `absent` if it does not
# exist.
#   describe KIND STATE NODE: the fields of the state, and of the node that has the labels
describe() {
    local answer label="$3labels.recipec_"
    if $dry_run; then
        echo absent
    elif answer="$(gcloud compute tpus "$1" describe "$vm" \
        --format="value($2,${label}owner,${label}recipe,${label}artifact)" "${place[@]}" 2>&1)"; then
        tail -n 1 <<< "$answer"
    elif [[ "$answer" == *NOT_FOUND* ]]; then
        echo absent
    else
        fail "gcloud cannot tell the state of $vm: $(grep -m 1 ERROR <<< "$answer" || tail -n 1 <<< "$answer")" \
            "see the zone and the project; gcloud auth login, where it asks for that"
    fi
}

describe_vm() {
    describe tpu-vm state ""
}

describe_queued() {
    describe queued-resources state.state "tpu.nodeSpec[0].node."
}

# Ends the script if the labels are not those that this person's `up` gives to a VM of this recipe. Another build of
# the recipe may have created it.
see_labels() {
    local other
    if [[ "$1" == "$owner" && "$2" == "$name" ]]; then
        # A VM that was labeled by hand has no artifact.
        if [[ "$command" == down && -n "$3" && "$3" != "$digest" ]]; then
            say "$vm was created from another build of $name ($3; this one is $digest)."
        fi
        return
    fi
    other="choose another name: export VM=$(default_name "$name-2" "$account" "$longest")"
    if [[ -z "$1" ]]; then
        $queue || other="if it is yours: gcloud compute tpus tpu-vm update $vm \
--update-labels=recipec_owner=$owner,recipec_recipe=$name ${place[*]}"
        fail "$vm has no label that says who created it, so $script does not change it" "$other"
    elif [[ "$1" != "$owner" ]]; then
        fail "$vm belongs to another person: its label recipec_owner is $1, and yours is $owner" "$other"
    fi
    fail "$vm was created from the recipe $2, not from $name" "$other"
}

# Prints the state of the VM or the queued resource: `ready`, `absent`, `gone STATE` or `waiting STATE`.
condition() {
    local line state
    if $queue; then
        line="$(describe_queued)" || exit 1
    else
        line="$(describe_vm)" || exit 1
    fi
    state="$(cut -f 1 <<< "$line")"
    if $changes && [[ "$state" != absent ]]; then
        see_labels "$(cut -f 2 <<< "$line")" "$(cut -f 3 <<< "$line")" "$(cut -f 4 <<< "$line")"
    fi
    case "$state" in
        absent) echo absent ;;
        READY | ACTIVE) echo ready ;;
        PREEMPTED | TERMINATED | FAILED | SUSPENDING | SUSPENDED) echo "gone $state" ;;
        *) echo "waiting $state" ;;
    esac
}

create() {
    local labels="--labels=recipec_owner=$owner,recipec_recipe=$name,recipec_artifact=$digest"
    if ! $queue; then
        call "${gcloud[@]}" compute tpus tpu-vm create "$vm" \
            "${machine[@]}" --version="$runtime_version" "$labels" "${place[@]}"
    elif ((${#nodes[@]} > 1)); then
        call "${gcloud[@]}" compute tpus queued-resources create "$vm" \
            --node-count="${#nodes[@]}" --node-prefix="$vm" "${queued[@]}" "${machine[@]}" "$labels" "${place[@]}"
    else
        call "${gcloud[@]}" compute tpus queued-resources create "$vm" \
            --node-id="$vm" "${queued[@]}" "${machine[@]}" "$labels" "${place[@]}"
    fi
}

delete() {
    if $queue; then
        tpus queued-resources delete "$vm" --force --quiet
    else
        tpus tpu-vm delete "$vm" --quiet
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
                [[ "$typed" == "$vm" ]] ||
                    fail "$vm is ${now#gone }" "$script run $vm replaces it; $script down $vm deletes it"
                delete || return
                ;;
            *STOPPED) fail "$vm is stopped" "gcloud compute tpus tpu-vm start $vm ${place[*]}" ;;
            *)
                say "$vm: ${now#waiting }"
                sleep "$poll"
                ;;
        esac
        if $dry_run; then return; fi
    done
}

# Ends the script if the VM does not exist or is another person's, before a command changes something on it.
see_vm() {
    local now
    if $dry_run; then return; fi
    now="$(condition)" || exit 1
    [[ "$now" != absent ]] || fail "$vm does not exist" "$script up creates it"
}

# Runs a gcloud command for every VM in parallel; fails if one of them fails.
on_nodes() {
    local node job failed=0 jobs=()
    if ((${#nodes[@]} == 1)); then
        "$@" "$vm"
        return
    fi
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

ssh_node() {
    tpus tpu-vm ssh "$2" --worker=all --command="$1"
}

copy_node() {
    tpus tpu-vm scp "$1" "$3:$2" --worker=all --scp-flag=-p
}

# Runs a command on every host.
on_hosts() {
    on_nodes ssh_node "$1"
}

# Runs a command on the first host.
on_first() {
    tpus tpu-vm ssh "${nodes[0]}" --worker=0 --command="$1"
}

copy() {
    on_nodes copy_node "$1" "$2"
}

# Tries a command up to three times: a new VM may not know the key yet, and connections break.
patiently() {
    local try
    for try in 1 2 3; do
        if "$@"; then return; fi
        if ((try < 3)); then
            say "a host failed; trying again in $poll s"
            sleep "$poll"
        fi
    done
    return 1
}

# Prints the command that runs steps of host.sh.
step() {
    printf '%s' "${WEIGHTS:+WEIGHTS=$(printf '%q' "$WEIGHTS") }bash $name/launch/host.sh $*"
}

# Runs steps of host.sh on every host.
steps() {
    on_hosts "$(step "$@")"
}

# Succeeds if a training on any host holds the lock, and keeps the digest of its artifact in `training`. A host without
# the files has no lock and no training.
trains() {
    local question answers
    # One line at once, because the lines of several hosts arrive together.
    question="flock --shared --nonblock train.lock true || \
echo \"training \$(sha256sum $name/recipe.lock.json | cut -c 1-16)\""
    if $dry_run; then
        on_hosts "$question"
        return 1
    fi
    answers="$(patiently on_hosts "$question")" && training="$(grep -m 1 '^training ' <<< "$answers")" || return 1
    training="${training#training }"
}

push() {
    local token
    [[ -f "$name.tar.gz" ]] || $dry_run || fail "$name.tar.gz is not in this folder" "recipe pack $name"
    if trains; then
        fail "a training runs on $vm, from the files that push would replace" \
            "$script train follows it; $script stop ends it"
    fi
    patiently copy "$name.tar.gz" "" || return
    for token in $tokens; do
        [[ -n "${!token:-}" ]] || continue
        [[ -n "$secrets" ]] || secrets="$(mktemp)" || return
        printf 'export %s=%q\n' "$token" "${!token}" >> "$secrets"
    done
    if [[ -n "$secrets" ]]; then
        patiently copy "$secrets" secrets.env || return
        rm -f "$secrets"
        secrets=""
    fi
    # Takes the lock, in case a training has started since the check.
    patiently on_hosts "flock --nonblock train.lock tar xzf $name.tar.gz"
}

train() {
    patiently steps start || return
    if $dry_run; then return; fi
    trap left INT
    watch
}

left() {
    say "The training continues without this terminal: $script logs follows it, $script stop ends it."
    exit 130
}

# Shows the log, and restarts an interrupted training; returns 1 if a host is gone or new.
watch() {
    local states now restarts=0
    while true; do
        on_first "$(step follow)" || true
        states="$(steps state 2> /dev/null | grep -E '^(running|stopped|not started|ended [0-9]+)$')" || true
        if grep -q -E '^ended (1|2|126|127)$' <<< "$states"; then
            on_hosts "tail -n 5 train.log" >&2 || true
            fail "the training ended with an error" "correct what the log reports, then: $script push, and $script train"
        elif grep -q '^stopped' <<< "$states"; then
            say "The training was stopped; $script train continues from its checkpoint."
            return
        elif (($(grep -c . <<< "$states") < hosts)); then
            now="$(condition)" || exit 1
            if [[ "$now" != ready ]]; then
                say "$vm is ${now#* }"
                return 1
            fi
            say "not every host answers; asking again in $poll s"
        elif ! grep -q -v '^ended 0$' <<< "$states"; then
            say "The training is done."
            return
        elif grep -q '^running$' <<< "$states"; then
            : # those that run end by themselves when one of them is gone
        elif grep -q '^not started$' <<< "$states"; then
            say "A host has lost its files: $script push, setup and stage restore them, and train continues."
            return 1
        else
            ((restarts < max_restarts)) ||
                fail "the training was interrupted $restarts times" "see $script logs; $script train continues"
            restarts=$((restarts + 1))
            say "The training was interrupted; starting it again ($restarts of $max_restarts)."
            steps start || true
        fi
        sleep "$poll"
    done
}

# Prepares the hosts for training, unless a training already runs on them.
ready_to_train() {
    up || return
    if trains; then
        if [[ "$training" == "$digest" ]]; then
            say "A training runs on $vm: following it. To use another archive, run $script stop first."
        else
            say "A training of another build of $name runs on $vm ($training; this one is $digest): following it." \
                "To train this one, run $script stop first."
        fi
    else
        push && patiently steps setup stage
    fi
}

run() {
    local now tries=0
    while true; do
        if ready_to_train; then
            if train; then return; fi
        else
            now="$(condition)" || exit 1
            [[ "$now" != ready ]] || fail "a step failed on a host" "see its message; the same command continues"
        fi
        tries=$((tries + 1))
        ((tries <= max_restarts)) || fail "$vm was taken away or refused $tries times" "run the same command again"
        sleep "$poll"
    done
}

# Copies a folder from the first host, or from a bucket.
fetch_folder() {
    if [[ "$1" == *://* ]]; then
        call gcloud storage cp --recursive "$1" "$2/"
    else
        tpus tpu-vm scp "${nodes[0]}:$1" "$2/" --worker=0 --recurse
    fi
}

# Copies the logs of all hosts.
fetch_logs() {
    local node worker host log
    for node in "${nodes[@]}"; do
        for ((worker = 0; worker < hosts / ${#nodes[@]}; worker++)); do
            if ((${#nodes[@]} > 1)); then
                host="host $worker of $node" log="$node-$worker.log"
            else
                host="host $worker" log="host-$worker.log"
            fi
            tpus tpu-vm scp "$node:train.log" "$1/$log" --worker="$worker"
            if ((hosts > 1)); then
                tpus tpu-vm scp "$node:$name/logs/*" "$1/" --worker="$worker" ||
                    say "There is no log of the process of $host."
            fi
        done
    done
}

fetch() {
    local results="results/$name" model="${merged##*/}"
    if [[ "${1:-}" == merged ]]; then
        call mkdir -p "$results"
        fetch_folder "$merged" "$results"
        return
    fi
    call mkdir -p "$results/logs"
    if [[ "$checkpoints" == *://* ]]; then
        # Excludes the steps' folders, corrupt steps that were set aside, and merged weights next to them.
        call gcloud storage rsync --recursive \
            --exclude="^(([0-9]|corrupt-)[^/]*|${model//./\\.}(-adapter)?)/.*" "$checkpoints" "$results"
    else
        tpus tpu-vm scp "${nodes[0]}:$checkpoints/*.json*" "$results/" --worker=0
    fi
    fetch_logs "$results/logs"
    if $adapter; then
        fetch_folder "$merged-adapter" "$results" || say "There is no adapter yet: $script merge writes it."
    fi
}

status() {
    local now
    now="$(condition)" || exit 1
    echo "$vm: $now"
    if [[ "$now" == ready ]] || $dry_run; then
        on_hosts "$(step state); tail -n 1 train.log"
    fi
}

# Deletes the VM at the end, whatever the result of the probe, and even if a step before it fails.
probe() {
    local status=0 results="results/$name"
    [[ "${1:-}" == "$vm" ]] || fail "probe deletes $vm at its end, so its name has to be typed" "$script probe $vm"
    [[ -f "$name.tar.gz" ]] || $dry_run || fail "$name.tar.gz is not in this folder" "recipe pack $name"
    up || return
    if trains; then fail "a training runs on $vm" "$script stop ends it"; fi
    tokens=""
    trap 'say "$vm is still there: $script down $vm deletes it."; exit 130' INT
    (push && patiently steps setup && steps probe) || status="$?"
    call mkdir -p "$results"
    tpus tpu-vm scp "${nodes[0]}:probe.json" "$results/" --worker=0 || status=1
    down "$vm"
    return "$status"
}

down() {
    local now
    [[ "${1:-}" == "$vm" ]] || fail "down deletes $vm, so its name has to be typed" "$script down $vm"
    if ! $queue; then
        # Deleting a queued resource deletes its VM too.
        now="$(describe_queued)" || exit 1
        if [[ "$now" != absent ]]; then queue=true; fi
    fi
    now="$(condition)" || exit 1
    if [[ "$now" == absent ]] && ! $dry_run; then
        say "$vm does not exist."
    else
        delete
    fi
}

script="$1"
shift

name="" slices=1 hosts=1 runtime_version="" max_restarts=0 tokens="" checkpoints="" merged="" adapter=false
zone="" place=() machine=() queued=() queue=false gcloud=(gcloud)
while [[ "$1" != -- ]]; do
    case "$1" in
        --name=*) name="${1#*=}" ;;
        --slices=*) slices="${1#*=}" ;;
        --hosts=*) hosts="${1#*=}" ;;
        --zone=*) zone="${1#*=}" place+=("$1") ;;
        --project=*) place+=("$1") ;;
        --runtime-version=*) runtime_version="${1#*=}" queued+=("$1") ;;
        --valid-until-duration=*) queued+=("$1") ;;
        # Only the alpha commands accept a reservation by name.
        --reservation=*) machine+=("$1") gcloud=(gcloud alpha) ;;
        --accelerator-type=* | --spot | --network=* | --subnetwork=* | --service-account=*) machine+=("$1") ;;
        --queued) queue=true ;;
        --max-restarts=*) max_restarts="${1#*=}" ;;
        --token=*) tokens="$tokens ${1#*=}" ;;
        --checkpoints=*) checkpoints="${1#*=}" ;;
        --merged=*) merged="${1#*=}" ;;
        --adapter) adapter=true ;;
        *) fail "no value $1" "build the artifact again: recipe build RECIPE" ;;
    esac
    shift
done
shift

poll="${POLL_SECONDS:-30}"
typed=""    # the VM's name, if it was typed
training="" # the digest of the artifact that a host trains from
secrets=""
trap '[[ -z "$secrets" ]] || rm -f "$secrets"' EXIT

dry_run=false words=()
for word; do
    case "$word" in
        --dry-run) dry_run=true ;;
        --queue) queue=true ;;
        --help)
            usage
            exit
            ;;
        -*) fail "no option $word" "--dry-run, --queue or --help" ;;
        *) words+=("$word") ;;
    esac
done
command="${words[0]:-}" argument="${words[1]:-}"

# The words that a command takes, itself included, and whether it changes the VM.
most=1 changes=true
case "$command" in
    "") fail "no command is given" "$help; $script --help explains them" ;;
    up | push | setup | stage | train | stop | merge) ;;
    run | probe | down) most=2 ;;
    name | logs | status) changes=false ;;
    fetch)
        most=2 changes=false
        [[ -z "$argument" || "$argument" == merged ]] ||
            fail "fetch does not take \`$argument\`" "$script fetch, or $script fetch merged"
        ;;
    *) fail "no command \`$command\`" "$help" ;;
esac
((${#words[@]} <= most)) || fail "$command does not take \`${words[$most]}\`" "$script --help"

[[ "$command" == name || -n "$zone" ]] ||
    fail "no zone is named" "export ZONE=us-east5-a, or give launch.zone in the recipe"
$dry_run || command -v gcloud > /dev/null ||
    fail "gcloud is not installed" "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"

longest=60 # 63 characters of a VM's name, minus room for the number of a slice
lock="$(dirname -- "$script")/../recipe.lock.json"
[[ -f "$lock" ]] || fail "$lock does not exist" "build the artifact again: recipe build RECIPE"
digest="$({ sha256sum < "$lock" || shasum -a 256 < "$lock"; } 2> /dev/null | cut -c 1-16)"
account="$(account)" || exit 1
owner="$(owner_label "$account")"
vm="${VM:-$(default_name "$name" "$account" "$longest")}"
see_name VM "$vm" "$longest"
nodes=("$vm")
if ((slices > 1)); then
    nodes=()
    for ((i = 0; i < slices; i++)); do nodes+=("$vm-$i"); done
fi

case "$command" in
    push | setup | stage | train | stop | merge) see_vm ;;
esac

case "$command" in
    name) echo "$vm" ;;
    up | push | train | status) "$command" ;;
    setup | stage) patiently steps "$command" ;;
    stop) steps stop ;;
    logs) on_first "tail --lines=100 --follow=name train.log" ;;
    merge) on_first "$(step merge)" ;;
    fetch) fetch "$argument" ;;
    run)
        typed="$argument"
        [[ -z "$typed" || "$typed" == "$vm" ]] ||
            fail "this is $vm, not $typed" "$script run $vm, or choose another name: export VM=$typed"
        run
        ;;
    probe | down) "$command" "$argument" ;;
esac
