#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma3-12b-v5e8
    --hub=google/gemma-3-12b-it
    --weights=/dev/shm/gemma-3-12b-it
    --weights-mib=22442
    --stop-seconds=300
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
