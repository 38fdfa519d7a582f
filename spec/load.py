"""Load a recipe's file into a Recipe: YAML, `extends`, `--set`, schema, secrets; report all errors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.spec import overrides, secrets, versions, yaml_document
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span, has_errors, in_order
from recipec.spec.key_paths import join
from recipec.spec.language.section import E0110
from recipec.spec.origins import Origin, Sources, locate
from recipec.spec.tree import Mapping, Scalar, merge, plain, walk
from recipec.spec.validate import E0102, validate
from recipec.spec.yaml_document import E0009

if TYPE_CHECKING:
    from recipec.spec.language import Recipe
    from recipec.spec.validate import Validation

MAX_BYTES = 256 << 10
"""Size of the largest file that is read. It is well above any recipe; reading that much takes seconds."""

MOST_EXTENDED = 16
"""Most files in a chain of `extends`."""

ENDINGS = (".yaml", ".yml")
"""Endings of files that can be extended. Of other files, diagnostics could show lines that are private."""


@dataclass
class Loaded:
    """The result of loading a recipe's file.

    Attributes:
        path: the file.
        recipe: None if there is any error.
        diagnostics: in the order of their positions.
        sources: where each value comes from.
        raw: the merged recipe as plain values; empty if the file could not be read.
        tentative: if `recipe` is None: the recipe without its faulty values, as far as the rest can be
            checked without them. Never build it.
        doubtful: paths whose values in the tentative recipe are unreliable.
        text: the file's content, if it was given and not read.
    """

    path: Path
    recipe: Recipe | None
    diagnostics: list[Diagnostic]
    sources: Sources
    raw: dict[str, Any] = field(default_factory=dict)
    tentative: Recipe | None = None
    doubtful: frozenset[str] = frozenset()
    text: str | None = None

    def credible(self, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Return those diagnostics about `recipe or tentative` that do not depend on doubtful values."""
        if self.recipe is not None:
            return list(diagnostics)
        return [
            d
            for d in diagnostics
            if d.severity == "error" and not any(_related(d.path, p) for p in self.doubtful)
        ]


def _related(a: str, b: str) -> bool:
    """Return whether one path equals the other, or is inside it."""
    if len(a) > len(b):
        a, b = b, a
    return a == "" or a == b or (b.startswith(a) and b[len(a)] in ".[")


def load(
    path: Path, sets: Sequence[str] = (), text: str | None = None, unsaved: dict[str, str] | None = None
) -> Loaded:
    """Read a recipe and everything it extends, and apply the `--set` arguments.

    Args:
        text: the file's content if it is not saved yet; None to read the file.
        unsaved: contents to use instead of the files that it extends, by absolute path.
    """
    path = Path(path)
    root, diagnostics = _read_chain(path, (), text, unsaved or {})
    if root is None:
        concealer = secrets.Concealer(None)
        return Loaded(path, None, in_order(_concealed(diagnostics, concealer)), Sources(None, concealer))
    diagnostics += overrides.apply(root, sets)
    concealer = secrets.Concealer(root)
    sources = Sources(root, concealer)
    raw = plain(root)
    diagnostics += versions.newer(root)
    if any(d.path == versions.KEY for d in diagnostics):  # the meaning of other keys is unknown here
        return Loaded(path, None, in_order(_concealed(diagnostics, concealer)), sources, raw)
    incomplete = _incomplete(diagnostics)
    verdict = _validated(raw, root, sources, diagnostics)
    diagnostics += [*verdict.diagnostics, *secrets.find(root)]
    recipe = None if has_errors(diagnostics) else verdict.recipe
    tentative = None if recipe or incomplete else verdict.recipe or verdict.tentative
    diagnostics = in_order(_concealed(diagnostics, concealer))
    return Loaded(path, recipe, diagnostics, sources, raw, tentative, verdict.doubtful, text)


def _incomplete(diagnostics: Iterable[Diagnostic]) -> bool:
    """Return whether reading left out a part of the tree; of a duplicate key, the first one counts."""
    return any(d.code != E0009 for d in diagnostics)


def _validated(raw: dict[str, Any], root: Mapping, sources: Sources, earlier: list[Diagnostic]) -> Validation:
    """Validate against the schema, and add positions.

    Args:
        earlier: earlier diagnostics. No value is reported twice, and missing keys of an incomplete tree are
            not reported.
    """
    verdict = validate(raw)
    incomplete = _incomplete(earlier)
    reported = {d.path for d in earlier if d.path}
    reported |= {join(where) for where, _, node in walk(root) if isinstance(node, Scalar) and node.unread}
    kept = [
        replace(d, span=sources.span(d.path, d.at_key))
        for d in verdict.diagnostics
        if d.path not in reported and not (incomplete and d.code in (E0102, E0110))
    ]
    return replace(verdict, diagnostics=kept)


def _concealed(diagnostics: list[Diagnostic], concealer: secrets.Concealer) -> list[Diagnostic]:
    return [
        replace(
            d,
            message=concealer(d.message),
            help=concealer(d.help) if d.help else d.help,
            span=replace(d.span, text=concealer(d.span.text)) if d.span else None,
        )
        for d in diagnostics
    ]


def display(path: Path) -> str:
    """Return the file's name for display: relative to the working folder if it is below it."""
    try:
        absolute = Path(os.path.abspath(path))
        return absolute.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return absolute.as_posix()
    except OSError:  # the working folder no longer exists
        return Path(path).as_posix()


E0013 = Code(
    "E0013",
    "not a mapping",
    cause="The top level of the file is a list or a single value instead of `key: value` lines.",
    cure="Start from `recipe new`, or from one of the files in recipes/.",
)


def _read_chain(
    path: Path, chain: tuple[Path, ...], text: str | None, unsaved: dict[str, str]
) -> tuple[Mapping | None, list[Diagnostic]]:
    """Return the tree of a file, merged with the files it extends.

    Args:
        chain: the files that led here, the recipe first.
        text: the file's content; None to read it.
        unsaved: as in `load`.
    """
    if text is None and unsaved:
        text = unsaved.get(os.path.abspath(path))
    if text is None:
        text, problem = read_text(path)
        if problem is not None:
            return None, [problem]
    document = yaml_document.read(text, display(path), "extends" if chain else "file")
    diagnostics = document.diagnostics
    if document.root is None:
        return None, diagnostics
    if not isinstance(document.root, Mapping):
        span = document.root.place.span
        diagnostics.append(
            Diagnostic(
                E0013, "a recipe is a mapping of `key: value` lines", help=yaml_document.START, span=span
            )
        )
        return None, diagnostics
    diagnostics += versions.newer(document.root)
    base, more = _base(document.root, path, chain, unsaved)
    merged = merge(base, document.root) if base is not None else document.root
    assert isinstance(merged, Mapping)
    return merged, [*diagnostics, *more]


def _base(
    root: Mapping, path: Path, chain: tuple[Path, ...], unsaved: dict[str, str]
) -> tuple[Mapping | None, list[Diagnostic]]:
    """Return the tree of the file that this one extends, or None if there is none or it cannot be read."""
    followed = (*chain, path)
    target, diagnostics = extended(root, followed)
    return (None, diagnostics) if target is None else _read_chain(target, followed, None, unsaved)


E0020 = Code(
    "E0020",
    "`extends` is not a relative path",
    cause="`extends` names one YAML file, NAME.yaml or NAME.yml, relative to the folder of the file "
    "that contains it. Hidden folders are not allowed, because diagnostics show lines of the files "
    "that they name.",
    cure="Write for example `extends: base.yaml`.",
)

E0021 = Code(
    "E0021",
    "extended file cannot be read",
    cause="The file that `extends` names does not exist or cannot be read.",
    cure="Correct the path. It is relative to the folder of the file that contains it.",
)

E0022 = Code(
    "E0022",
    "`extends` forms a circle",
    cause="The chain of `extends` leads back to a file that was already read, or has more than 16 files.",
    cure="Remove one link of the chain that the message shows.",
)


def extended(root: Mapping, followed: tuple[Path, ...]) -> tuple[Path | None, list[Diagnostic]]:
    """Return the file that one extends, or None if there is none or it cannot be extended.

    Args:
        root: tree of the file.
        followed: the files that led to it, the recipe first, and the file itself.
    """
    path = followed[-1]
    entry = root.entries.get("extends")
    if entry is None or (isinstance(entry.node, Scalar) and entry.node.value is None):
        return None, []
    span = entry.node.place.span
    name = entry.node.value if isinstance(entry.node, Scalar) else None
    if (
        not isinstance(name, str)
        or not name.strip()
        or name.startswith(("/", "~"))
        or "://" in name
        or "\0" in name
    ):
        message = "`extends` names one file, relative to this file's folder"
        return None, [Diagnostic(E0020, message, "extends", "extends: base.yaml", span)]
    target = Path(os.path.normpath(path.parent / name))
    real = os.path.realpath(target)  # unlike Path.resolve, it does not raise at circular links
    if not _may_be_extended(name, real, path):
        message = (
            f"`{name}` is not a recipe: `extends` needs a {' or '.join(ENDINGS)} file, not in a hidden folder"
        )
        return None, [Diagnostic(E0020, message, "extends", "extends: base.yaml", span)]
    followed_real = [os.path.realpath(file) for file in followed]
    if real in followed_real:
        circle = [*followed[followed_real.index(real) :], target]
        message = f"`extends` forms a circle: {' -> '.join(map(display, circle))}"
        return None, [Diagnostic(E0022, message, "extends", "remove one of these `extends`", span)]
    if len(followed) >= MOST_EXTENDED:
        message = f"more than {MOST_EXTENDED} files extend each other"
        return None, [Diagnostic(E0022, message, "extends", "put the shared keys into one file", span)]
    if not os.path.isfile(target):  # unlike Path.is_file, it does not raise at any name
        what = "is a folder" if os.path.isdir(target) else "does not exist"
        message = f"the extended file {display(target)} {what}"
        return None, [
            Diagnostic(E0021, message, "extends", "the path is relative to this file's folder", span)
        ]
    return target, []


def _may_be_extended(name: str, real: str, path: Path) -> bool:
    """Return whether a file may be a recipe, by its name and its real location.

    Hidden folders hold other tools' settings, and often passwords.
    """
    recipe_folders = {part for part in Path(os.path.realpath(path)).parts if part.startswith(".")}
    parts = [part for part in (*Path(name).parts, *Path(real).parts) if part not in ("..", ".")]
    hidden = any(part.startswith(".") and part not in recipe_folders for part in parts)
    return not hidden and name.endswith(ENDINGS) and real.endswith(ENDINGS)


MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8."""


E0001 = Code(
    "E0001",
    "file not found",
    cause="The path of the recipe names no file.",
    cure="Correct the path. It is relative to the folder in which the command runs.",
)

E0002 = Code(
    "E0002",
    "file cannot be read",
    cause="The path is a folder or a device, or you are not permitted to read it.",
    cure="Name a YAML file that you may read.",
)

E0003 = Code(
    "E0003",
    "file too large",
    cause="A recipe has at most 256 KiB, and this file is larger.",
    cure="Name the right file. Keep data in files of their own, and name them in `data.train`.",
)

E0004 = Code(
    "E0004",
    "file is not UTF-8",
    cause="The file contains bytes that are not UTF-8. It was saved in another encoding, or it is not text.",
    cure="Save it as UTF-8.",
)

E0018 = Code(
    "E0018",
    "byte order mark",
    cause="The file starts with a byte order mark, which some editors add.",
    cure="Save it as UTF-8 without a byte order mark.",
)


def read_text(
    path: Path,
    noun: str = "a recipe",
    most: int = MAX_BYTES,
    named: str = "a recipe's YAML file",
    marked: bool = False,
) -> tuple[str, Diagnostic | None]:
    """Return a file's text, or a diagnostic on why it cannot be read.

    Args:
        noun, named: what the file should be, for messages.
        most: largest size in bytes.
        marked: whether the file may start with a byte order mark, which is then left out.
    """
    name = display(path)

    def problem(
        code: Code, message: str, help: str | None, span: Span | None = None
    ) -> tuple[str, Diagnostic]:
        return "", Diagnostic(code, message, help=help, span=span or Span(name, 1, 1, ""))

    try:
        if not path.exists():
            return problem(E0001, f"there is no file {name}", "the path is relative to the current folder")
        if not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file"
            return problem(E0002, f"{name} is {what}", f"name {named}")
        size = path.stat().st_size
        if size > most:
            return problem(E0003, f"{name} has {size:,} bytes; {noun} has at most {most:,}", f"is it {noun}?")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return problem(E0002, f"{name} cannot be read: {reason}", "check the path and its permissions")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return problem(E0004, f"{name} is UTF-16, not UTF-8", "save it as UTF-8")
    if marked:
        data = data.removeprefix(MARK)
    if data.startswith(MARK):
        return problem(
            E0018, f"{name} starts with a byte order mark", "save it as UTF-8 without a byte order mark"
        )
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError as error:
        line, column = yaml_document.place(data[: error.start].decode("utf-8", "replace"))
        text = yaml_document.LINE_BREAK.split(data.decode("utf-8", "replace"))[line]
        span = Span(name, line + 1, column + 1, text)
        in_bytes = len(yaml_document.LINE_BREAK.split(data[: error.start].decode("latin-1"))[-1])
        byte = data[error.start]
        return problem(
            E0004,
            f"byte 0x{byte:02x} (byte {in_bytes + 1} of the line) is not UTF-8",
            "save it as UTF-8",
            span,
        )


__all__ = ["Loaded", "Origin", "Sources", "load", "locate", "read_text"]
