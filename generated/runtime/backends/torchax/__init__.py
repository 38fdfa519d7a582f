"""Training of transformers' own model on TPUs: torchax turns its torch operations into jax ones."""

import os

# torchax would switch it on.
os.environ.setdefault("ENABLE_RUNTIME_UPTIME_TELEMETRY", "0")
