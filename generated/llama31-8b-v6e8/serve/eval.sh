#!/usr/bin/env bash
# Evaluates the fine-tuned model on the running server, into results/eval/ of this artifact.
# An interrupted run continues where it stopped. Usage: eval.sh [--url URL] [--results DIR] [--fresh] [--help]
# Each URL may be a folder of weights: then no server is needed, and python3 is the one that trains.
# The base, on another server: --base-url URL; or at another time: eval.sh --side base --url URL
# lm_eval comes from a separate environment (requirements-eval.txt), on the path or by --lm-eval.
# The server's key, if it needs one, is read from VLLM_API_KEY.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

arguments=(
    --url http://127.0.0.1:8000
    --name llama31-8b-v6e8
    --max-tokens 512
    --requirements "$here/../requirements-eval.txt"
    --task-api chat
    --max-length 16384
    --limit 200
    --tasks
    gsm8k
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
PYTHONSAFEPATH=1 PYTHONPATH="$modules" exec python3 -m runtime.clients.evaluate \
    "${arguments[@]}" --results "$here/../results/eval" "$@"
