"""Runs of several processes, one on each host.

JAX's distributed service has heartbeats, barriers and a key-value store. What a run makes of them is here:
how a process finds the others, one step after which all stop, and the end of all where one is gone. A run of
one process needs single.py alone.
"""

from .single import SINGLE, SingleProcess, alone

__all__ = ["SINGLE", "SingleProcess", "alone"]
