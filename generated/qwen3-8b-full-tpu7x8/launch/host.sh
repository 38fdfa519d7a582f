#!/usr/bin/env bash
# What each host of the run does; the other files of this folder call it there.
# Usage: host.sh STEP..., of which each sees what is done already:
#   setup    an environment of Python 3.11 with the pinned packages, in venv/
#   stage    the base weights, 16.4 GB, into $WEIGHTS (/dev/shm/Qwen3-8B)
#   train    trains on from the newest checkpoint, or from the beginning
set -euo pipefail

# Where qwen3-8b-full-tpu7x8/ and runtime/ lie.
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

requirements=qwen3-8b-full-tpu7x8/requirements-train.txt
weights="${WEIGHTS:-/dev/shm/Qwen3-8B}"

fail() {
    printf 'error: %s\n  = help: %s\n' "$1" "$2" >&2
    exit 1
}

setup() {
    if cmp --silent "$requirements" venv/installed.txt; then return; fi
    # uv brings Python 3.11 where the system has another: a Cloud TPU VM has 3.10.
    python3 -m pip install --quiet --user uv==0.13.9
    python3 -m uv venv --quiet --clear --python 3.11 venv
    python3 -m uv pip install --quiet --python venv/bin/python --requirement "$requirements"
    cp "$requirements" venv/installed.txt
}

stage() {
    local free have
    if [[ -e "$weights/.complete" ]]; then return; fi
    mkdir -p -- "$weights"
    free="$(df --output=avail --block-size=1M -- "$weights" | tail -n 1)"
    have="$(du --summarize --block-size=1M -- "$weights" | cut -f 1)"
    ((free + have >= 15623)) ||
        fail "$weights has room for $(((free + have) / 1024)) GiB, and the weights take 16.4 GB" \
            "name a folder on a larger disk in WEIGHTS"
    venv/bin/hf download --quiet Qwen/Qwen3-8B --exclude "original/*" --local-dir "$weights"
    touch "$weights/.complete"
}

train() {
    exec venv/bin/python qwen3-8b-full-tpu7x8/train.py --model "$weights" --resume
}

for step in "$@"; do
    case "$step" in
        setup | stage | train) "$step" ;;
        *) fail "no step \`$step\`" "setup, stage or train" ;;
    esac
done
