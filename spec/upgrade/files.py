"""The files of recipes, with what they extend, taken to the version that is read: each file by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spec import document, secrets, versions
from spec.diagnostics import Diagnostic, has_errors, in_order
from spec.load import display, extended, read_text
from spec.paths import join
from spec.tree import Mapping, merge, plain
from spec.upgrade import steps
from spec.upgrade.draft import Draft


@dataclass
class File:
    """One file.

    Attributes:
        path: as it was named, or as `extends` leads to it.
        version: that it was of.
        before, after: its text.
        forms: its tree by version, from the one that it was of to the one that is read.
        stated: whether it says its version itself.
    """

    path: Path
    version: int
    before: str
    after: str
    forms: dict[int, Mapping]
    stated: bool

    @property
    def changed(self) -> bool:
        return self.after != self.before

    def form(self, version: int) -> Mapping:
        """Its tree in a version, or in the earliest one after it that the file was of."""
        return self.forms[max(version, self.version)]


@dataclass
class Upgraded:
    """What became of the files.

    Attributes:
        files: every one, bases before what extends them.
        diagnostics: when there is an error among them, nothing may be written.
    """

    files: list[File] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)


def upgrade(recipes: Sequence[Path]) -> Upgraded:
    """Takes recipes, and all files that they extend, to the version that is read. Writes nothing."""
    done: dict[Path, File] = {}
    found: list[Diagnostic] = []
    for recipe in recipes:
        chain, problems = _chain(recipe)
        if problems:
            found += problems
            continue
        below: list[File] = []
        for file in reversed(chain):
            known = done.get(file.path.resolve())
            if known is None:
                found += _upgrade(file, below)
                known = done[file.path.resolve()] = file
            elif known.version != file.version:
                found.append(_of_two_versions(known, file))
            below.append(known)
        if not has_errors(found):
            found += _apart(below)
    return Upgraded(list(done.values()), in_order(found))


def _chain(recipe: Path) -> tuple[list[File], list[Diagnostic]]:
    """A recipe and what it extends, the recipe first; errors when they cannot all be read."""
    followed: tuple[Path, ...] = ()
    read: list[tuple[Path, str, Mapping]] = []
    found: list[Diagnostic] = []
    path: Path | None = recipe
    while path is not None:
        followed = (*followed, path)
        text, problem = read_text(path)
        if problem is not None:
            return [], [*found, problem]
        tree = document.read(text, display(path), "extends" if read else "file")
        found += tree.diagnostics
        if tree.root is None:
            return [], found
        if not isinstance(tree.root, Mapping):
            message = "a recipe is a mapping of `key: value` lines"
            return [], [*found, Diagnostic("E0013", message, help=document.START, span=tree.root.place.span)]
        read.append((path, text, tree.root))
        found += [d for d in versions.other(tree.root) if d.code != "E1235"]
        path, problems = extended(tree.root, followed)
        found += problems
    if has_errors(found):
        return [], found
    return _of_versions(read)


def _of_versions(read: Sequence[tuple[Path, str, Mapping]]) -> tuple[list[File], list[Diagnostic]]:
    """The files with their versions: one that says none is of the version of what extends it."""
    stated = [versions.stated(root) for _, _, root in read]
    first = next((version for version in stated if version is not None), None)
    malformed = [root.entries[versions.KEY] for _, _, root in read if versions.KEY in root.entries]
    malformed = [
        entry for entry in malformed if versions.stated(Mapping({versions.KEY: entry}, entry.key)) is None
    ]
    if first is None or malformed:
        key = versions.KEY
        help = f"`{key}: {versions.VERSION}` for the version of today"
        if malformed:
            message = f"`{key}` is no version of the language: these are 1 and up"
            return [], [Diagnostic("E0108", message, key, help, entry.node.place.span) for entry in malformed]
        message = f"the recipe lacks the key `{key}`, which says the version of the language that it is of"
        help += "; or upgrade the recipe that extends this file" * (len(read) == 1)
        return [], [Diagnostic("E0102", message, key, help, read[0][2].place.span)]
    files, version = [], first
    for (path, text, root), own in zip(read, stated, strict=True):
        version = own or version
        files.append(File(path, version, text, text, {version: root}, own is not None))
    return files, []


def _upgrade(file: File, below: Sequence[File]) -> list[Diagnostic]:
    """Takes one file through the steps; what it extends has been."""
    root, text = file.forms[file.version], file.before
    found: list[Diagnostic] = []
    for version in range(file.version, versions.VERSION):
        draft = Draft(root, text, _merged(below, version + 1))
        steps.STEPS[version](draft)
        found += draft.found
        root, text = draft.root, draft.text or ""
        file.forms[version + 1] = root
    if file.version < versions.VERSION:
        draft = Draft(root, text)
        draft.state(versions.VERSION)
        found += draft.found
        file.after = draft.text or ""
    conceal = secrets.Concealer(file.forms[file.version])
    return [replace(d, message=conceal(d.message)) for d in found]


def _merged(files: Sequence[File], version: int) -> Mapping | None:
    """The trees of files in one version, the base first, as `extends` has them."""
    whole: Mapping | None = None
    for file in files:
        merged = file.form(version) if whole is None else merge(whole, file.form(version))
        assert isinstance(merged, Mapping)
        whole = merged
    return whole


def _apart(files: Sequence[File]) -> list[Diagnostic]:
    """What a recipe would mean otherwise since its files were upgraded one by one: merged, then upgraded, it
    has to be the same.

    Args:
        files: of one recipe, the base first.
    """
    recipe = files[-1]
    if len(files) == 1 or len({file.version for file in files}) > 1:
        return []
    whole = copy.deepcopy(_merged(files, recipe.version))
    assert whole is not None
    for version in range(recipe.version, versions.VERSION):
        draft = Draft(whole, None)
        steps.STEPS[version](draft)
        whole = draft.root
    after = _merged(files, versions.VERSION)
    assert after is not None
    differing = _differing(plain(whole), plain(after))
    if differing is None:
        return []
    message = f"upgraded one by one, the files give `{differing}` another value than they have together"
    help = "write what this file takes over from its base out in it, and upgrade again"
    return [Diagnostic("E1236", message, differing, help, recipe.forms[recipe.version].place.span)]


def _differing(one: Any, other: Any) -> str | None:
    """The first path at which two recipes differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - {versions.KEY, "extends"}):
            if key not in one or key not in other:
                return join((key,))
            below = _differing(one[key], other[key])
            if below is not None:
                return join((key,)) + ("." + below if below else "")
        return None
    return None if repr(one) == repr(other) else ""


def _of_two_versions(known: File, file: File) -> Diagnostic:
    """Of a base that says no version, and is extended by files of two."""
    a, b = sorted((known.version, file.version))
    message = f"this file says no version, and files of the versions {a} and {b} extend it"
    place = known.forms[known.version].place.span
    return Diagnostic("E1236", message, versions.KEY, f"say which it is of: `{versions.KEY}: {a}`", place)
