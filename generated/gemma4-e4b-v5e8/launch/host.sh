#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma4-e4b-v5e8
    --hub=google/gemma-4-E4B-it
    --weights=/dev/shm/gemma-4-E4B-it
    --weights-mib=14235
    --stop-seconds=300
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
