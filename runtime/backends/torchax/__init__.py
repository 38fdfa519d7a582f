"""Training of transformers' own model on TPUs: torchax runs its torch operations as jax operations."""

import os

# By default, torchax turns this telemetry on.
os.environ.setdefault("ENABLE_RUNTIME_UPTIME_TELEMETRY", "0")
