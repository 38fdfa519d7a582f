#!/usr/bin/env bash
# The same server without a container, on a v6e-8 machine with vllm-tpu installed.
# Usage: serve.sh [MODEL_DIR]
set -euo pipefail

fail() {
    printf 'error: %s\n  = help: %s\n' "$1" "$2" >&2
    exit 1
}

(($# <= 1)) ||
    fail "serve.sh does not take \`${*: -1}\`" "the recipe has the server's flags; serve.sh MODEL_DIR"

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
model="${1:-${MODEL_DIR:-$here/../merged}}"

command -v vllm > /dev/null ||
    fail "vllm is not installed" "in an environment of Python 3.12: pip install vllm-tpu==0.32.0"
if (exec 3<> /dev/tcp/127.0.0.1/8000) 2> /dev/null; then
    fail "port 8000 is in use" "stop the program that listens there; ss -ltnp 'sport = :8000' shows it"
fi
[[ -f "$model/config.json" ]] ||
    fail "$model holds no config.json" "run merge.py first, or name the folder in MODEL_DIR"

export HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1
export RPA_V3_DECODE_BLOCK_SIZES="1,1024,1,1024"

# Modules in the current folder are not used.
export PYTHONSAFEPATH=1
exec vllm serve "$model" \
    --served-model-name gemma4-31b-grpo-v5p8 \
    --host 127.0.0.1 \
    --port 8000 \
    --shutdown-timeout 120 \
    --tensor-parallel-size 8 \
    --max-model-len 8192 \
    --max-num-seqs 64 \
    --max-num-batched-tokens 4096 \
    --kv-cache-dtype fp8 \
    --enable-prefix-caching \
    --disable-chunked-mm-input
