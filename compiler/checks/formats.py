"""Check that sources, formats, columns and the transform give the samples that the objective learns from."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.format_keys import ALONE, FIELDS, LOSS_ON, WITH_PICTURES, may_carry
from recipec.compiler.lowering.references import (
    COMPRESSIBLE,
    ENDINGS,
    escapes,
    is_dataset,
    leads_out,
    names_nothing,
)
from recipec.compiler.wording import listing
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.spec import words
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import Part, join
from recipec.spec.language import Data, Source

LARGEST_TRANSFORM = 2**20

LEARNED_FROM = {
    "": "samples to write",
    "preference": "pairs of answers",
    "unpaired_preference": "answers that are desirable or not",
    "prompt": "prompts",
}
"""What the objectives of a format learn from."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _objective(facts)
    rows = list(rows_of(facts))
    yield from dict.fromkeys(diagnostic for row in rows for diagnostic in _rows(row))
    yield from _sources(facts)
    for place, transform in facts.recipe.data.transforms.items():
        yield from _transform(facts, place, transform)


@dataclass(frozen=True)
class Rows:
    """A source of a recipe.

    Attributes:
        place: its path in the recipe.
        data: the data section with the source's own values applied.
        section: the data section as the recipe has it.
    """

    place: tuple[Part, ...]
    source: Source
    data: Data
    section: Data

    def at(self, name: str) -> tuple[Part, ...]:
        """Return the path of the key, of the source or of the section, that decides this value for the
        source."""
        if getattr(self.source, name) is not None:
            return (*self.place, name)
        return (*self.place, "format") if self.source.format is not None else ("data", name)


def rows_of(facts: Facts) -> Iterator[Rows]:
    """Yield the sources of a recipe, each with the values that apply to it."""
    data = facts.recipe.data
    for part, sources in (("train", data.train), ("eval", data.eval)):
        for index, source in enumerate(sources):
            yield Rows(("data", part, index), source, data.of(source), data)


E0450 = Code(
    "E0450",
    "preferences mixed with other samples",
    cause="Some sources contain preferences and others do not, or preferences of another format. An "
    "objective trains on one kind.",
    cure="Train on the two kinds one after the other, with two recipes.",
)


def _rows(rows: Rows) -> Iterator[Diagnostic]:
    source_format, whole = rows.data.format, rows.section.format
    if source_format != whole and {source_format, whole} & {*ALONE}:
        yield Diagnostic(
            E0450,
            f"the samples of this source are {source_format}, and data.format is {whole}: "
            f"{_kind(source_format, whole)} cannot be mixed with other samples",
            join((*rows.place, "format")),
            "remove the line, or train on the two kinds one after the other, in two recipes",
        )
        return
    yield from _loss_on(rows)
    yield from _fields(rows)
    yield from _overlong(rows)


def _kind(*formats: str) -> str:
    return "prompts" if "prompt" in formats else "preferences"


E0464 = Code(
    "E0464",
    "only text can be split",
    cause="The second part of a long conversation or of a long completion has no question before it, "
    "so the model would learn answers to nothing.",
    cure="Write `overlong: drop` or `truncate`. A source of the format text can have `overlong: "
    "split` of its own.",
)


def _overlong(rows: Rows) -> Iterator[Diagnostic]:
    """Refuse to split samples whose parts are not samples of their own."""
    if rows.data.overlong != "split" or rows.data.format == "text":
        return
    parts = "their question" if rows.data.format in ("chat", "instruction") else "their prompt"
    of_source = rows.source.overlong is not None
    texts = "text" in rows.section.formats
    yield Diagnostic(
        E0464,
        "only plain text can be split: the later parts of a sample of the format "
        f"{rows.data.format} would be without {parts}",
        join((*rows.place, "overlong") if of_source else ("data", "overlong")),
        "overlong: drop, and overlong: split at the sources of the format text"
        if texts and not of_source
        else "overlong: drop, or truncate",
    )


E0414 = Code(
    "E0414",
    "objective does not fit the format",
    cause="dpo, cpo and orpo train on preferences, kto on unpaired_preference, and grpo on prompt. sft "
    "trains on every other format.",
    cure="Change one of the two.",
)

E0419 = Code(
    "E0419",
    "packed preferences or prompts",
    cause="An answer that is rated, alone or against another, has its own row.",
    cure="Write `packing: false`.",
)


def _objective(facts: Facts) -> Iterator[Diagnostic]:
    data, objective = facts.recipe.data, facts.recipe.train.objective
    wants = OBJECTIVES[objective].format
    if wants != (data.format if data.format in ALONE else ""):
        wanted = wants or "chat"
        learned = {"preference": "dpo", "unpaired_preference": "kto", "prompt": "grpo"}.get(
            data.format, "sft"
        )
        what = LEARNED_FROM[wants]
        place = facts.first_given("train.objective", "data.format")
        ways = (
            [f"objective: {learned}", f"data: {{format: {wanted}}}"]
            if place == "train.objective"
            else [f"format: {wanted}", f"train: {{objective: {learned}}}"]
        )
        yield Diagnostic(
            E0414,
            f"train.objective {objective} learns from {what}, and data.format is {data.format}",
            place,
            listing(ways, "or"),
        )
    if data.format in ALONE and data.packing:
        yield Diagnostic(
            E0419,
            f"{_kind(data.format)} cannot be packed: each answer that is rated has its own row",
            "data.packing",
            "packing: false",
        )


E0415 = Code(
    "E0415",
    "loss_on does not fit the format",
    cause="Only conversations have assistant turns, and only prompts have completions.",
    cure="Leave `loss_on` out. Its default fits the format.",
)


def _loss_on(rows: Rows) -> Iterator[Diagnostic]:
    data = rows.data
    if not may_carry(data.format, data.loss_on):
        yield Diagnostic(
            E0415,
            f"loss_on {flow(data.loss_on)} does not exist in data of the format {data.format}",
            join(rows.at("loss_on")),
            f"loss_on: {listing(LOSS_ON[data.format], 'or')}{_in_same_source(rows, 'loss_on')}",
        )


def _in_same_source(rows: Rows, name: str) -> str:
    """Return where a help's line belongs if the section's value does not suit the source's own format."""
    return ", in the same source" if rows.at(name)[-1] == "format" else ""


E0413 = Code(
    "E0413",
    "field that the format does not have",
    cause="`data.fields` renames the columns of the format. For example, chat has messages, role and "
    "content.",
    cure="Use a column of the format as the key, and the source's name as the value.",
)


def _fields(rows: Rows) -> Iterator[Diagnostic]:
    data, place = rows.data, rows.at("fields")
    known = FIELDS[data.format]
    if data.images is not None and data.format in WITH_PICTURES:
        known = (*known, "images")
    for name in data.fields if data.format != "prompt" else ():  # rewards may read any column
        if name in known:
            continue
        close = words.slip(name, known)
        turned = data.fields[name] if data.fields[name] in known else None
        if turned:
            way = f"{turned}: {name}; the key is the format's name, and the value is the source's name"
        else:
            hint = f"did you mean `{close}`? " if close else ""
            way = (
                f"{hint}the key is the format's name, and the value is the source's, as in {known[0]}: "
                "my_column"
            )
        if _in_same_source(rows, "fields"):
            way = "fields: {} in the same source, if its columns have the format's own names"
        yield Diagnostic(
            E0413,
            f"{data.format} data has no field `{name}`: it has {listing(known)}",
            join((*place, name) if place[-1] == "fields" else place),
            way,
            at_key=place[-1] == "fields",
        )


E0417 = Code(
    "E0417",
    "unknown kind of data file",
    cause="The ending of a source's name decides how it is read, and this one is unknown.",
    cure="Rename the file, or convert it.",
)

E0418 = Code(
    "E0418",
    "split or configuration of a file",
    cause="Only Hugging Face data sets have splits and configurations.",
    cure="Remove the key.",
)


def _sources(facts: Facts) -> Iterator[Diagnostic]:
    data = facts.recipe.data
    for part, sources in (("train", data.train), ("eval", data.eval)):
        for index, source in enumerate(sources):
            where = f"data.{part}[{index}]"
            if names_nothing(source.path):
                continue  # compiler.checks.paths reports this
            if not is_known(source.path, facts.folder):
                yield Diagnostic(
                    E0417,
                    f"the kind of data of `{source.path}` is unknown",
                    f"{where}.path",
                    f"files end in {listing(ENDINGS[:-1], 'or')} ({listing(COMPRESSIBLE)} also with .gz or "
                    ".zst); hf://OWNER/NAME is a data set of the Hugging Face hub; a name without an ending "
                    "is the folder of a data set",
                )
                continue
            folder = is_dataset(source.path)
            if source.split is not None and not folder:
                yield Diagnostic(
                    E0418,
                    f"`{source.path}` is a file: only Hugging Face data sets have a split",
                    f"{where}.split",
                    "remove it, or name the data set as hf://OWNER/NAME or by its folder",
                    at_key=True,
                )
            if source.config is not None and not (folder and source.path.startswith("hf://")):
                yield Diagnostic(
                    E0418,
                    f"`{source.path}` has no configurations: only data sets of the Hugging Face hub have "
                    "them",
                    f"{where}.config",
                    "remove it, or name the data set as hf://OWNER/NAME",
                    at_key=True,
                )


def is_known(path: str, folder: Path) -> bool:
    """Return whether a source's name shows how it is read.

    Args:
        path: the source's path.
        folder: the recipe's folder. An existing folder of a data set may have any name.
    """
    if path.startswith(("http://", "https://")) and is_dataset(path):  # servers list no folders
        return False
    if path.startswith("hf://"):
        return re.fullmatch(r"hf://[^/\s]+(/[^\s]+)?", path) is not None
    if not is_dataset(path):
        return True
    if "://" not in path and not escapes(path) and os.path.isdir(folder / path):
        return True
    return not PurePosixPath(path).suffix


E0416 = Code(
    "E0416",
    "transform cannot be used",
    cause="The file is missing, is not Python, or has no such function at its top level.",
    cure="Correct data.transform. Its form is file.py:function.",
)


def _transform(facts: Facts, place: str, transform: str) -> Iterator[Diagnostic]:
    path, _, name = transform.partition(":")
    module = module_of(facts, path, place, E0416)
    if not isinstance(module, ast.Module):
        yield from () if module is None else (module,)
        return
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    if name not in functions:
        close = words.slip(name, functions)
        hint = f"did you mean `{path}:{close}`? " if close else ""
        has = f"it has {listing(f'`{f}`' for f in functions)}" if functions else "it has none"
        yield Diagnostic(E0416, f"`{path}` has no function `{name}`", place, f"{hint}{has} at its top level")


def module_of(facts: Facts, path: str, place: str, code: Code) -> ast.Module | Diagnostic | None:
    """Parse a Python file next to the recipe, without running it.

    Returns:
        A diagnostic if it cannot be read; None for a path that other checks report.
    """
    if escapes(path) or leads_out(facts.folder, path):
        return None
    try:
        file = facts.folder / path
        if file.exists() and not file.is_file():  # opening a pipe would block
            raise ValueError("it is not a regular file")
        if file.stat().st_size > LARGEST_TRANSFORM:
            raise ValueError(f"it has more than {LARGEST_TRANSFORM:,} bytes")
        return ast.parse(file.read_bytes(), filename=path)
    except OSError:
        return Diagnostic(
            code,
            f"the file `{path}` does not exist next to the recipe",
            place,
            "the path is relative to the recipe's folder",
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return Diagnostic(code, f"`{path}`{line} is not Python: {reason}", place, "correct the file")
