"""Tests of YAML with positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ruamel.yaml import YAML

from recipec.spec import key_paths
from recipec.spec.tree import Mapping, plain, walk
from recipec.spec.yaml_document import read

TEXT = """\
# A comment.
name: example
mesh: {axes: {fsdp: 4, tp: 1}}
data:
  train:
    - path: "a.jsonl"   # quoted
    - b.jsonl
  eval: [
    c.jsonl,
  ]
note: |
  two
  lines
empty:
"""


def places(text: str) -> dict[str, tuple[int, int, str]]:
    """Return the line, column and source text of every node."""
    root = read(text, "x.yaml").root
    assert root is not None
    out = {}
    for where, _, node in walk(root):
        span = node.place.span
        out[key_paths.join(where)] = (
            span.line,
            span.column,
            span.text[span.column - 1 : span.column - 1 + span.length],
        )
    return out


def test_every_node_has_its_line_and_column() -> None:
    found = places(TEXT)
    assert found["name"] == (2, 7, "example")
    assert found["mesh"] == (3, 7, "{axes: {fsdp: 4, tp: 1}}")
    assert found["mesh.axes.tp"] == (3, 28, "1")
    assert found["data.train[0].path"] == (6, 13, '"a.jsonl"')
    assert found["data.train[1]"] == (7, 7, "b.jsonl")
    assert found["data.eval"] == (8, 9, "[")
    assert found["data.eval[0]"] == (9, 5, "c.jsonl")
    assert found["note"] == (11, 7, "|")
    assert found["empty"] == (14, 1, "empty")


def test_keys_have_their_line_and_column() -> None:
    root = read(TEXT, "x.yaml").root
    assert isinstance(root, Mapping)
    span = root.entries["data"].key.span
    assert (span.line, span.column, span.length, span.text) == (4, 1, 4, "data:")


@pytest.mark.parametrize("line_end", ["\r\n", "\r"])
def test_positions_are_correct_for_other_line_endings(line_end: str) -> None:
    assert places(TEXT.replace("\n", line_end))["data.train[1]"] == (7, 7, "b.jsonl")


def test_values_equal_the_values_of_ruamel(root: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((root / "recipes").glob("*.yaml"))]
    for text in [TEXT, *texts]:
        mine = read(text, "x.yaml")
        assert mine.root is not None and not mine.diagnostics
        assert plain(mine.root) == YAML(typ="safe", pure=True).load(text)


@pytest.mark.parametrize(
    "text",
    [
        *["", "\n", "# only a comment", "---\n...\n", "%", "%TAG ! x", "a: %", "\t", "a:\n\tb", "\x00"],
        *["a: \ud800", "a: &", "a: *", "a: !", "a: !<", "&x", "*x", "!!int", "a: !!binary x", ": b"],
        *["a: b: c", "- a\nb", "[", "{", "]", "}", "a: [b,,c]", "{a: b, a: c}", "a: 'b", 'a: "\\x"'],
        *["a: |9x", "a: >-+\n", "`", "@"],
    ],
)
def test_malformed_yaml_gives_diagnostics_with_a_position(text: str) -> None:
    found = read(text, "x.yaml")
    assert found.diagnostics
    for diagnostic in found.diagnostics:
        assert diagnostic.code.startswith("E00") and diagnostic.span is not None


JSON = """\
{
  "recipe": 1,
  "name": "example",
  "data": {"train": ["a.jsonl", "b.jsonl"]}
}
"""


@pytest.mark.parametrize(
    ("before", "after", "place", "missing"),
    [
        ('"example",', '"example"', (4, 3), "`,` or `}`"),
        ("1,", "1", (3, 3), "`,` or `}`"),
        ('"a.jsonl",', '"a.jsonl"', (4, 32), "`,` or `]`"),
        ("]}", "}", (4, 42), "`,` or `]`"),
        ('{\n  "recipe":', '# A comment.\n{\n  "recipe"', (3, 12), "`,` or `}`"),
        ("]}\n}\n", "]}\n", (1, 1), "not closed"),
    ],
)
def test_missing_json_punctuation_is_reported_at_its_position(
    before: str, after: str, place: tuple[int, int], missing: str
) -> None:
    assert read(JSON, "x.json").diagnostics == []
    (found,) = read(JSON.replace(before, after), "x.json").diagnostics
    assert found.span is not None and (found.span.line, found.span.column) == place
    assert found.code == "E0006" and missing in found.message


@pytest.mark.parametrize("text", ["a:\t1\n", "a: 1\t# note\n"])
def test_tab_between_values_is_named_and_its_help_repairs_it(text: str) -> None:
    (found,) = read(text, "x.yaml").diagnostics
    assert "a tab is here" in found.message and found.help == "replace it with a space"
    assert read(text.replace("\t", " "), "x.yaml").diagnostics == []


def test_deep_nesting_is_refused_without_exhausting_the_stack() -> None:
    assert read("[" * 50_000, "x.yaml").diagnostics[-1].code == "E0015"
    assert read("{a: " * 50_000, "x.yaml").diagnostics[-1].code == "E0015"
    assert read("\n".join(" " * i + "a:" for i in range(500)), "x.yaml").diagnostics[-1].code == "E0015"


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("", ()),
        ("a", ("a",)),
        ("data.train[0].path", ("data", "train", 0, "path")),
        ('serve.env["A.B"]', ("serve", "env", "A.B")),
        ('serve.extra_args["say \\"hi\\""][2]', ("serve", "extra_args", 'say "hi"', 2)),
        ("serve.extra_args.api-key", ("serve", "extra_args", "api-key")),
    ],
)
def test_key_path_is_split_and_joined_unchanged(path: str, parts: tuple[object, ...]) -> None:
    assert key_paths.split(path) == parts
    assert key_paths.join(key_paths.split(path)) == path


@pytest.mark.parametrize("path", [".a", "a.", "[0]", "a[-1]", "a b", 'a["b]'])
def test_malformed_key_paths_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a path of a recipe"):
        key_paths.split(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("%FOO\n---\na: 1\n", 1),
        ("# a comment\n\n%YAML 1.3\n---\na: 1\n", 3),
        ("a: 1\n...\n# a comment\n%FOO bar\n", 4),
        ("a: |\n  %FOO\nb: '%FOO'\nc: x...\n  %FOO\n", None),
    ],
)
def test_directives_of_any_name_are_refused_outside_of_the_document(text: str, line: int | None) -> None:
    found = read(text, "f").diagnostics
    assert [(d.code, d.span and d.span.line) for d in found] == ([("E0017", line)] if line else [])


def test_accepted_texts_can_be_read_by_another_library() -> None:
    for first in ("%FOO", "%YAML 1.2", "%TAG ! tag:x,2000:", "# a comment", "---", "", "\ufeff"):
        text = f"{first}\n--- # a document\n{TEXT}" if first.startswith("%") else f"{first}\n{TEXT}"
        if not (found := read(text, "f")).diagnostics:
            assert found.root is not None and set(yaml.load(text, yaml.CSafeLoader)) == set(plain(found.root))
