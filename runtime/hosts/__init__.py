"""Runs of several processes, one on each host: how they find each other, and what happens when one is gone.

JAX's distributed runtime moves the numbers. What it does not do is done here: a process that cannot be
reached, is late, hangs or dies is named to all others within a stated time, and all stop after the same step.
"""

from .crew import ALONE, Alone, Crew
from .joining import join

__all__ = ["ALONE", "Alone", "Crew", "join"]
