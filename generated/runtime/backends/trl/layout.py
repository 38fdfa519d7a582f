"""Names of a checkpoint's files."""

TRAINED = "trained.safetensors"
"""The trained parameters, where FSDP does not write shards."""
DATA = "data.json"
"""Where the data is."""
LAST = "trainer_state.json"
"""The Trainer's own, which it writes last."""
