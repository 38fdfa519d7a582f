#!/usr/bin/env bash
# Checks the running server with its clients' requests: a line for each check, exit status 1 if one fails.
# Usage: smoke.sh [--url URL] [--wait MINUTES] [--base-url URL] [--json FILE]
# Each URL may be a folder of weights: then no server is needed, and python3 is the one that trains.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

arguments=(
    --url http://127.0.0.1:8000
    --model gemma4-31b-grpo-v5p8
    # The version that the flags were checked against.
    --vllm 0.32.0
    --wait 30
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
PYTHONSAFEPATH=1 PYTHONPATH="$modules" exec python3 -m runtime.clients.smoke "${arguments[@]}" "$@"
