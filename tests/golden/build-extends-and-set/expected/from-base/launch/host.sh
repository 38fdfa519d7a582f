#!/usr/bin/env bash
# The steps of each host of the run; the other files of this folder call it on the hosts.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=from-base
    --hub=google/gemma-4-31B-it
    --weights=/dev/shm/gemma-4-31B-it
    --weights-mib=58551
    --stop-seconds=300
    --merge-output=/dev/shm/from-base
    --merge-checkpoint=from-base/checkpoints
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
