#!/usr/bin/env bash
# The same server without a container, on a v6e-8 machine with vllm-tpu installed.
# Usage: serve.sh [MODEL_DIR]
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
model="${1:-$here/../merged}"
if [[ ! -f "$model/config.json" ]]; then
    echo "error: $model holds no model: run merge.py first, or give the folder of the merged weights" >&2
    exit 1
fi

export VLLM_XLA_CACHE_PATH="${VLLM_XLA_CACHE_PATH:-$HOME/.cache/vllm/xla}"
export HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1

exec vllm serve "$model" \
    --served-model-name llama31-8b-v6e8 \
    --host 0.0.0.0 \
    --port 8000 \
    --tensor-parallel-size 8 \
    --max-model-len 16384 \
    --max-num-seqs 64 \
    --max-num-batched-tokens 4096 \
    --kv-cache-dtype fp8 \
    --enable-prefix-caching
