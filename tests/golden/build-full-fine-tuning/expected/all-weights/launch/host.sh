#!/usr/bin/env bash
# The steps of each host of the run; the other files of this folder call it on the hosts.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=all-weights
    --hub=meta-llama/Llama-3.2-1B-Instruct
    --weights=/dev/shm/Llama-3.2-1B-Instruct
    --weights-mib=2358
    --stop-seconds=360
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
