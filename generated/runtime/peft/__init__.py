"""Adapters in PEFT's format: written, and read as the start of a run."""
