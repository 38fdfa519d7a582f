"""Runs in a tool's own process, by PYTHONPATH: takes down what it trains on, and changes nothing.

Written to the folder $SAME_RUN: steps.jsonl, a line for each micro-batch with its optimizer step, the rate
that its optimizer has, its loss as the tool adds it up, and its arrays; adapter/, what the run starts from,
as PEFT saves it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

OUT = Path(os.environ["SAME_RUN"])
ARRAYS = ("input_ids", "labels", "position_ids", "attention_mask", "completion_mask")


def take(step: int, rate: float, loss: Any, batch: Mapping[str, Any]) -> None:
    """Appends a micro-batch.

    Args:
        step: of the optimizer, from 1.
        batch: arrays by the names of ARRAYS; others are left out.
    """
    arrays = {name: batch[name] for name in ARRAYS if name in batch and hasattr(batch[name], "tolist")}
    line = {"step": step, "rate": rate, "loss": float(loss)}
    with (OUT / "steps.jsonl").open("a") as file:
        file.write(json.dumps(line | {name: array.tolist() for name, array in arrays.items()}) + "\n")


def of_transformers(module: ModuleType) -> None:
    """transformers' Trainer, and those made from it."""
    inner = module.Trainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if not (OUT / "steps.jsonl").exists():
            whole = self.accelerator.unwrap_model(model)
            if hasattr(whole, "peft_config"):
                whole.save_pretrained(str(OUT / "adapter"))
        batch = {name: array.clone() if hasattr(array, "clone") else array for name, array in inputs.items()}
        rate = self.optimizer.param_groups[0]["lr"]
        loss = inner(self, model, inputs, *rest, **more)
        take(self.state.global_step + 1, rate, loss, batch)
        return loss

    module.Trainer.training_step = training_step


HOOKS = {"transformers.trainer": of_transformers}


class _After(importlib.abc.MetaPathFinder):
    """Calls a module's hook when it has been loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                HOOKS[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _After())
