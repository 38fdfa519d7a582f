"""What an upgrade does to a file's text: what it says moves, and all else stays as it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec import document
from spec.tree import Mapping, plain
from spec.upgrade.draft import Draft

Change = Callable[[Draft], None]


def draft_of(text: str) -> Draft:
    root = document.read(text, "a.yaml").root
    assert isinstance(root, Mapping)
    return Draft(root, text)


def rename(draft: Draft) -> None:
    draft.move("train.lr", "train.rate")


def to_section(draft: Draft) -> None:
    draft.move("train.lr", "train.optimizer.rate")


def to_other(draft: Draft) -> None:
    draft.move("tokens", "data.limits")


def items(draft: Draft) -> None:
    draft.move("data[].share", "data[].weight")


def drop(draft: Draft) -> None:
    draft.drop("train.lr", "it is found")


def first(draft: Draft) -> None:
    draft.drop("data[].path", "it is found")


def pin(draft: Draft) -> None:
    draft.pin("train.seed", 17)


def deep(draft: Draft) -> None:
    draft.pin("train.log.to.file", "a: b")


def spell(draft: Draft) -> None:
    draft.convert("train.lr", lambda old: [old, "x: y"])


def state(draft: Draft) -> None:
    draft.state(2)


CASES: dict[str, tuple[Change, str, str]] = {
    "a key in a block": (rename, "train:\n  lr: 1 # a\n", "train:\n  rate: 1 # a\n"),
    "a key in braces": (rename, "train: {x: 1, lr: 1} # a\n", "train: {x: 1, rate: 1} # a\n"),
    "a key in quotes": (rename, "'train':\n  \"lr\" : 1\n", "'train':\n  \"rate\" : 1\n"),
    "a key as JSON has it": (rename, '{"train": {"lr":1}}', '{"train": {"rate":1}}'),
    "a key with a list": (
        rename,
        "train:\n  lr:\n  - 1\n  - 2\nx: 1\n",
        "train:\n  rate:\n  - 1\n  - 2\nx: 1\n",
    ),
    "a key with nothing": (rename, "train:\n  lr:\n", "train:\n  rate:\n"),
    "a key that is not there": (rename, "train:\n  x: 1\n", "train:\n  x: 1\n"),
    "a section that is null": (rename, "train:\n", "train:\n"),
    "into a section in a block": (
        to_section,
        "train:\n  # why\n  lr: 1.0e-4  # how\n  optimizer:\n    x: 1  # last\n",
        "train:\n  optimizer:\n    x: 1  # last\n    # why\n    rate: 1.0e-4  # how\n",
    ),
    "into a section in braces": (
        to_section,
        "train: {lr: 1.0e-4, optimizer: {}}  # all\n",
        "train: {optimizer: {rate: 1.0e-4}}  # all\n",
    ),
    "into a new section": (
        to_section,
        "train:\n  lr: 1\n  x: 2\n",
        "train:\n  x: 2\n  optimizer:\n    rate: 1\n",
    ),
    "into a new section, out of one that is left empty": (
        to_section,
        "train:\n  lr: 1  # a\n",
        "train:\n  optimizer:\n    rate: 1  # a\n",
    ),
    "a text with a comma, into braces": (
        to_section,
        "train:\n  lr: a, b\n  optimizer: {x: 1}\n",
        'train:\n  optimizer: {x: 1, rate: "a, b"}\n',
    ),
    "a list in lines, into braces": (
        to_section,
        "train:\n  lr:\n    - 1\n    - 2\n  optimizer: {x: 1,}\n",
        "train:\n  optimizer: {x: 1, rate: [1, 2],}\n",
    ),
    "a text of many lines": (
        to_section,
        "train:\n  lr: |\n    a: 1\n\n      # no comment\n  optimizer:\n    x: 1\ny: 2\n",
        "train:\n  optimizer:\n    x: 1\n    rate: |\n      a: 1\n\n        # no comment\ny: 2\n",
    ),
    "a whole section": (
        to_other,
        "a: 1\n\n# Of all.\ntokens:  # here\n  # in it\n  x: 1\n  y:\n    - 2  # two\n\n"
        "# The data.\ndata:\n  z: 1\n\n# End.\n",
        "a: 1\n\n# The data.\ndata:\n  z: 1\n  # Of all.\n  limits:  # here\n    # in it\n    x: 1\n    y:\n"
        "      - 2  # two\n\n# End.\n",
    ),
    "a whole section, to a new one": (
        to_other,
        "tokens:\n  x: 1\n\nz: 1\n",
        "z: 1\n\ndata:\n  limits:\n    x: 1\n",
    ),
    "without a last line end": (to_other, "tokens: {x: 1}\nz: 1", "z: 1\ndata:\n  limits: {x: 1}"),
    "in every item": (
        items,
        "data:\n- share: 1\n  x: 2\n- {x: 1}\n- {x: 1, 'share': 2}\n- path\n",
        "data:\n- weight: 1\n  x: 2\n- {x: 1}\n- {x: 1, 'weight': 2}\n- path\n",
    ),
    "a key with its comments": (
        drop,
        "train:\n  x: 1\n\n  # why\n  # so\n  lr: 1  # how\n\n  # z's\n  z: 1\n",
        "train:\n  x: 1\n\n  # z's\n  z: 1\n",
    ),
    "the only key": (drop, "train:  # all\n  lr: 1\nx: 1\n", "train: {}  # all\nx: 1\n"),
    "the only key in braces": (drop, "train: { lr: 1, }\n", "train: { }\n"),
    "the last key in braces": (drop, "train: {x: 1,\n  lr: 1}\n", "train: {x: 1}\n"),
    "an item's first key": (
        first,
        "data:\n  - path: a\n    x: 1\n  - path: b\n  - {path: c, x: 2}\n",
        "data:\n  - x: 1\n  - {}\n  - {x: 2}\n",
    ),
    "a default, in a block": (
        pin,
        "train:\n  x: 1\n  # end\n\ny: 1\n",
        "train:\n  x: 1\n  seed: 17\n  # end\n\ny: 1\n",
    ),
    "a default, in braces": (pin, "train: {x: 1}", "train: {x: 1, seed: 17}"),
    "a default, in a new section": (pin, "x: 1\n", "x: 1\ntrain:\n  seed: 17\n"),
    "a default, in a new section apart": (pin, "x: 1\n\ny: 1\n", "x: 1\n\ny: 1\n\ntrain:\n  seed: 17\n"),
    "a default that is given": (pin, "train: {seed: 1}\n", "train: {seed: 1}\n"),
    "a default that is given as null": (pin, "train:\n  seed:\n", "train:\n  seed:\n"),
    "a default of what is switched off": (pin, "train: null\n", "train: null\n"),
    "a default, deep": (deep, "train:\n  x: 1\n", 'train:\n  x: 1\n  log:\n    to:\n      file: "a: b"\n'),
    "a default, deep in braces": (deep, "{train: {x: 1}}", '{train: {x: 1, log: {to: {file: "a: b"}}}}'),
    "another spelling": (spell, "train:\n  lr: 1  # a\n", 'train:\n  lr: [1, "x: y"]  # a\n'),
    "another spelling of lines": (
        spell,
        "train:\n  lr: >\n    a\n  x: 1\n",
        'train:\n  lr: ["a\\n", "x: y"]\n  x: 1\n',
    ),
    "another spelling of nothing": (spell, "train: {lr}\n", 'train: {lr: [null, "x: y"]}\n'),
    "a version": (state, "# a\nrecipe: 1  # b\nname: x\n", "# a\nrecipe: 2  # b\nname: x\n"),
    "a version where none was": (state, "# a\n\n# b\nname: x\n", "# a\n\n# b\nrecipe: 2\nname: x\n"),
    "a version in braces": (state, "{name: x}", "{recipe: 2, name: x}"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_edit_changes_its_lines_alone(name: str) -> None:
    change, before, after = CASES[name]
    draft = draft_of(before)
    change(draft)
    assert draft.text == after
    assert [d.code for d in draft.found if d.code != "N1237"] == []


@pytest.mark.parametrize("name", CASES)
def test_an_edit_keeps_the_line_ends_of_windows(name: str) -> None:
    change, before, after = CASES[name]
    draft = draft_of(before.replace("\n", "\r\n"))
    change(draft)
    assert draft.text == after.replace("\n", "\r\n")


REFUSED: dict[str, tuple[Change, str, str]] = {
    "a comment in braces": (
        to_section,
        "train: {lr: 1, # why\n  x: 2}\n",
        "without changing what",
    ),
    "a name that is taken": (
        rename,
        "train: {lr: 1, rate: 2}\n",
        "is `train.rate` now, and that is given too",
    ),
    "a section that is null": (
        to_section,
        "train: {lr: 1, optimizer: null}\n",
        "`train.optimizer` is no section",
    ),
    "a section that is a text": (
        to_section,
        "train: {lr: 1, optimizer: adam}\n",
        "`train.optimizer` is no section",
    ),
    "a comment between an item's keys": (
        lambda draft: draft.move("data[].path", "data[].at.path"),
        "data:\n  - path: a\n    # x's\n    x: 1\n",
        "without changing what",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused(name: str) -> None:
    change, before, message = REFUSED[name]
    draft = draft_of(before)
    change(draft)
    assert draft.text == before
    assert [d.code for d in draft.found] == ["E1236"] and message in draft.found[0].message
    assert draft.found[0].span is not None and draft.found[0].span.line > 0


KEYS = ("lr", "optimizer", "x", "seed")
values = st.recursive(
    st.sampled_from([1, 0.5, True, None, "a", "a, b", "x: y", "# no", "two\nlines\n", ""]),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.sampled_from(KEYS), below, max_size=3),
    max_leaves=6,
)
recipes = st.fixed_dictionaries(
    {"recipe": st.just(1)},
    optional={
        "train": st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
        "tokens": values,
        "data": st.lists(
            st.dictionaries(st.sampled_from(["path", "share", "x"]), values, max_size=3), max_size=2
        ),
    },
)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(recipes, st.booleans(), st.sampled_from([rename, to_section, to_other, drop, pin, spell, state]))
def test_the_text_says_what_the_tree_does(recipe: dict[str, object], block: bool, change: Change) -> None:
    from io import StringIO

    from ruamel.yaml import YAML

    stream = StringIO()
    yaml = YAML()
    yaml.default_flow_style = not block
    yaml.dump(recipe, stream)
    draft = draft_of(stream.getvalue())
    meant = Draft(draft.root, None)
    change(draft)
    change(meant)
    assert draft.text is not None
    read = document.read(draft.text, "a.yaml").root
    assert read is not None and sorted_repr(plain(read)) == sorted_repr(plain(draft.root))
    refused = [d.message for d in draft.found if "without changing" in d.message]
    assert refused or sorted_repr(plain(draft.root)) == sorted_repr(plain(meant.root))


def sorted_repr(value: object) -> object:
    """A value whose order of keys says nothing."""
    if isinstance(value, dict):
        return sorted((key, sorted_repr(item)) for key, item in value.items()) or "{}"
    return [sorted_repr(item) for item in value] if isinstance(value, list) else repr(value)
