#!/usr/bin/env bash
# Checks the running server with its clients' requests: a line for each check, exit status 1 if one fails.
# Usage: smoke.sh [--url URL] [--wait MINUTES] [--base-url URL] [--json FILE]
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

arguments=(
    --url http://127.0.0.1:8000
    --model llama32-1b-full-v5e4
    # The version that the flags were checked against.
    --vllm 0.32.0
    --wait 30
)

# Modules in the current folder are not used.
# The wheel is where `recipe pack` puts it; without it, the installed runtime is used.
PYTHONSAFEPATH=1 PYTHONPATH="$here/../../recipec_runtime-0.2.0-py3-none-any.whl" exec python3 -m runtime.serving.smoke "${arguments[@]}" "$@"
