"""Runs of several processes, one on each host.

JAX's distributed service has heartbeats, barriers and a key-value store. This package uses them to let a
process find the others, to stop all processes after the same step, and to end all if one disappears. A run of
one process needs only single.py.
"""
