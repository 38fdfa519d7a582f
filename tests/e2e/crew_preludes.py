"""Code of artifacts of which one process is late, ahead, or on a machine of its own."""

from __future__ import annotations

AHEAD = """
import os
import time

if os.environ.get("JAX_PROCESS_ID") == "1":
    right = time.time
    time.time = lambda: right() + 3600
"""
"""Code of an artifact of which the clock of process 1 is an hour ahead."""

FULL = """
LORA = None
"""

PREFERENCES = """
DATA = dataclasses.replace(
    DATA, train=("pairs.jsonl",), eval=None, format="preference", loss_on="completion", max_length=48
)
TRAIN = dataclasses.replace(TRAIN, objective="dpo")
"""

PACED = """
import time

from runtime import trainer

quick = trainer.Trainer._step


def paced(self, *arguments):
    time.sleep(0.4)
    return quick(self, *arguments)


trainer.Trainer._step = paced
"""
"""Code of an artifact of which most of a run's time are its steps."""

WAITS = """
import os
import time

from runtime import trainer
from runtime.hosts import leader

leader.NOTE_AFTER = 3.0
quick = trainer.Trainer._step


def late(self, *arguments):
    time.sleep(9 if self._train_steps == 2 and os.environ.get("JAX_PROCESS_ID") == "1" else 0)
    return quick(self, *arguments)


trainer.Trainer._step = late
"""
"""Code of an artifact of which process 1 takes longer for a micro-batch than a process may be silent."""

WITHIN = """
import ctypes
import os

if "NAMESPACE" in os.environ:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(os.open("/run/netns/" + os.environ["NAMESPACE"], os.O_RDONLY), 0) == 0
    # What gloo gives out as a machine's address is that of its name, which both have.
    from jax._src.lib import _jax

    make = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = lambda **given: make(**given, hostname=os.environ["OWN_ADDRESS"])
"""
"""Code of an artifact whose processes are machines of a network of their own."""
