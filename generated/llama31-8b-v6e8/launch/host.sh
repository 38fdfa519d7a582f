#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=llama31-8b-v6e8
    --hub=meta-llama/Llama-3.1-8B-Instruct
    --weights=/dev/shm/Llama-3.1-8B-Instruct
    --weights-mib=15317
    --stop-seconds=300
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
