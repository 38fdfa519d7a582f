#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma4-26b-a4b-v5p8
    --hub=google/gemma-4-26B-A4B-it
    --weights=/dev/shm/gemma-4-26B-A4B-it
    --weights-mib=48129
    --stop-seconds=300
    --merge-output=/dev/shm/gemma4-26b-a4b-v5p8
    --merge-checkpoint=gemma4-26b-a4b-v5p8/checkpoints
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
