"""Write, check and read back the checkpoints of a run, in Orbax's format."""
