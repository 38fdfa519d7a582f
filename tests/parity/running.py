"""A tiny recipe, its artifact for all backends, and its scripts, run one after the other in this process."""

from __future__ import annotations

import functools
import json
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import catalog
from recipec.compiler.artifacts.artifact import write
from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering.backend import Backend, others
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.small_checkpoint import shrink, write_checkpoint
from recipec.compiler.miniature.small_recipe import conversations, pictured_row, row_of
from recipec.compiler.parity.backend_runs import SCRIPTS
from recipec.compiler.parity.compare import read_trace
from recipec.runtime.settings import DataSettings, ModelSettings, TrainSettings
from recipec.runtime.training.trace import Trace
from recipec.spec.diagnostics import render_text
from tests.emit.emitting import compiled

STEPS = 20
BACKENDS = (Backend.TUNIX, Backend.TRL, Backend.TORCHAX)


@dataclass
class Case:
    """A recipe of one kind.

    Attributes:
        like: the catalog's model whose family and head ratios the tiny model has.
        layers: the tiny model's layers.
        recipe: the sections that matter.
        sizes: values of its text config in place of the miniature's.
    """

    like: str
    layers: Sequence[str]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


class Place:
    """A folder with a model, data, a recipe and its artifact for some backends."""

    def __init__(self, folder: Path, case: Case, backends: Sequence[Backend] = BACKENDS) -> None:
        self.folder = folder
        texts = [message["content"] for row in conversations(8) for message in row]
        write_checkpoint(folder / "model", _config(case), texts, dtype="float32", shards=2)
        recipe = {
            "recipe": 1,
            "name": "tiny",
            "model": {"id": "./model", "dtype": "float32"},
            "checkpoint": {"directory": "checkpoints", "every_steps": STEPS},
            "merge": {"dtype": "float32"},
            **case.recipe,
        }
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        form, seeing = recipe["data"].get("format", "chat"), "images" in recipe["data"]
        rows = [
            pictured_row(row, form, number) if seeing else row_of(row, form)
            for number, row in enumerate(conversations(48))
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.program = _program(folder / "recipe.yaml", backends)
        write(folder / "generated", {"tiny": emit(self.program, others(backends))})

    @property
    def artifact(self) -> Path:
        return self.folder / "generated" / "tiny"

    def train(self, backend: Backend, output: str, *options: str | Path) -> Trace:
        """Run a backend's script into a folder below this one, and return its trace."""
        trace = self.folder / f"{output}-{len(list(self.folder.glob('*.npz')))}.npz"
        data = ("--data-dir", self.folder, "--trace", trace)
        self.run(SCRIPTS[backend], output, *data, *options)
        return read_trace(trace)

    def logged(self, output: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl of a run of TRL."""
        path = self.folder / output / "checkpoints-trl" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def prepared(self, data: DataSettings, train: TrainSettings) -> Any:
        """Return the data as train.py prepares it on four devices."""
        from recipec.runtime.data.prepare import Tokenizing, prepare
        from recipec.runtime.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.folder / "model", ModelSettings(id="tiny", family="llama"), data)
        return prepare(data, train, 4, tokenizer, self.folder, tokenizing=Tokenizing(workers=1))

    def merge(self, output: str, *options: str | Path) -> Path:
        """Run merge.py, and return the folder of the merged checkpoint."""
        self.run("merge.py", output, *options)
        return self.folder / output / "merged"

    def run(self, script: str, output: str, *options: str | Path) -> None:
        """Run a script of the artifact as `python SCRIPT OPTIONS` would, on this checkout's `runtime`.

        XLA compiles it without most of its optimizations: the same computation, but compiled faster.
        """
        import jax
        import torch

        torch.set_num_threads(1)  # on models this small, more threads mostly wait for each other
        path = self.artifact / script
        arguments = ["--model", self.folder / "model", "--output", self.folder / output, *options]
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
            patch.setattr(sys, "path", list(sys.path))
            patch.setattr(sys, "unraisablehook", sys.unraisablehook)
            precision = jax.config.jax_default_matmul_precision
            jax.config.update("jax_disable_most_optimizations", True)
            try:
                with pytest.raises(SystemExit) as ended:
                    runpy.run_path(str(path), run_name="__main__")
            finally:
                jax.config.update("jax_default_matmul_precision", precision)
                jax.config.update("jax_disable_most_optimizations", False)
        assert ended.value.code == 0, f"{script} ended with {ended.value.code}"


def merged_tensors(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors by name, which are read on use."""
    from recipec.runtime.weights.checkpoint import HFCheckpoint

    base = HFCheckpoint.open(folder)
    return {name: functools.partial(base.read, name) for name in base.tensors}


def _config(case: Case) -> dict[str, Any]:
    entry = catalog.entries()[case.like]
    small = shrink(entry["config"], {"fsdp": 2}, multimodal=entry.get("vision", {}))
    text = small.get("text_config", small)
    text |= {"num_hidden_layers": len(case.layers), "layer_types": list(case.layers), **case.sizes}
    return small


def _program(path: Path, backends: Sequence[Backend]) -> Program:
    program = compiled(path)
    refused = [found for found in diagnosed(program, backends) if found.severity == "error"]
    assert not refused, render_text(refused)
    return program
