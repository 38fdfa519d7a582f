#!/usr/bin/env bash
# gemma3-12b-v5e8 on v5e-8 (a host of 8 chips), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma3-12b-v5e8
    --vm=gemma3-12b-v5e8
    --zone="${ZONE:-}"
    --accelerator-type=v5litepod-8
    --runtime-version=v2-alpha-tpuv5-lite
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=gemma3-12b-v5e8/checkpoints
    --merged=gemma3-12b-v5e8/merged
    --adapter
)

exec bash "$here/../../runtime/launch/tpu-vm.sh" "$0" "${values[@]}" -- "$@"
