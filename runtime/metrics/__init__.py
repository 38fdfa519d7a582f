"""The metrics of a run: where they are written, and other facts that a run records."""
