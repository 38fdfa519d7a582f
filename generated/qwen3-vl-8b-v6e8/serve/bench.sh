#!/usr/bin/env bash
# Measures the running server at 8 points with `vllm bench serve`, into results/bench/ of this artifact.
# An interrupted run continues where it stopped; the server's key is read from VLLM_API_KEY.
# Usage: bench.sh [--results DIR] [--machine v6e-1] [--help]
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

arguments=(
    --url http://127.0.0.1:8000 --model qwen3-vl-8b-v6e8
    --input-lengths "512,4096" --output-length 512
    --request-rates "1,4,16,inf" --prompts 100
    --max-model-len 8192
    --accelerator v6e-1 --chips 1
    --accelerator-usd-per-hour 2.69 --price-source "list price of 2026-05, on demand: 1 chip at US\$ 2.69"
)
# vLLM's own client, on this machine or in the server's container.
if command -v vllm > /dev/null; then
    model="${MODEL_DIR:-$here/../merged}"
    arguments+=(--tokenizer "$model")
else
    arguments+=(--compose "$here/compose.yaml" --tokenizer /model)
fi

# The runtime's modules: those of runtime/, if it was copied, else of the wheel that requirements-train.txt names, else
# installed ones. Modules in the current folder are not used.
version="$(sed -n 's/^recipec-runtime==//p' "$here/../requirements-train.txt")"
wheel="$(dirname -- "$(dirname -- "$here")")/recipec_runtime-$version-py3-none-any.whl"
modules="$here/../..:$wheel"
[[ -e "$here/../../runtime" || -e "$wheel" ]] || PYTHONSAFEPATH=1 python3 -c 'import runtime' 2> /dev/null || {
    printf 'error: there is no %s\n  = help: recipe build writes it, and recipe pack packs it\n' "$wheel" >&2
    exit 1
}
PYTHONSAFEPATH=1 PYTHONPATH="$modules" exec python3 -m runtime.clients.bench \
    --results "$here/../results/bench" --lock "$here/../recipe.lock.json" "${arguments[@]}" "$@"
