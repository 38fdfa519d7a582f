#!/usr/bin/env bash
# llama31-70b-v5p8 on v5p-8 (a host of 4 chips), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=llama31-70b-v5p8
    --zone="${ZONE:-}"
    --accelerator-type=v5p-8
    --runtime-version=v2-alpha-tpuv5
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=llama31-70b-v5p8/checkpoints
    --merged=/dev/shm/llama31-70b-v5p8/merged
    --adapter
)

# `recipe pack` puts it there; if recipec or its runtime is installed, the package's modules are used.
runtime="$here/../../runtime"
[[ -d "$runtime" ]] ||
    runtime="$(PYTHONSAFEPATH=1 python3 -c 'import runtime; print(*runtime.__path__)' 2> /dev/null)" || {
    echo "error: the runtime is not installed: python3 -m pip install -r runtime.txt" >&2
    exit 1
}
exec bash "$runtime/launch/tpu-vm.sh" "$0" "${values[@]}" -- "$@"
