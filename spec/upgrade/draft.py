"""One file of a recipe on its way to the next version: what a step can do to it.

A path is one of `spec.paths`, where `[]` stands for every item of a list: `data.train[].weight`. The tree
says what the file has to mean, its nodes keep their places in the original text, and the text follows edit by
edit. It is read again after each: one after which it would mean another thing, or lack a comment, is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from ruamel.yaml.error import YAMLError

from spec import document, paths, versions
from spec.core_schema import flow
from spec.diagnostics import Diagnostic, Span
from spec.paths import join
from spec.sources import Sources
from spec.tree import Entry, Items, Mapping, Node, Scalar, merge, plain
from spec.upgrade.layout import Layout, Taken
from spec.upgrade.nodes import Path, find, move, node_of, put, replace, take

Edit = Callable[[], str]
"""Gives the text with a change made, if it can be made."""


class Draft:
    """A file, its meaning, and what there is to say about the change.

    Args:
        root: the file's tree, which is changed.
        text: the file's text; None where the meaning alone is asked for.
        below: the tree of what the file extends, in the version that a step leads to.

    Attributes:
        found: errors (E1236), of what cannot be kept, and notes (N1237), of what is left out.
    """

    def __init__(self, root: Mapping, text: str | None, below: Mapping | None = None) -> None:
        self.root = root
        self.text = text
        self.below = below
        self.found: list[Diagnostic] = []
        self._where = Sources(copy.deepcopy(root))

    def value(self, path: str) -> Any:
        """The value that this file gives, as plain data; None when it gives none."""
        node = self._node(paths.split(path))
        return None if node is None else plain(node)

    def given(self, path: str) -> bool:
        """Whether this file has the key."""
        return self._node(paths.split(path)) is not None

    def move(self, old: str, new: str) -> None:
        """Gives a key another name, or another section."""
        for before, after in self._each(old, new):
            if self._entry(before) is None:
                continue
            closed = self._closed(after, self.root)
            if self._entry(after) is not None:
                self._refuse(before, f"`{join(before)}` is `{join(after)}` now, and that is given too")
            elif closed:
                what = f"`{join(before)}` is `{join(after)}` now"
                self._refuse(before, f"{what}, and `{join(closed)}` is no section here")
            else:
                self._change(before, partial(move, old=before, new=after), self._moves(before, after))

    def drop(self, path: str, because: str) -> None:
        """Takes a key out that has nothing to say any more.

        Args:
            because: a clause that says what holds without it.
        """
        for (where,) in self._each(path):
            entry = self._entry(where)
            if entry is None:
                continue
            if not self._change(where, partial(take, where=where), [self._cut(where)], comments=False):
                continue
            message = f"`{join(where)}` is left out: {because}"
            self.found.append(Diagnostic("N1237", message, join(where), span=entry.key.span))

    def prune(self, section: str) -> None:
        """Takes a section out that has no keys left."""
        where = paths.split(section)
        if self.value(section) == {}:
            self._change(where, partial(take, where=where), [self._cut(where)])

    def pin(self, path: str, value: Any, within: str | None = None) -> None:
        """Writes the old default of a key that has another one now, unless this file or its bases give it.

        Args:
            within: the section that has to be given for the key to mean anything; None for one that always
                is.
        """
        for (where,) in self._each(path):
            whole = self.root if self.below is None else merge(self.below, self.root)
            assert isinstance(whole, Mapping)
            absent = within is not None and not isinstance(find(whole, paths.split(within)), Mapping)
            if not absent and find(whole, where) is None and self._closed(where, whole) is None:
                made = Entry(self.root.place, node_of(value, self.root.place))
                self._change(where, partial(put, where=where, entry=made), [self._added(where, value)])

    def convert(self, path: str, function: Callable[[Any], Any]) -> None:
        """Spells a value in another way.

        Args:
            function: from the old value to the new one; a ValueError's text says why there is none.
        """
        for (where,) in self._each(path):
            node = self._node(where)
            if node is None:
                continue
            old = plain(node)
            try:
                new = function(old)
            except ValueError as error:
                self._refuse(where, f"`{join(where)}` cannot be taken over: {error}")
                continue
            if not _same(old, new):
                made = partial(replace, where=where, node=node_of(new, node.place))
                self._change(where, made, [self._spelt(where, flow(new))])

    def refuse(self, path: str, message: str, help: str | None = None) -> None:
        """Says that a value has no counterpart."""
        self._refuse(paths.split(path), message, help)

    def state(self, version: int) -> None:
        """Writes the version that the file is of."""
        where: Path = (versions.KEY,)
        made = Entry(self.root.place, Scalar(version, self.root.place))
        first = not self.given(versions.KEY)
        edit = self._first(version) if first else self._spelt(where, str(version))
        self._change(where, partial(put, where=where, entry=made), [edit])

    def _change(
        self, where: Path, change: Callable[[Mapping], object], edits: Iterable[Edit], comments: bool = True
    ) -> bool:
        """Changes the tree, and the text by the first of the edits that says the same; False when none does.

        Args:
            comments: whether every comment has to stay.
        """
        changed = copy.deepcopy(self.root)
        change(changed)
        if self.text is not None:
            wanted = plain(changed)
            fits = (text for text in _tried(edits) if self._means(text, wanted, comments))
            text = next(fits, None)
            if text is None:
                message = f"`{join(where)}` cannot be changed without changing what surrounds it"
                self._refuse(where, message, "give the section's keys a line each, and upgrade again")
                return False
            self.text = text
        self.root = changed
        return True

    def _means(self, text: str, wanted: Any, comments: bool) -> bool:
        read = document.read(text, "")
        if read.root is None or read.diagnostics or not _same(plain(read.root), wanted):
            return False
        lost = Counter(self._layout().comments) - Counter(_laid_out(text).comments)
        return not (comments and lost)

    def _moves(self, old: Path, new: Path) -> Iterator[Edit]:
        if old[:-1] == new[:-1]:
            yield lambda: self._layout().renamed(old, str(new[-1]))
            return
        yield lambda: self._moved(old, new, self._layout().without(old)[1])
        value = f": {flow(self.value(join(old)))}"
        yield lambda: self._moved(old, new, dataclasses.replace(self._layout().without(old)[1], body=value))

    def _moved(self, old: Path, new: Path, taken: Taken) -> str:
        return _laid_out(self._layout().with_entry(new, taken)).without(old)[0]

    def _cut(self, where: Path) -> Edit:
        return lambda: self._layout().without(where)[0]

    def _added(self, where: Path, value: Any) -> Edit:
        return lambda: self._layout().with_entry(where, Taken(f": {flow(value)}"))

    def _spelt(self, where: Path, value: str) -> Edit:
        return lambda: self._layout().changed(where, value)

    def _first(self, version: int) -> Edit:
        return lambda: self._layout().with_first(versions.KEY, str(version))

    def _layout(self) -> Layout:
        assert self.text is not None
        return _laid_out(self.text)

    def _refuse(self, where: Path, message: str, help: str | None = None) -> None:
        path = join(where)
        help = help or "change it by hand, and upgrade again"
        self.found.append(Diagnostic("E1236", message, path, help, self._span(where)))

    def _span(self, where: Path) -> Span | None:
        entry = self._entry(where)
        return entry.key.span if entry is not None else self._where.span(join(where))

    def _entry(self, where: Path) -> Entry | None:
        parent = self._node(where[:-1])
        return parent.entries.get(str(where[-1])) if isinstance(parent, Mapping) else None

    def _node(self, where: Path) -> Node | None:
        return find(self.root, where)

    def _closed(self, where: Path, root: Mapping) -> Path | None:
        """The section on the way to a key that is given, and is none that takes keys."""
        for depth in range(1, len(where)):
            node = find(root, where[:depth])
            if node is not None and not isinstance(node, Items if isinstance(where[depth], int) else Mapping):
                return where[:depth]
        return None

    def _each(self, *patterns: str) -> Iterator[tuple[Path, ...]]:
        """The patterns with `[]` filled in by every item of the first one's list."""
        before, found, _ = patterns[0].partition("[]")
        if not found:
            yield tuple(paths.split(pattern) for pattern in patterns)
            return
        items = self._node(paths.split(before))
        for index in range(len(items.items) if isinstance(items, Items) else 0):
            yield from self._each(*(pattern.replace("[]", f"[{index}]", 1) for pattern in patterns))


@lru_cache(maxsize=4)
def _laid_out(text: str) -> Layout:
    """The text's layout; that of a text that was accepted is asked for again by the next edit."""
    return Layout(text)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same to the language, where 1, 1.0 and true are three."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _tried(edits: Iterable[Edit]) -> Iterator[str]:
    """The texts of the edits that can be made."""
    for edit in edits:
        with suppress(LookupError, YAMLError):
            yield edit()
