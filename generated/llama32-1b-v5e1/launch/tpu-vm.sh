#!/usr/bin/env bash
# llama32-1b-v5e1 on v5e-1 (a host of 1 chip), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=llama32-1b-v5e1
    --zone="${ZONE:-}"
    --accelerator-type=v5litepod-1
    --runtime-version=v2-alpha-tpuv5-lite
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=llama32-1b-v5e1/checkpoints
    --merged=llama32-1b-v5e1/merged
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
