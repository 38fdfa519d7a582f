#!/usr/bin/env bash
# all-weights on v6e-8 (a host of 8 chips), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=all-weights
    --zone="${ZONE:-}"
    --accelerator-type=v6e-8
    --runtime-version=v2-alpha-tpuv6e
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=all-weights/checkpoints
    --merged=all-weights/merged
)

exec bash "$here/../../runtime/launch/tpu-vm.sh" "$0" "${values[@]}" -- "$@"
