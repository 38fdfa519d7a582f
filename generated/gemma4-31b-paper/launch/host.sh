#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma4-31b-paper
    --hub=google/gemma-4-31B-it
    --weights=/dev/shm/gemma-4-31B-it
    --weights-mib=58551
    --stop-seconds=300
    --merge-output=/dev/shm/gemma4-31b-paper
)

exec bash "$here/../../runtime/launch/host.sh" "${values[@]}" -- "$@"
