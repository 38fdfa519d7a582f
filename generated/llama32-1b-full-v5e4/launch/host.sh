#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=llama32-1b-full-v5e4
    --hub=meta-llama/Llama-3.2-1B-Instruct
    --weights=/dev/shm/Llama-3.2-1B-Instruct
    --weights-mib=2358
    --stop-seconds=360
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
