#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma3-4b-full-v6e8
    --hub=google/gemma-3-4b-it
    --weights=/dev/shm/gemma-3-4b-it
    --weights-mib=7402
    --stop-seconds=480
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
