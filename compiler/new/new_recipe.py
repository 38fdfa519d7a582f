"""Make a new recipe: try configurations and servers against the checks that every recipe has to pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipec.compiler import catalog
from recipec.compiler.arrangements import concerns_mesh
from recipec.compiler.checks.server import E0915
from recipec.compiler.checks.server_cache import BLOCK, N0607, N0635
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import Length, run_length
from recipec.compiler.new.data_source import NewData
from recipec.compiler.new.draft import FEWEST, JUDGED, RANK, SHORTEST, Draft, Probe, RunShape, drafts, paced
from recipec.compiler.new.machines import refusal
from recipec.compiler.new.new_recipe_text import Contents, write
from recipec.compiler.wording import divisors
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.language import VERSION
from recipec.spec.load import load
from recipec.spec.recipe_text import to_yaml


@dataclass(frozen=True)
class NewRecipeOptions:
    """The requirements for a new recipe.

    Attributes:
        model: as the recipe names it.
        method: lora, qlora, dpo, kto or full; None for the first of LoRA and QLoRA that fits.
        source: its data, with its path as the recipe names it.
        serve: the machine that serves, None for none.
        file: where it will be written.
    """

    name: str
    model: str
    accelerator: Accelerator
    method: str | None
    source: NewData
    serve: Accelerator | None
    file: Path


@dataclass(frozen=True)
class Made:
    """A recipe that passes the checks, and their warnings and notes."""

    text: str
    draft: Draft
    diagnostics: list[Diagnostic]


def refusal_of_name(name: str) -> str | None:
    """Return the message with which the language rejects a name; None if it accepts the name."""
    values = {"recipe": VERSION, "name": name, "model": {"id": "model"}, "mesh": {}, "data": {"train": ["x"]}}
    diagnostics = load(Path("new.yaml"), text=to_yaml(values)).diagnostics
    return next((problem.message for problem in diagnostics if problem.path == "name"), None)


def spelled(model: str, folder: Path) -> str:
    """Return a model as a recipe in `folder` names it: for a directory, its path relative to that folder.

    Args:
        model: as given: a directory relative to the working folder, or an id.
    """
    known = model in catalog.entries() or "://" in model
    if not catalog.is_directory(model) and (known or not os.path.isdir(model)):
        return model
    if model.startswith(("/", "~")):
        return model
    relative = Path(os.path.relpath(model, folder)).as_posix()
    return relative if relative.startswith("..") else f"./{relative}"


def usual_format(model: str, method: str | None, file: Path) -> str:
    """Return the usual format of the data for a recipe whose data does not exist yet."""
    for judged, name in JUDGED.items():
        if method == name:
            return judged
    base = catalog.known(model, file.parent)
    return "text" if base is not None and base.chat is False else "chat"


def make(asked: NewRecipeOptions) -> Made:
    """Make the best recipe that passes the checks.

    Raises:
        ArtifactError: when there is none; it says why, and on which machines there would be one.
    """
    asked = _settled(asked)
    probe = look(asked.name, asked.model, asked.method, asked.file)
    first: Diagnostic | None = None
    for draft in drafts(probe, asked.accelerator, asked.method, asked.source.longest):
        recipe, problem = _served(asked, draft)
        if recipe is not None:
            return recipe
        first = first or problem
        if problem is not None and not concerns_mesh(problem):
            break
    if first is None or concerns_mesh(first):
        raise refusal(probe, asked.accelerator, asked.method, first)
    raise ArtifactError(first.message, first.help)


def _settled(asked: NewRecipeOptions) -> NewRecipeOptions:
    """Return the options with the method that the data requires.

    Raises:
        ArtifactError: when the data and the given method do not match.
    """
    method = JUDGED.get(str(asked.source.format))
    if method is not None and asked.method is None:
        return replace(asked, method=method)
    if method != (asked.method if asked.method in JUDGED.values() else None):
        raise ArtifactError(
            f"--method {asked.method} cannot be used with data of the format {asked.source.format}",
            "dpo learns from prompt, chosen and rejected, and kto from prompt, completion and label; the "
            "other methods do not",
        )
    return asked


def look(name: str, model: str, method: str | None, file: Path) -> Probe:
    """Load a model as a program on one device.

    Raises:
        ArtifactError: when it is unknown, or this version cannot train it.
    """
    values: dict[str, Any] = {
        "recipe": VERSION,
        "name": name,
        "model": {"id": model},
        "mesh": {"accelerator": "cpu-1", "axes": {"fsdp": 1, "tp": 1}},
        "data": {"train": ["gs://bucket/train.jsonl"], "format": "text", "max_length": SHORTEST},
    }
    if method != "full":
        values["lora"] = {"rank": RANK}
    if method in JUDGED.values():
        values["data"]["format"] = usual_format(model, method, file)
        values["train"] = {"objective": method, "micro_batch_size": FEWEST.get(str(method), 1)}
    lowered = lower(load(file, text=to_yaml(values)))
    program, problem = lowered.program, next((d for d in lowered.diagnostics if d.severity == "error"), None)
    if program is None:
        assert problem is not None
        raise ArtifactError(problem.message, problem.help)
    return Probe(program, catalog.find(model, file.parent).positions())


def _served(asked: NewRecipeOptions, draft: Draft) -> tuple[Made | None, Diagnostic | None]:
    """Return a configuration's recipe with the server that has the fewest findings, or the first error."""
    most = draft.probe.positions
    servers: Sequence[dict[str, Any]] = [{}] if asked.serve is None else list(_servers(asked.serve, most))
    best: Made | None = None
    problem: Diagnostic | None = None
    idle = 0
    for server in servers:
        if server.get("tensor_parallel_size") == idle:
            continue
        recipe, error = _checked(asked, draft, server)
        if recipe is not None and any(d.code == N0635 for d in recipe.diagnostics):
            recipe, error = _checked(asked, draft, {**server, "decode_block_sizes": [1, BLOCK, 1, BLOCK]})
        if error is not None:
            problem = problem or error
            if not _of_server(error):
                return None, error
        elif recipe is not None and any(d.code == N0607 for d in recipe.diagnostics):
            idle = server["tensor_parallel_size"]  # fewer devices per copy leave room for more tokens
        elif recipe is not None and not any(
            _of_server(d) for d in recipe.diagnostics if d.severity == "warning"
        ):
            return recipe, None
        best = best or recipe
    return best, problem


def _checked(
    asked: NewRecipeOptions, draft: Draft, server: dict[str, Any]
) -> tuple[Made | None, Diagnostic | None]:
    contents = Contents(asked.name, asked.model, draft, asked.source, str(asked.file), server)
    text = write(contents)
    lowered = lower(load(asked.file, text=text))
    if lowered.program is not None:
        draft, pace = paced(draft, asked.source.longest, _length(lowered.program))
        draft = replace(draft, policy=draft.choice.policy)  # fewer rows may leave room for a faster one
        text = write(replace(contents, draft=draft, pace=pace))
        lowered = lower(load(asked.file, text=text))
    error = next((d for d in lowered.diagnostics if d.severity == "error"), None)
    return (None, error) if error else (Made(text, draft, lowered.diagnostics), None)


def _length(program: Program) -> Callable[[RunShape], Length]:
    """Return a function that computes the run's length for other epochs and rows."""
    recipe = program.recipe

    def length(choice: RunShape) -> Length:
        train = {"epochs": choice.epochs, "global_batch_size": choice.rows}
        parts = {
            "train": recipe.train.model_copy(update=train),
            "data": recipe.data.model_copy(update={"max_length": choice.length}),
        }
        return run_length(recipe.model_copy(update=parts), program.source.parent)

    return length


def _of_server(diagnostic: Diagnostic) -> bool:
    return diagnostic.code[1:3] == "06" or diagnostic.code == E0915


LENGTHS = (16384, 8192, 4096)
"""Values for `max_model_len`, the longest first."""


def _servers(accelerator: Accelerator, most: int | None) -> Iterator[dict[str, Any]]:
    """Yield `serve` sections for a machine: fewest copies of the model first, then longest requests first.

    Args:
        most: the model's positions; None if not known.
    """
    cache = "fp8" if accelerator.fp8_kv_cache else "auto"
    lengths = sorted({min(length, most or length) for length in LENGTHS}, reverse=True)
    for split in reversed(divisors(accelerator.devices)):
        for length in lengths:
            section: dict[str, Any] = {"accelerator": accelerator.name, "tensor_parallel_size": split}
            if split < accelerator.devices:
                section["data_parallel_size"] = accelerator.devices // split
            yield {**section, "max_model_len": length, "kv_cache_dtype": cache}
