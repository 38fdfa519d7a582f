"""Generate text in this process from a folder of trained weights."""
