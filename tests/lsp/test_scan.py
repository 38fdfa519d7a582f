"""What is read of a half-typed recipe: its outline, and what is being typed at the cursor."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.lsp.cursor import Cursor, cursor_at
from compiler.lsp.scan import scan
from compiler.lsp.text import Text
from spec.document import read
from spec.paths import join
from spec.tree import plain, walk


def typing(text: str) -> Cursor | None:
    """What is typed at the `|` of a text."""
    offset = text.index("|")
    return cursor_at(text[:offset] + text[offset + 1 :], offset)


KEY, VALUE, EITHER = (True, False), (False, True), (True, True)


@pytest.mark.parametrize(
    ("text", "path", "role", "replaced"),
    [
        ("|", "", EITHER, ""),
        ("gl|obal: 3", "", KEY, "global"),
        ("lora:\n  |", "lora", EITHER, ""),
        ("lora:\n  ra|\ntrain: 1", "lora", EITHER, "ra"),
        ("lora:\n  rank: 8\n  |\n", "lora", EITHER, ""),
        ("lora:\n  rank: 8\n|", "", EITHER, ""),
        ("mesh: {acc|", "mesh", KEY, "acc"),
        ("mesh: {accelerator: v5|, axes: {", "mesh.accelerator", VALUE, "v5"),
        ("mesh: {axes: {fsdp: 4, |}", "mesh.axes", KEY, ""),
        ("mesh: {axes: {fsdp: 4, |\ntrain:\n  epochs: 1\n", "mesh.axes", KEY, ""),
        ("mesh:\n  accelerator:|", "mesh.accelerator", VALUE, ""),
        ("mesh:\n  accelerator: |\n  axes: {}", "mesh.accelerator", VALUE, ""),
        ("model:\n  id: goo|gle/x  # why", "model.id", VALUE, "google/x"),
        ("model: {id: 'goo|gle'}", "model.id", VALUE, "google"),
        ('model:\n  id: "goo|', "model.id", VALUE, "goo"),
        ("lora:\n  targets: [q_proj, |]", "lora.targets[1]", EITHER, ""),
        ("lora:\n  targets:\n    - q|\n", "lora.targets[0]", EITHER, "q"),
        ("lora:\n  targets:\n  - a\n  - |\n", "lora.targets[1]", EITHER, ""),
        ("data:\n  train:\n    - path: a\n      |", "data.train[0]", EITHER, ""),
        ("train:\n  optimizer:\n    name: x\n  |", "train", EITHER, ""),
        ("train:\n  optimizer:\n    name: x\n    |\n  steps: 3", "train.optimizer", EITHER, ""),
        ("data:\n  chat_template: >\n\ntrain: {optimizer: {name: |", "train.optimizer.name", VALUE, ""),
    ],
)  # fmt: skip
def test_the_place_of_the_cursor_is_known_in_text_that_does_not_parse(
    text: str, path: str, role: tuple[bool, bool], replaced: str
) -> None:
    cursor = typing(text)
    assert cursor is not None
    assert (join(cursor.path), (cursor.key, cursor.value)) == (path, role)
    assert text.replace("|", "", 1)[cursor.start : cursor.end] == replaced
    assert (cursor.lead == " ") == (text[text.index("|") - 1] == ":")


@pytest.mark.parametrize("text", ["# a com|ment", "a: 1  # wh|y", "text: >\n  some |words\n"])
def test_comments_and_blocks_of_text_are_left_alone(text: str) -> None:
    assert typing(text) is None


def test_a_file_that_yaml_refuses_has_an_outline() -> None:
    text = "name: a\nmesh: {axes: {fsdp: 4, tp\nlora:\n  rank 3\n\ttargets: [a, 'b\ntrain:\n  seed: 1\n"
    assert read(text, "x").root is None
    outline = scan(text)
    assert outline.get("name") == "a" and outline.get("mesh", "axes", "fsdp") == 4
    assert outline.get("train", "seed") == 1
    assert [word.path for word in outline.words] == [("mesh", "axes"), ("lora",)]


RECIPES = ["gemma4-31b-v5p8", "quickstart", "qwen3-8b-dpo-v5e8"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_outline_agrees_with_yaml(name: str) -> None:
    """Every key and value stands where YAML's own reader has it."""
    with open(f"recipes/{name}.yaml", encoding="utf-8") as file:
        source = file.read()
    root = read(source, name).root
    assert root is not None
    outline, text = scan(source), Text(source)
    found = {entry.path: entry for entry in outline.entries}
    nodes = {path: (key, node) for path, key, node in walk(root) if path}
    assert found.keys() == nodes.keys()
    for path, (key, node) in nodes.items():
        entry = found[path]
        if key is not None:
            assert entry.key is not None
            assert entry.key[0] == text.yaml_offset(key.span.line - 1, key.span.column - 1)
        if not entry.open:
            assert outline.get(*path) == plain(node)
            assert entry.value[0] == text.yaml_offset(node.place.span.line - 1, node.place.span.column - 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(alphabet="ab:-{}[],\"' \n\r#|>&!\t%@🙂\u2028", max_size=120), st.data())
def test_any_text_has_an_outline(text: str, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(text)))
    for entry in scan(text).entries:
        assert 0 <= entry.value[0] <= entry.value[1] <= len(text)
        assert entry.key is None or 0 <= entry.key[0] < entry.key[1] <= len(text)
    cursor = cursor_at(text, offset)
    assert cursor is None or 0 <= cursor.start <= offset <= cursor.end <= len(text)


@pytest.mark.parametrize(
    "text",
    [
        "data:\n" + "  x: {a: 1}\n" * 4_000,
        "data: " + "[{a: " * 6_000,
        "\n".join(" " * depth + "k:" for depth in range(600)),
        "- " * 20_000,
        "a" * 100_000,
    ],
    ids=["items", "open brackets", "depth", "dashes", "a word"],
)
def test_large_texts_take_no_longer_than_their_size(text: str) -> None:
    start = time.process_time()
    cursor_at(text, len(text) // 2)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_places_are_counted_as_the_editor_does(encoding: str) -> None:
    source = "a: ü🙂x\r\nb: 語\rc: \u2028d\n"
    text = Text(source, encoding)
    line = "a: ü🙂"
    size = {"utf-8": len(line.encode()), "utf-16": len(line.encode("utf-16-le")) // 2, "utf-32": len(line)}
    assert text.position(source.index("x")) == (0, size[encoding])
    for offset in range(len(source) + 1):
        if source[offset : offset + 1] != "\n" or source[offset - 1 : offset] != "\r":
            assert text.offset(text.position(offset)) == offset
    assert text.position(source.index("c:")) == (2, 0)
    # U+2028 is a letter to YAML 1.2, as to the protocol.
    assert text.yaml_offset(2, 4) == source.index("d")
    assert text.offset((99, 0)) == text.offset((3, 5)) == len(source)
    assert text.offset((0, 99)) == source.index("\r")
