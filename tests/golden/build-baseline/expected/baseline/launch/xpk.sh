#!/usr/bin/env bash
# baseline by xpk, on v5p-8 (a host of 4 chips) of a cluster that xpk has set up.
# Usage: xpk.sh [--dry-run] COMMAND, in the folder of baseline.tar.gz, which `recipe pack baseline` makes:
#   create        starts the run, from an image of python:3.11-slim-bookworm with the archive's files
#   status        says what has become of it
#   delete NAME   deletes it, and not its checkpoints; the name is to be typed out
# HF_TOKEN of this machine's environment is handed on; in the cluster it can be read by whoever may read the workload.
set -euo pipefail

name=baseline

fail() {
    printf 'error: %s\n  = help: %s\n' "$1" "$2" >&2
    exit 1
}

[[ -n "${CLUSTER:-}" ]] || fail "no cluster is named" "export CLUSTER=NAME, or give launch.cluster in the recipe"
[[ -n "${ZONE:-}" ]] || fail "no zone is named" "export ZONE=us-east5-a, or give launch.zone in the recipe"
where=(--cluster="$CLUSTER" --zone="$ZONE")
command -v xpk > /dev/null || fail "xpk is not installed" "python3 -m pip install xpk"

create() {
    local folder
    [[ -f baseline.tar.gz ]] || fail "baseline.tar.gz is not in this folder" "recipe pack baseline"
    folder="$(mktemp -d)"
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf '$folder'" EXIT
    mkdir "$folder/image"
    tar xzf baseline.tar.gz -C "$folder/image"
    : > "$folder/environment"
    # A name alone: xpk takes the value from this environment.
    [[ -z "${HF_TOKEN:-}" ]] || echo HF_TOKEN >> "$folder/environment"
    # Restarted after 75 (another host is gone), and after 137 and 143, which xpk restarts by itself.
    xpk workload create "${dry_run[@]}" --workload="$name" "${where[@]}" \
        --tpu-type=v5p-2x2x1 --num-slices=1 \
        --base-docker-image=python:3.11-slim-bookworm --script-dir="$folder/image" --env-file="$folder/environment" \
        --command="exec bash baseline/launch/host.sh setup stage train" \
        --max-restarts=20 --restart-on-exit-codes=75 \
        --termination-grace-period-seconds=300
}

dry_run=(--no-dry-run)
if [[ "${1:-}" == --dry-run ]]; then
    dry_run=(--dry-run)
    shift
fi

case "${1:-}" in
    create) create ;;
    status) xpk workload list "${dry_run[@]}" "${where[@]}" --filter-by-job="^$name\$" ;;
    delete)
        [[ "${2:-}" == "$name" ]] || fail "delete ends $name, and its name is to be typed out" "$0 delete $name"
        xpk workload delete "${dry_run[@]}" "${where[@]}" --workload="$name" --force
        ;;
    *) fail "no command \`${1:-}\`" "create, status or delete" ;;
esac
