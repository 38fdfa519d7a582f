#!/usr/bin/env bash
# The steps of each host of the run; the other files of this folder call it on the hosts.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=smallest
    --hub=google/gemma-3-270m-it
    --weights=/dev/shm/gemma-3-270m-it
    --weights-mib=512
    --stop-seconds=300
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
