#!/usr/bin/env bash
# llama31-70b-2xv5p16 on 2 slices of v5p-16 (2 hosts of 4 chips each), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=llama31-70b-2xv5p16
    --vm=llama31-70b-2xv5p16
    --zone="${ZONE:-}"
    --accelerator-type=v5p-16
    --runtime-version=v2-alpha-tpuv5
    --slices=2
    --hosts=4
    --queued
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=gs://my-bucket/llama31-70b-2xv5p16
    --merged=/dev/shm/llama31-70b-2xv5p16/merged
    --adapter
)

exec bash "$here/../../runtime/launch/tpu-vm.sh" "$0" "${values[@]}" -- "$@"
