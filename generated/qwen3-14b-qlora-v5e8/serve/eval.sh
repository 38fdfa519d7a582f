#!/usr/bin/env bash
# Evaluates the fine-tuned model on the running server, into results/eval/ of this artifact.
# An interrupted run continues where it stopped. Usage: eval.sh [--url URL] [--results DIR] [--fresh] [--help]
# The base, on another server: --base-url URL; or at another time: eval.sh --side base --url URL
# lm_eval comes from a separate environment (requirements-eval.txt), on the path or by --lm-eval.
# The server's key, if it needs one, is read from VLLM_API_KEY.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

arguments=(
    --url http://127.0.0.1:8000
    --name qwen3-14b-qlora-v5e8
    --max-tokens 512
    --requirements "$here/../requirements-eval.txt"
    --task-api chat
    --max-length 16384
    --limit 200
    --tasks
    gsm8k
)

# Modules in the current folder are not used.
# The wheel is where `recipe pack` puts it; without it, the installed runtime is used.
PYTHONSAFEPATH=1 PYTHONPATH="$here/../../recipec_runtime-0.2.0-py3-none-any.whl" exec python3 -m runtime.serving.evaluate \
    "${arguments[@]}" --results "$here/../results/eval" "$@"
