#!/usr/bin/env bash
# The steps of each host of the run; the other files of this folder call it on the hosts.
# host.sh --help lists the steps.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

values=(
    --name=gemma4-31b-grpo-v5p8
    --hub=google/gemma-4-31B-it
    --weights=/dev/shm/gemma-4-31B-it
    --weights-mib=58551
    --stop-seconds=300
    --merge-output=/dev/shm/gemma4-31b-grpo-v5p8
    --merge-checkpoint=gemma4-31b-grpo-v5p8/checkpoints
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
steps="$(PYTHONSAFEPATH=1 PYTHONPATH="$modules" python3 -m runtime.launch host)"
cd -- "$here/../.."
exec bash -c "$steps" host.sh "${values[@]}" -- "$@"
