"""Examine the data of a new recipe: its format, by the columns of its first rows, and the rows' length."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.first_rows import first_rows
from recipec.compiler.lowering.format_keys import FIELDS, WITH_PICTURES
from recipec.compiler.lowering.run_length import CHARACTERS_PER_TOKEN
from recipec.compiler.wording import listing
from recipec.runtime.data.advice import LIKED, asking
from recipec.runtime.data.columns import NAMES, READS, VAGUE, is_text, together
from recipec.runtime.data.formats import PARSERS, is_labeled
from recipec.runtime.data.picture_rows import NOWHERE, in_column, taken
from recipec.runtime.data.pictures import picture_of
from recipec.runtime.data.row_values import Malformed

PLACEHOLDER = "data/train.jsonl"
"""The path that a recipe names if no data was given, relative to the recipe."""

LEARNED = ("completion", "response", "output")
"""Columns that are the answer to learn. Among others, such as answer and solution, the longest text is."""

TRIED = 20
"""The number of first rows that are tried as each format."""

PICTURE_TOKENS = 1024
"""The tokens that are assumed of a picture: of a megapixel in Qwen VL. Most models have fewer."""

METADATA = ("metadata.jsonl", "metadata.csv")
"""The files that list the pictures of a folder."""

LINKED = "data"
"""The folder, next to a recipe, with links to data that lies elsewhere."""


@dataclass(frozen=True)
class NewData:
    """Where the samples are, and what is known about them.

    Attributes:
        path: as the recipe names it.
        format: value of `data.format`; None if the rows cannot be read, or match no format.
        seen: whether the format was found from the rows themselves.
        turns: whether a row's prompt is a list of messages.
        fields: the format's names for columns to the file's, where they differ.
        longest: estimated tokens of the longest row that was read; None if none was read.
        rows: number of rows that were read: all rows, if the file has fewer than LOOKED_AT.
        columns: columns of the first row, if they match no format, or not the one that the user chose.
        reason: why the rows are not of the format that their columns suggest, if they are of none.
        sample: the rows that were read.
        pictures: the most pictures of a row that was read.
        others: further sources; `longest`, `rows` and `pictures` are of all.
    """

    path: str
    format: str | None
    seen: bool = False
    turns: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    longest: int | None = None
    rows: int | None = None
    columns: tuple[str, ...] = ()
    reason: str = ""
    sample: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    pictures: int = 0
    others: tuple[NewData, ...] = ()

    @property
    def parts(self) -> tuple[NewData, ...]:
        """All sources."""
        return (self, *self.others)

    def refused(self) -> ArtifactError:
        """Return the error for columns that match no format."""
        why = f"; {self.reason}" if self.reason else ""
        unsuited = f"not those of {self.format}" if self.format else "by which no format is recognized"
        format = self.format or "prompt_completion"
        needed = ("prompt", *READS[format][0]) if format == "preference" else READS[format][0]
        roles = ", ".join(f"{name}: COLUMN" for name in needed)
        message = f"{self.path} has the columns {listing(self.columns)}, {unsuited}{why}"
        if self.unasked:
            return ArtifactError(
                message, f"leave out --data, and write in the recipe: {asking(self.columns)}"
            )
        return ArtifactError(
            message,
            "leave out --data, and name the file and its columns in the recipe: "
            f"data: {{train: [FILE], format: {format}, fields: {{{roles}}}}}; or make other rows with "
            "data.transform",
        )

    @property
    def unasked(self) -> bool:
        """Whether the rows have pictures, and no question about them, so that no column could be named."""
        return self.reason.endswith(NOWHERE)

    def told(self, format: str, column: Callable[[str], str]) -> NewData:
        """Return the source with a format that the user chose.

        Args:
            column: asks which column of the file holds a given column of the format.
        """
        needed = READS[format][0] if self.columns else ()
        if needed and format == "preference" and not {"prompt", *NAMES["prompt"]}.isdisjoint(self.columns):
            needed = ("prompt", *needed)
        asked = {name: column(name) for name in needed}
        return replace(
            self, format=format, fields={name: field for name, field in asked.items() if field != name}
        )

    def columns_read(self) -> str:
        """Return a sentence on the columns of the rows that were read: their roles, and those not used."""
        if not self.sample or self.format is None:
            return ""
        parse, unread = PARSERS[self.format], []
        for row in self.sample:
            with suppress(Malformed):
                unread.append(parse("", row, self.fields).unread)
        if not unread:
            return ""
        rest = together(*unread)
        left = list(dict.fromkeys((*rest.parts, *rest.texts, *rest.values)))
        names = dict.fromkeys(str(column) for row in self.sample for column in row)
        roles = {column: role for role, column in self.fields.items()}
        roles |= dict(taken.split(" as ") for taken in rest.taken)
        read = [
            f"{name} as {roles[name]}" if roles.get(name, name) != name else name
            for name in names
            if name in roles or (name in (*FIELDS[self.format], "conversations") and name not in left)
        ]
        unused = f"; {listing(left)} {'is' if len(left) == 1 else 'are'} not used" if left else ""
        return f"reads {listing(read)}{unused}"


def look(file: Path, format: str | None) -> NewData:
    """Examine a local file.

    Args:
        format: the format that the user chose; None to recognize it.

    Raises:
        ArtifactError: when the file cannot be read, or has no rows.
    """
    listed = next((place for name in METADATA if (place := file / name).is_file()), file)
    try:
        written = first_rows(listed)
    except (OSError, EOFError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArtifactError(
            f"{file} cannot be read: {reason}", "check its content, or name another file"
        ) from None
    if written is None:
        return NewData(str(file), format)
    if not written:
        raise ArtifactError(f"{file} has no rows", "put samples into it, or name another file")
    metadata = listed is not file
    rows, pictures = without_pictures(written, os.path.abspath(listed.parent), metadata)
    longest = max(map(_tokens, rows)) + pictures * PICTURE_TOKENS or None
    if format == "prompt_completion" and any(map(_is_labeled, rows)):
        raise ArtifactError(f"{file} has prompts, completions and a label: for objective: kto", LIKED)
    if pictures:
        format_of_rows, reason = with_questions(rows, written, format, metadata)
    else:
        format_of_rows, reason = recognize(rows, format)
    new = NewData(str(file), format, longest=longest, rows=len(rows), sample=rows, pictures=pictures)
    if format_of_rows is None:
        return replace(new, columns=tuple(map(str, written[0])), reason=reason)
    turns = isinstance(rows[0].get(format_of_rows[1].get("prompt", "prompt")), list)
    return replace(new, format=format_of_rows[0], seen=format is None, turns=turns, fields=format_of_rows[1])


def without_pictures(
    rows: Sequence[Mapping[str, Any]], folder: str, metadata: bool = False
) -> tuple[list[Mapping[str, Any]], int]:
    """Return rows with marks instead of their pictures, or without their column, and the most pictures of a
    row.

    Columns such as `image` may hold anything. Only bytes, files that exist and data: addresses are pictures.

    Args:
        folder: which relative paths start from.
        metadata: whether the rows are of the metadata file of a folder of pictures.
    """
    texts, most = list[Mapping[str, Any]](), 0
    for row in rows:
        texts.append(row)
        with suppress(Malformed):
            name, values = in_column(row, {}, metadata)
            if not all(_is_picture(value, folder) for value in values):
                continue
            try:
                texts[-1], pictures = taken(row, {}, metadata)
            except Malformed as error:
                if not str(error).endswith(NOWHERE):
                    continue
                texts[-1], pictures = {key: row[key] for key in row if key != name}, values
            most = max(most, len(pictures))
    return texts, most


def with_questions(
    texts: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    format: str | None,
    metadata: bool,
) -> tuple[Found | None, str]:
    """Return what `recognize` does, for rows with pictures: a format in which a user asks about them.

    Args:
        texts: from `without_pictures`, of `rows`.
    """
    reason = ""
    for text, row in zip(texts[:TRIED], rows, strict=False):
        for name in WITH_PICTURES if format is None else (format,):
            match, why = recognize([text], name)
            if match is None:
                reason = reason or why
                continue
            try:
                taken(row, match[1], metadata)
            except Malformed as error:
                reason = str(error)
                continue
            return match, ""
    return None, reason or f"pictures, and {NOWHERE}"


def _is_picture(value: Any, folder: str) -> bool:
    picture = picture_of(value, "it", folder)
    return picture.content is not None or os.path.isfile(picture.place)


def combined(sources: Sequence[NewData]) -> NewData:
    """Return several sources as one: the first, with the others, and with the rows and the longest row of
    all."""
    first, *others = sources
    lengths = [source.longest for source in sources if source.longest is not None]
    rows = [source.rows for source in sources if source.rows is not None]
    return replace(
        first,
        longest=max(lengths) if len(lengths) == len(sources) else None,
        rows=sum(rows) if len(rows) == len(sources) else None,
        pictures=max(source.pictures for source in sources),
        others=tuple(others),
    )


Found = tuple[str, dict[str, str]]
"""A format, and its `data.fields`."""


def recognize(rows: Sequence[Mapping[str, Any]], format: str | None = None) -> tuple[Found | None, str]:
    """Return the format of rows and the columns to rename, or None and a reason.

    Args:
        format: the only format to consider.
    """
    reason = ""
    for row in rows[:TRIED]:
        for name, fields in _proposed(row, rows):
            if format not in (None, name):
                continue
            try:
                parsed = PARSERS[name]("", row, fields)
            except Malformed as error:
                reason = reason or f"as {name}: {error}"
                continue
            return (name, _with_taken(fields, parsed.unread.taken, row)), ""
    return None, reason


def _proposed(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    """Yield the formats that a row's columns suggest, the most specific first."""
    columns = {str(name).lower(): str(name) for name in reversed(list(row)) if row[name] is not None}

    def of(role: str) -> str | None:
        names = (name for name in (role, *NAMES[role]) if name in columns)
        vague = VAGUE if role == "prompt" else ()
        return next((columns[n] for n in names if n not in vague or is_text(str(row[columns[n]]))), None)

    def renamed(**roles: str | None) -> dict[str, str]:
        return {role: column for role, column in roles.items() if column is not None and column != role}

    chosen, rejected, prompt = of("chosen"), of("rejected"), of("prompt")
    if chosen and rejected:
        if isinstance(row[chosen], list) and prompt and not isinstance(row[prompt], list):
            prompt = None  # the conversations contain it
        yield "preference", renamed(prompt=prompt, chosen=chosen, rejected=rejected)
        return
    completion = _learned(columns, rows)
    label = of("label")
    if prompt and completion and label:
        yield "unpaired_preference", renamed(prompt=prompt, completion=completion, label=label)
    if messages := of("messages"):
        # ShareGPT's column name is read without renaming.
        yield "chat", {} if messages == "conversations" else renamed(messages=messages)
    if "instruction" in columns and completion:
        yield "instruction", renamed(instruction=columns["instruction"], output=completion)
    if prompt and completion and prompt != completion:
        yield "prompt_completion", renamed(prompt=prompt, completion=completion)
        yield "instruction", renamed(instruction=prompt, output=completion)
    if text := of("text"):
        yield "text", renamed(text=text)


def _learned(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the column of the text to learn."""
    named = [columns[name] for name in LEARNED if name in columns]
    others = [columns[name] for name in NAMES["completion"] if name in columns and name not in LEARNED]

    def size(column: str) -> int:
        return sum(len(value) for row in rows if isinstance(value := row.get(column), str))

    return named[0] if named else max(others, key=size, default=None)


def _with_taken(fields: dict[str, str], taken: Sequence[str], row: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns to rename, with those that a format also reads under another name."""
    read = {role: column for column, role in (name.split(" as ") for name in taken)}
    return fields | {role: column for role, column in read.items() if role not in row}


def _is_labeled(row: Mapping[str, Any]) -> bool:
    return is_labeled(row) and all(row.get(name) is not None for name in READS["prompt_completion"][0])


def _has_parts(row: Mapping[str, Any]) -> bool:
    """Return whether a prompt and its completion stand next to a context, reasoning or the like."""
    try:
        return bool(PARSERS["prompt_completion"]("", row, {}).unread.parts)
    except Malformed:
        return False


def as_turns(source: NewData) -> NewData:
    """Adapt the source to a model tuned for chat. If its columns are questions and answers under other names
    than prompt and completion, or stand next to a context or reasoning, they become turns."""
    if not source.seen or source.format != "prompt_completion" or source.turns:
        return source
    if not source.fields and not any(map(_has_parts, source.sample)):
        return source
    names = {"instruction": source.fields.get("prompt", "prompt")}
    names["output"] = source.fields.get("completion", "completion")
    fields = {name: column for name, column in names.items() if name != column}
    for row in source.sample:
        with suppress(Malformed):
            taken = PARSERS["instruction"]("", row, fields).unread.taken
            fields = _with_taken(fields, taken, row) | fields
    return replace(source, format="instruction", fields=fields)


def placed(source: NewData, folder: Path) -> tuple[NewData, dict[Path, Path]]:
    """Return the source as a recipe in `folder` names it, and the links that this needs.

    A recipe's data is below its folder. Data elsewhere gets a link in the folder's data/.

    Raises:
        ArtifactError: when something else is where a link would be.
    """
    parts: list[NewData] = []
    links: dict[Path, Path] = {}
    for part in source.parts:
        if "://" in part.path or not Path(part.path).exists():  # still to be created next to the recipe
            parts.append(part)
            continue
        file = Path(os.path.abspath(part.path))
        if not is_within(file, folder):
            link = folder / LINKED / file.name
            if not link.exists() or not link.samefile(file):
                links[link] = _free(link, file, links)
            file = Path(os.path.abspath(link))
        relative = os.path.relpath(file, os.path.abspath(folder))
        parts.append(replace(part, path=Path(relative).as_posix()))
    return replace(source, path=parts[0].path, others=tuple(parts[1:])), links


def _free(link: Path, file: Path, links: Mapping[Path, Path]) -> Path:
    """Return the target of a link: relative for a file of the project, which moves with it.

    Raises:
        ArtifactError: the link's place is taken.
    """
    if link in links or link.is_symlink() or link.exists():
        raise ArtifactError(
            f"{file} is outside of {link.parent.parent}, and a link to it needs {link}, which exists",
            "rename one of the files, or choose another folder with -o",
        )
    inside = is_within(file, Path())
    return Path(os.path.relpath(file, os.path.abspath(link.parent))) if inside else file


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is below a folder, by their names."""
    return not os.path.relpath(os.path.abspath(path), os.path.abspath(folder)).startswith("..")


def _tokens(row: Mapping[str, Any]) -> int:
    return len(json.dumps(row, ensure_ascii=False, default=str)) // CHARACTERS_PER_TOKEN
