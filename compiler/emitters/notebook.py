"""Emit notebook.ipynb: the artifact's commands, one per cell, for the TPUs that Colab and Kaggle provide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recipec.compiler.artifacts.artifact import NOTEBOOK
from recipec.compiler.emitters.launch import run_tokens
from recipec.compiler.emitters.places import is_hub_id
from recipec.compiler.emitters.settings_text import kind
from recipec.compiler.lowering.references import inputs, outputs
from recipec.compiler.render import render
from recipec.compiler.wording import listing
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

CELL = re.compile(r"^%% ([a-z-]+)( markdown)?\n", re.MULTILINE)
"""Matches the beginning of a cell in the template: its id, and whether it is text."""


@dataclass(frozen=True)
class NotebookHost:
    """A service that runs notebooks.

    Attributes:
        title: its name.
        work: the folder for files that are lost at the end of the session.
        kept: the folder for files that are still there in the next session.
        hours: after this time the training stops with a checkpoint, before the session ends; None for never.
        metadata: metadata of the notebook that select the machine.
    """

    title: str
    work: str
    kept: str
    hours: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


DRIVE = "/content/drive/MyDrive/recipec"
HERE = NotebookHost("this machine", ".", "kept")


def _colab(machine: str) -> NotebookHost:
    metadata = {"accelerator": "TPU", "colab": {"gpuType": machine}}
    return NotebookHost("Colab", "/content", DRIVE, 11, metadata)


PLACES = {
    "v5e-1": _colab("V5E1"),
    "v6e-1": _colab("V6E1"),
    "v5e-8": NotebookHost(
        "Kaggle",
        "/tmp",
        "/kaggle/working",
        8,
        {"kaggle": {"accelerator": "tpuV5e8", "isInternetEnabled": True, "language": "python"}},
    ),
}
"""Places by accelerator. A session ends after 12 hours on Colab, and after 9 with a TPU on Kaggle."""


def place(program: Program) -> NotebookHost | None:
    """Return where the notebook of a recipe runs; None if no notebook service provides its machine."""
    accelerator = program.accelerator
    if accelerator.platform == "cpu":
        return HERE
    return PLACES.get(accelerator.name) if accelerator.slices == 1 else None


E1040 = Code(
    "E1040",
    "machine that no notebook has",
    cause="`recipe build --notebook` writes a notebook for the machine of the recipe. Colab has v5e-1 "
    "and v6e-1, Kaggle has v5e-8, and a recipe for virtual CPU devices runs anywhere.",
    cure="Use another `mesh.accelerator`, or leave --notebook out.",
)

E1041 = Code(
    "E1041",
    "notebook with a bucket",
    cause="A notebook session has no Google Cloud account, so it cannot read or write a bucket. Its "
    "results are kept in Drive, or as Kaggle's output.",
    cure="Use a folder instead of the bucket, or leave --notebook out.",
)

E1042 = Code(
    "E1042",
    "model that a notebook cannot download",
    cause="On Colab and Kaggle the model comes from the Hugging Face hub, but the recipe names a folder.",
    cure="Use the model's id on the hub, or leave --notebook out.",
)


def check(program: Program) -> Iterator[Diagnostic]:
    """Yield what keeps a recipe from being a notebook."""
    recipe, where = program.recipe, place(program)
    if where is None:
        yield Diagnostic(
            E1040,
            f"--notebook: neither Colab nor Kaggle has {program.accelerator.describe()}",
            "mesh.accelerator",
            f"{listing(PLACES, 'or')}; or build without --notebook",
        )
        return
    model = {"model.id": recipe.model.id, "model.tokenizer": recipe.model.tokenizer or ""}
    for path, value in {**inputs(recipe), **outputs(recipe), **model}.items():
        if "://" in value and not value.startswith("hf://"):
            yield Diagnostic(
                E1041,
                f"--notebook: {value} is in a bucket, and a notebook's session has no account for it",
                path,
                "use a folder next to the recipe or the hub, or build without --notebook",
            )
    if where is not HERE and not is_hub_id(recipe.model.id):
        yield Diagnostic(
            E1042,
            f"--notebook: {where.title} downloads the model from the hub, which has no {recipe.model.id}",
            "model.id",
            "use the model's Hugging Face id, or build without --notebook",
        )


def emit_notebook(program: Program) -> dict[str, str]:
    """Return the text of notebook.ipynb by its path; {} if no notebook was requested."""
    where = place(program)
    if not program.notebook or where is None:
        return {}
    recipe = program.recipe
    merged, adapter = recipe.merge.output.rstrip("/"), recipe.merge.adapter and program.lora is not None
    revision = ["--revision", recipe.model.revision] if recipe.model.revision else []
    fetching = ["venv/bin/hf", "download", recipe.model.id, *revision]
    stopped = ["timeout", "--preserve-status", f"{where.hours}h"] if where.hours else []
    kept = f"{where.kept}/{program.name}-run"
    options = ["--model", "model", "--output", kept, "--resume"]
    text = render(
        NOTEBOOK,
        name=program.name,
        kind=kind(program),
        model=recipe.model.id,
        download=[*fetching, "--exclude", "original/*", "--local-dir", "model"],
        machine=program.accelerator.name,
        place=where,
        kept=kept,
        training=[*stopped, "venv/bin/python", f"{program.name}/train.py", *options],
        hub=is_hub_id(recipe.model.id),
        tokens=run_tokens(program),
        checkpoints=recipe.checkpoint.directory.rstrip("/"),
        merged=merged,
        result=f"{merged}-adapter" if adapter else merged,
        adapter=adapter,
        chat=recipe.data.format not in ("text", "prompt_completion"),
    )
    notebook = {
        "cells": [*_cells(text)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            **where.metadata,
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return {NOTEBOOK: json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"}


def _cells(text: str) -> Iterator[dict[str, Any]]:
    """Yield the cells of a filled template."""
    _, *parts = CELL.split(text)
    for name, markdown, source in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        lines = source.strip("\n").splitlines(keepends=True)
        ran: dict[str, Any] = {} if markdown else {"execution_count": None, "outputs": []}
        as_what = "markdown" if markdown else "code"
        yield {"cell_type": as_what, "id": name, "metadata": {}, "source": lines, **ran}
