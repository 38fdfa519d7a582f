#!/usr/bin/env bash
# from-base on v5p-8 (a host of 4 chips), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=from-base
    --zone="${ZONE:-}"
    --accelerator-type=v5p-8
    --runtime-version=v2-alpha-tpuv5
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=from-base/checkpoints
    --merged=/dev/shm/from-base/merged
    --adapter
)

exec bash "$here/../../runtime/launch/tpu-vm.sh" "$0" "${values[@]}" -- "$@"
