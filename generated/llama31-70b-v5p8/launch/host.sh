#!/usr/bin/env bash
# The steps of each host of the run; the other files of this folder call it on the hosts.
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

# `recipe pack` puts it there; if recipec or its runtime is installed, the package's modules are used.
runtime="$here/../../runtime"
[[ -d "$runtime" ]] ||
    runtime="$(PYTHONSAFEPATH=1 python3 -c 'import runtime; print(*runtime.__path__)' 2> /dev/null)" || {
    echo "error: the runtime is not installed: python3 -m pip install -r runtime.txt" >&2
    exit 1
}
exec bash "$runtime/launch/host.sh" "${values[@]}" -- "$@"
