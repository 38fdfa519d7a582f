#!/usr/bin/env bash
# baseline on v5p-8 (a host of 4 chips) of a cluster that xpk has set up.
# xpk.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=baseline
    --workload=baseline
    --cluster="${CLUSTER:-}"
    --zone="${ZONE:-}"
    --tpu-type=v5p-2x2x1
    --num-slices=1
    # The publisher may move this tag; a digest pins the image.
    --image=python:3.11-slim-bookworm
    --token=HF_TOKEN
    --max-restarts=20
    --termination-grace-period-seconds=300
)

exec bash "$here/../../runtime/launch/xpk.sh" "$0" "${values[@]}" -- "$@"
