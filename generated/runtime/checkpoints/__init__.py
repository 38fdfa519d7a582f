"""Checkpoints of a run, in Orbax's format: written, checked, read back."""
