#!/usr/bin/env bash
# llama31-70b-2xv5p16 on 2 slices of v5p-16 (2 hosts of 4 chips each) of a cluster that xpk has set up.
# xpk.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=llama31-70b-2xv5p16
    --cluster="${CLUSTER:-}"
    --zone="${ZONE:-}"
    --tpu-type=v5p-2x2x2
    --num-slices=2
    # The publisher may move this tag; a digest pins the image.
    --image=python:3.11-slim-bookworm
    --token=HF_TOKEN
    --max-restarts=20
    --termination-grace-period-seconds=300
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
