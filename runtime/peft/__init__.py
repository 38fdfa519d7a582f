"""Adapters in PEFT's format: write them, and read one as the start of a run."""
