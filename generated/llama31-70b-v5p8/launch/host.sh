#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=llama31-70b-v5p8
    --hub=meta-llama/Llama-3.1-70B-Instruct
    --weights=/dev/shm/Llama-3.1-70B-Instruct
    --weights-mib=134571
    --stop-seconds=300
    --merge-output=/dev/shm/llama31-70b-v5p8
    --merge-checkpoint=llama31-70b-v5p8/checkpoints
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
