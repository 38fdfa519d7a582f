#!/usr/bin/env bash
# qwen3-14b-qlora-v5e8 on v5e-8 (a host of 8 chips), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=qwen3-14b-qlora-v5e8
    --vm=qwen3-14b-qlora-v5e8
    --zone="${ZONE:-}"
    --accelerator-type=v5litepod-8
    --runtime-version=v2-alpha-tpuv5-lite
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=qwen3-14b-qlora-v5e8/checkpoints
    --merged=qwen3-14b-qlora-v5e8/merged
    --adapter
)

exec bash "$here/../../runtime/launch/tpu-vm.sh" "$0" "${values[@]}" -- "$@"
