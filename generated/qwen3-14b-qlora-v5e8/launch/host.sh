#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=qwen3-14b-qlora-v5e8
    --hub=Qwen/Qwen3-14B
    --weights=/dev/shm/Qwen3-14B
    --weights-mib=28169
    --stop-seconds=300
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
