"""Paths: what a recipe names lies below its own folder, and outputs below the run's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from compiler.facts import Facts
from spec.diagnostics import Diagnostic

ARTIFACT_FILES = (
    "README.md",
    "recipe.yaml",
    "recipe.lock.json",
    "train.py",
    "merge.py",
    "requirements-train.txt",
    "requirements-eval.txt",
    "serve",
    "launch",
)
"""What an artifact's folder holds already."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    recipe = facts.recipe
    inputs = [(f"data.train[{i}].path", source.path) for i, source in enumerate(recipe.data.train)]
    inputs += [(f"data.eval[{i}].path", source.path) for i, source in enumerate(recipe.data.eval)]
    template = recipe.data.chat_template
    if template is not None and not is_inline(template):
        inputs.append(("data.chat_template", template))
    if recipe.data.transform is not None:
        inputs.append(("data.transform", recipe.data.transform.partition(":")[0]))
    if recipe.evaluate.prompts is not None:
        inputs.append(("evaluate.prompts", recipe.evaluate.prompts))
    for where, path in inputs:
        if escapes(path):
            yield Diagnostic(
                "E0704",
                f"`{path}` leaves the recipe's folder: the artifact would not run where it is copied to",
                where,
                "put the file below the recipe's folder, or name a gs:// address",
            )
    yield from _outputs(facts)


def is_inline(template: str) -> bool:
    """Whether `data.chat_template` is the template itself rather than a file's path."""
    return "{%" in template or "{{" in template or "\n" in template


def escapes(path: str) -> bool:
    """Whether a path of a recipe leads out of the recipe's folder."""
    if "://" in path:
        return False
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if parts and (parts[0] == "/" or parts[0].startswith("~") or re.fullmatch("[A-Za-z]:", parts[0])):
        return True
    depth = 0
    for part in parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def _outputs(facts: Facts) -> Iterator[Diagnostic]:
    recipe = facts.recipe
    outputs = [("checkpoint.directory", recipe.checkpoint.directory), ("merge.output", recipe.merge.output)]
    if recipe.cache.directory is not None:
        outputs.append(("cache.directory", recipe.cache.directory))
    for where, path in outputs:
        if path.startswith("gs://") or (where == "merge.output" and "://" in path):
            continue
        if escapes(path) or "://" in path:
            yield Diagnostic(
                "E0705",
                f"`{path}` does not lie below the run's output folder",
                where,
                "write a relative folder or a gs:// address; train.py and merge.py take the folder it is "
                "relative to with --output",
            )
        elif (first := (PurePosixPath(path).parts or (".",))[0]) in (*ARTIFACT_FILES, "."):
            yield Diagnostic(
                "E0706",
                f"`{path}` would write over the artifact's own {'folder' if first == '.' else first}",
                where,
                "choose a folder of another name",
            )
    directory, output = (_plain(path) for _, path in outputs[:2])
    if directory == output or directory in output.parents or output in directory.parents:
        yield Diagnostic(
            "E0505",
            f"checkpoint.directory `{recipe.checkpoint.directory}` and merge.output "
            f"`{recipe.merge.output}` lie in one another: a merge would mix its files with the checkpoints",
            "merge.output",
            "choose two folders side by side, for example checkpoints and merged",
        )


def _plain(path: str) -> PurePosixPath:
    return PurePosixPath(path.replace("gs://", "/gs/"))
