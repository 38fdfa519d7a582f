#!/usr/bin/env bash
# The steps of each host of the run; the other files of this folder call it on the hosts.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=baseline
    --hub=meta-llama/Llama-3.1-8B-Instruct
    --weights=/dev/shm/Llama-3.1-8B-Instruct
    --weights-mib=15317
    --stop-seconds=300
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
