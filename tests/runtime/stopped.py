"""A run with chosen evaluation losses, so that it stops early."""

LOSSES = {0: 9.0, 2: 3.0, 4: 1.0, 5: 0.1, 6: 2.0, 8: 1.5, 10: 0.5}

STOPPING = f"""
import dataclasses

from runtime.options import EarlyStopping
from runtime.training.evaluating import Evaluating

TRAIN = dataclasses.replace(TRAIN, eval_every=2, early_stopping=EarlyStopping(2))
CHECKPOINT = dataclasses.replace(CHECKPOINT, keep_best=True)
record = Evaluating.record
Evaluating.record = lambda self, step, losses: record(
    self, step, {{"loss": {LOSSES}[step]}}
)
"""
"""Code of an artifact that stops after step 8 of 10; the lowest counted loss is that of step 4."""
