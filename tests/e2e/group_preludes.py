"""Code that the tests prepend to the scripts of runs of several processes."""

from __future__ import annotations

AHEAD = """
import os
import time

if os.environ.get("JAX_PROCESS_ID") == "1":
    right = time.time
    time.time = lambda: right() + 3600
"""
"""Code of an artifact in which process 1's clock is an hour ahead."""

FULL = """
LORA = None
"""

PREFERENCES = """
DATA = dataclasses.replace(
    DATA, train=("pairs.jsonl",), eval=(), format="preference", loss_on="completion", max_length=48
)
TRAIN = dataclasses.replace(TRAIN, objective="dpo")
"""

PACED = """
import time

from runtime.training import trainer

quick = trainer.Trainer._step


def paced(self, *arguments):
    time.sleep(0.4)
    return quick(self, *arguments)


trainer.Trainer._step = paced
"""
"""Code of an artifact whose run spends most of its time on steps."""
