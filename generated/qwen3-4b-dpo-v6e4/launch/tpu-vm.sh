#!/usr/bin/env bash
# qwen3-4b-dpo-v6e4 on v6e-4 (a host of 4 chips), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=qwen3-4b-dpo-v6e4
    --vm=qwen3-4b-dpo-v6e4
    --zone="${ZONE:-}"
    --accelerator-type=v6e-4
    --runtime-version=v2-alpha-tpuv6e
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=qwen3-4b-dpo-v6e4/checkpoints
    --merged=qwen3-4b-dpo-v6e4/merged
    --adapter
)

exec bash "$here/../../runtime/launch/tpu-vm.sh" "$0" "${values[@]}" -- "$@"
