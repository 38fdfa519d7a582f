#!/usr/bin/env bash
# qwen3-8b-full-tpu7x8 on tpu7x-8 (a host of 4 chips) of a cluster that xpk has set up.
# xpk.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=qwen3-8b-full-tpu7x8
    --cluster="${CLUSTER:-}"
    --zone="${ZONE:-}"
    --tpu-type=tpu7x-2x2x1
    --num-slices=1
    # The publisher may move this tag; a digest pins the image.
    --image=python:3.11-slim-bookworm
    --token=HF_TOKEN
    --max-restarts=20
    --termination-grace-period-seconds=780
)

# The runtime's modules: those of runtime/, if it was copied, else of the wheel that requirements-train.txt names, else
# installed ones. Modules in the current folder are not used.
version="$(sed -n 's/^recipec-runtime==//p' "$here/../requirements-train.txt")"
wheel="$(dirname -- "$(dirname -- "$here")")/recipec_runtime-$version-py3-none-any.whl"
modules="$here/../..:$wheel"
[[ -e "$here/../../runtime" || -e "$wheel" ]] || PYTHONSAFEPATH=1 python3 -c 'import runtime' 2> /dev/null || {
    printf 'error: there is no %s\n  = help: recipe build writes it, and recipe pack packs it\n' "$wheel" >&2
    exit 1
}
commands="$(PYTHONSAFEPATH=1 PYTHONPATH="$modules" python3 -m runtime.launch xpk)"
exec bash -c "$commands" "$0" "$0" "${values[@]}" -- "$@"
