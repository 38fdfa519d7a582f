#!/usr/bin/env bash
# llama32-1b-full-v5e4 on v5e-4 (a host of 4 chips) of a cluster that xpk has set up.
# xpk.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=llama32-1b-full-v5e4
    --cluster="${CLUSTER:-}"
    --zone="${ZONE:-}"
    --tpu-type=v5litepod-2x2
    --num-slices=1
    # The publisher may move this tag; a digest pins the image.
    --image=python:3.11-slim-bookworm
    --token=HF_TOKEN
    --max-restarts=20
    --termination-grace-period-seconds=360
)

# `recipe pack` puts it there; if recipec or its runtime is installed, the package's modules are used.
runtime="$here/../../runtime"
[[ -d "$runtime" ]] ||
    runtime="$(PYTHONSAFEPATH=1 python3 -c 'import runtime; print(*runtime.__path__)' 2> /dev/null)" || {
    echo "error: the runtime is not installed: python3 -m pip install -r runtime.txt" >&2
    exit 1
}
exec bash "$runtime/launch/xpk.sh" "$0" "${values[@]}" -- "$@"
