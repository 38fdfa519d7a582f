#!/usr/bin/env bash
# The steps of each host of the run; the other files of this folder call it on the hosts.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma4-31b-v5p8
    --hub=google/gemma-4-31B-it
    --weights=/dev/shm/gemma-4-31B-it
    --weights-mib=58551
    --stop-seconds=300
    --merge-output=/dev/shm/gemma4-31b-v5p8
)

# `recipe pack` puts it there; if recipec or its runtime is installed, the package's modules are used.
runtime="$here/../../runtime"
[[ -d "$runtime" ]] ||
    runtime="$(PYTHONSAFEPATH=1 python3 -c 'import runtime; print(*runtime.__path__)' 2> /dev/null)" || {
    echo "error: the runtime is not installed: python3 -m pip install -r runtime.txt" >&2
    exit 1
}
exec bash "$runtime/launch/host.sh" "${values[@]}" -- "$@"
