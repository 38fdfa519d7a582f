#!/usr/bin/env bash
# Runs a recipe as a workload of xpk. An artifact's launch/xpk.sh calls this with the recipe's values.
#   xpk.sh SCRIPT VALUE... -- COMMAND
# SCRIPT is the caller's name, for messages. This also runs on laptops, so it needs no bash newer than 3.2.
set -euo pipefail

# account, owner_label, default_name and see_name are in runtime/launch/owner.sh, which runtime/launch/__main__.py
# puts before this script.

version=1.9.0 # tested
help="create, status, delete or name"

usage() {
    cat << END
Usage: $script [--dry-run] COMMAND, with the option anywhere, in the folder of $name.tar.gz, which
\`recipe pack $name\` makes
  name          prints the workload's name, $name-USER; WORKLOAD names another
  create        starts the run, from an image of $image with the archive's files
  status        shows its state
  delete NAME   deletes the workload but not its checkpoints; type its name
Cluster and zone are the recipe's, or CLUSTER and ZONE if the recipe has none.
END
    [[ -z "$tokens" ]] ||
        echo "create copies these variables of this machine's environment into the workload, where its readers see them:$tokens"
}

fail() {
    printf 'error: %s\n  = help: %s\n' "$1" "$2" >&2
    exit 1
}

create() {
    local token
    [[ -f "$name.tar.gz" ]] || fail "$name.tar.gz is not in this folder" "recipe pack $name"
    folder="$(mktemp -d)"
    mkdir "$folder/image"
    tar xzf "$name.tar.gz" -C "$folder/image"
    touch "$folder/environment"
    for token in $tokens; do
        # Only the name: xpk takes the value from this environment.
        if [[ -n "${!token:-}" ]]; then echo "$token" >> "$folder/environment"; fi
    done
    # xpk restarts after 137 and 143 by itself; 75 (another host is gone) has to be named.
    xpk workload create "$mode" --workload="$workload" "${place[@]}" "${machine[@]}" \
        --base-docker-image="$image" --script-dir="$folder/image" --env-file="$folder/environment" \
        --command="exec bash $name/launch/host.sh setup stage train" \
        --restart-on-exit-codes=75 "${limits[@]}"
}

delete() {
    [[ "${1:-}" == "$workload" ]] ||
        fail "delete ends $workload, so its name has to be typed" "$script delete $workload"
    xpk workload delete "$mode" --workload="$workload" "${place[@]}" --force
}

script="$1"
shift

name="" cluster="" zone="" image="" tokens="" place=() machine=() limits=()
while [[ "$1" != -- ]]; do
    case "$1" in
        --name=*) name="${1#*=}" ;;
        --cluster=*) cluster="${1#*=}" place+=("$1") ;;
        --zone=*) zone="${1#*=}" place+=("$1") ;;
        --project=*) place+=("$1") ;;
        --image=*) image="${1#*=}" ;;
        --token=*) tokens="$tokens ${1#*=}" ;;
        --tpu-type=* | --num-slices=* | --spot | --reservation=*) machine+=("$1") ;;
        --max-restarts=* | --termination-grace-period-seconds=*) limits+=("$1") ;;
        *) fail "no value $1" "build the artifact again: recipe build RECIPE" ;;
    esac
    shift
done
shift
folder=""
trap '[[ -z "$folder" ]] || rm -rf "$folder"' EXIT

mode=--no-dry-run dry_run=false words=()
# shellcheck disable=SC2034 # dry_run is for owner.sh
for word; do
    case "$word" in
        --dry-run) mode=--dry-run dry_run=true ;;
        --help)
            usage
            exit
            ;;
        -*) fail "no option $word" "--dry-run or --help" ;;
        *) words+=("$word") ;;
    esac
done
command="${words[0]:-}"

# The words that a command takes, itself included.
most=1
case "$command" in
    "") fail "no command is given" "$help; $script --help explains them" ;;
    name | create | status) ;;
    delete) most=2 ;;
    *) fail "no command \`$command\`" "$help" ;;
esac
((${#words[@]} <= most)) || fail "$command does not take \`${words[$most]}\`" "$script --help"

if [[ "$command" != name ]]; then
    [[ -n "$cluster" ]] || fail "no cluster is named" "export CLUSTER=NAME, or give launch.cluster in the recipe"
    [[ -n "$zone" ]] || fail "no zone is named" "export ZONE=us-east5-a, or give launch.zone in the recipe"
    command -v xpk > /dev/null || fail "xpk is not installed" "python3 -m pip install xpk==$version"
fi

longest=40 # characters of a workload's name
account="$(account)" || exit 1
workload="${WORKLOAD:-$(default_name "$name" "$account" "$longest")}"
see_name WORKLOAD "$workload" "$longest"

case "$command" in
    name) echo "$workload" ;;
    create) create ;;
    status) xpk workload list "$mode" "${place[@]}" --filter-by-job="^$workload\$" ;;
    delete) delete "${words[1]:-}" ;;
esac
