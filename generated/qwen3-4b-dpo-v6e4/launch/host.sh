#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=qwen3-4b-dpo-v6e4
    --hub=Qwen/Qwen3-4B-Instruct-2507
    --weights=/dev/shm/Qwen3-4B-Instruct-2507
    --weights-mib=7673
    --stop-seconds=300
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
