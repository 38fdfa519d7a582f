#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=qwen3-32b-v6e8
    --hub=Qwen/Qwen3-32B
    --weights=/dev/shm/Qwen3-32B
    --weights-mib=62489
    --stop-seconds=300
    --merge-output=/dev/shm/qwen3-32b-v6e8
    --merge-checkpoint=qwen3-32b-v6e8/checkpoints
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
