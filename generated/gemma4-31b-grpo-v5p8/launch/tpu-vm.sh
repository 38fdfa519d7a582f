#!/usr/bin/env bash
# gemma4-31b-grpo-v5p8 on v5p-8 (a host of 4 chips), by gcloud.
# tpu-vm.sh --help lists the commands.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma4-31b-grpo-v5p8
    --zone="${ZONE:-}"
    --accelerator-type=v5p-8
    --runtime-version=v2-alpha-tpuv5
    --hosts=1
    --max-restarts=20
    --token=HF_TOKEN
    --checkpoints=gemma4-31b-grpo-v5p8/checkpoints
    --merged=/dev/shm/gemma4-31b-grpo-v5p8/merged
    --adapter
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
commands="$(PYTHONSAFEPATH=1 PYTHONPATH="$modules" python3 -m runtime.launch tpu-vm)"
exec bash -c "$commands" "$0" "$0" "${values[@]}" -- "$@"
