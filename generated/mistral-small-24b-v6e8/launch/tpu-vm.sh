#!/usr/bin/env bash
# mistral-small-24b-v6e8 on v6e-8 (a host of 8 chips), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=mistral-small-24b-v6e8
    --zone="${ZONE:-}"
    --accelerator-type=v6e-8
    --runtime-version=v2-alpha-tpuv6e
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=mistral-small-24b-v6e8/checkpoints
    --merged=/dev/shm/mistral-small-24b-v6e8/merged
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
