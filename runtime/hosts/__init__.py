"""Runs of several processes, by JAX's distributed service. A run of one process needs only single.py."""
