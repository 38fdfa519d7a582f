"""`recipe lsp`, spoken to by a real client over its stdin and stdout."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lsprotocol import types

from compiler.lsp.analysis import Document
from compiler.lsp.frames import Frames
from compiler.lsp.process import Process, Unanswered
from compiler.packages import install
from spec.codes import CODES
from spec.load import MAX_BYTES
from tests.lsp.edited import BASE, CHILD, inserted, linked, recipe_check, where
from tests.lsp.editor_client import Editor

ROOT = Path(__file__).resolve().parents[2]

ERROR, WARNING = types.DiagnosticSeverity.Error, types.DiagnosticSeverity.Warning


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    (folder / "child.yaml").write_text(CHILD, encoding="utf-8")
    (folder / "train.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    (folder / "prepare.py").write_text("import re\n\n\ndef clean(row):\n    'Cleans.'\n    return row\n")
    (folder / "data").mkdir()
    (folder / "data" / "more.parquet").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def editor(place: Path) -> Iterator[Editor]:
    made = Editor(place)
    yield made
    assert made.end() == 0


def test_diagnostics_are_those_of_recipe_check(editor: Editor, place: Path) -> None:
    path = place / "wrong.yaml"
    path.write_text(BASE.replace("rank:", "rnak:").replace("tp: 1", "tp: 8").replace("v5p-8", "v9p-8"))
    uri = editor.open(path)
    found = editor.diagnostics(uri)
    assert [(d.code, d.range.start.line, d.range.start.character) for d in found] == recipe_check(path, place)
    assert {d.code: d.severity for d in found}["E0101"] == ERROR
    unknown = next(d for d in found if d.code == "E0101")
    line, character = where(path.read_text(), "rnak")
    assert unknown.range == types.Range(types.Position(line, character), types.Position(line, character + 4))
    assert unknown.source == "recipe" and "did you mean `rank`?" in unknown.message
    assert unknown.code_description is not None and CODES["E0101"].title in linked(unknown)


def test_diagnostics_follow_the_text_that_is_not_saved(editor: Editor, place: Path) -> None:
    uri = editor.open(place / "base.yaml")
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == []
    editor.change(uri, BASE.replace("rank: 16", "rank: 0"))
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == ["E0105"]
    editor.change(uri, BASE)
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == []
    editor.close(uri)
    editor.until(lambda: editor.published[uri][-1].diagnostics in ([], ()))


def test_what_an_extended_file_causes_is_said_in_both(editor: Editor, place: Path) -> None:
    child, base = editor.open(place / "child.yaml"), editor.open(place / "base.yaml")
    assert [d for d in editor.diagnostics(child) if d.severity == ERROR] == []
    # The base is changed and not saved: what extends it is checked again.
    seen = len(editor.published[child])
    broken = BASE.replace("  axes: {fsdp: 4, tp: 1}", "  axes: {fsdp: 4, tp: 3}")
    editor.change(base, broken)
    errors = [d for d in editor.diagnostics(base) if d.severity == ERROR]
    editor.until(lambda: len(editor.published[child]) > seen)
    told = [d for d in editor.published[child][-1].diagnostics if d.severity == ERROR]
    assert [d.code for d in told] == [d.code for d in errors] != []
    line, character = where(CHILD, "base.yaml")
    assert told[0].range.start == types.Position(line, character)
    assert told[0].related_information is not None
    related = told[0].related_information[0].location
    assert related.uri == base and related.range.start.line == errors[0].range.start.line
    editor.change(base, BASE)
    editor.until(lambda: not [d for d in editor.published[child][-1].diagnostics if d.severity == ERROR])
    editor.close(base)
    editor.close(child)


def test_hover_explains_keys_values_and_diagnostics(editor: Editor, place: Path) -> None:
    text = BASE + "remat: {policy: decoder}\n"
    uri = editor.open(place / "base.yaml", text)
    editor.diagnostics(uri)
    shown = editor.hover(uri, *where(text, "rank", 1))
    assert shown.startswith("**lora.rank**: `16`\n\nInner dimension of each adapter. Unit: dimensions.")
    assert "trained parameters" in shown and "q_proj" in shown
    shown = editor.hover(uri, *where(text, "decoder", 1))
    assert "`decoder`: Only each decoder layer's input is stored" in shown
    editor.change(uri, text.replace("rank: 16", "rank: 0"))
    editor.diagnostics(uri)
    shown = editor.hover(uri, *where(text, "rank: 16", 6))
    assert f"**E0105: {CODES['E0105'].title}**" in shown and "Inner dimension" in shown
    child = editor.open(place / "child.yaml")
    assert editor.hover(child, *where(CHILD, "train")).startswith("**train**")
    assert editor.hover(child, 0, 8) != "" and editor.hover(child, 99, 0) == ""
    editor.close(uri)
    editor.close(child)


@pytest.mark.parametrize(
    ("text", "wanted", "unwanted"),
    [
        ("recipe: 1\nlo|", ["lora", "name", "extends"], ["recipe", "rank"]),
        ("lora:\n  rank: 8\n  |\n", ["alpha", "targets", "rank_pattern"], ["rank", "model"]),
        ("lora: {rank: 8, |}", ["alpha", "targets"], ["rank"]),
        ("remat:\n  policy: |\n", ["none", "offload_dots"], ["dot"]),
        ("model:\n  attention:|\n", ["dot", "splash"], []),
        ("mesh:\n  accelerator: |\n", ["v5p-8", "tpu7x-8", "cpu-8"], []),
        ("mesh:\n  topology: v5p:|\n", ["v5p:2x2x1", "v6e:2x4"], []),
        ("mesh: {accelerator: v5p-8, axes: {|", ["fsdp", "tp"], []),
        ("mesh:\n  accelerator: v5p-8\n  axes: |\n", ["{fsdp: 4, tp: 1}", "{fsdp: 1, tp: 4}"], []),
        ("model:\n  id: google/|\n", ["google/gemma-4-31B-it", "Qwen/Qwen3-8B"], []),
        ("model: {id: Qwen/Qwen3-8B}\nlora: {targets: [q_proj, |", ["k_proj", "down_proj"], []),
        ("model: {id: Qwen/Qwen3-8B}\nlora:\n  layers: |\n", ["all", "18-35"], []),
        ("model: {id: Qwen/Qwen3-8B}\nsharding: {rules: [{match: '|",
         [r"layers\.[0-9]+\.mlp\.down_proj\.kernel"], []),
        ("data:\n  train:\n    - |\n", ["train.jsonl", "data/", "path", "split"], ["prepare.py"]),
        ("data:\n  train: [data/|]\n", ["data/more.parquet"], ["train.jsonl"]),
        ("data:\n  transform: |\n", ["prepare.py:"], ["train.jsonl"]),
        ("data:\n  transform: prepare.py:|\n", ["prepare.py:clean"], []),
        ("extends: |\n", ["base.yaml", "child.yaml"], ["train.jsonl"]),
        ("serve:\n  extra_args:\n    |\n", ["max-logprobs", "enable-lora"], []),
        ("train:\n  optimizer:\n    name: |\n", ["adamw", "lion"], []),
        ("data: {packing: |", ["true", "false"], []),
        ("# rank|\n", [], ["rank", "lora"]),
    ],
)  # fmt: skip
def test_completion_offers_what_fits_and_nothing_else(
    editor: Editor, place: Path, text: str, wanted: list[str], unwanted: list[str]
) -> None:
    line, character = where(text, "|")
    uri = editor.open(place / "typed.yaml", text.replace("|", "", 1))
    found = editor.complete(uri, line, character)
    assert [name for name in wanted if name not in found] == []
    assert [name for name in unwanted if name in found] == []
    editor.close(uri)


@pytest.mark.parametrize(
    ("text", "chosen", "result"),
    [
        ("mesh:\n  accelerator:|\n", "v5p-8", "mesh:\n  accelerator: v5p-8\n"),
        ("mesh: {accelerator: 'v|'}\n", "v5p-8", "mesh: {accelerator: 'v5p-8'}\n"),
        ("lo|\n", "lora", "lora:\n  \n"),
        ("data:\n  tr|\n", "train", "data:\n  train:\n    - \n"),
        ("lora: {ra|\n", "rank", "lora: {rank: \n"),
        ("lora: {ra|nk: 3}\n", "rslora", "lora: {rslora: 3}\n"),
        ("lora:\n  targets:\n    |\n", "q_proj", "lora:\n  targets:\n    - q_proj\n"),
        ("lora:\n  targets: |\n", "q_proj", "lora:\n  targets: [q_proj]\n"),
        ("lora:\n  targets: [q|, k_proj]\n", "v_proj", "lora:\n  targets: [v_proj, k_proj]\n"),
        ("model:\n  id: google/g|oogle # x\n", "Qwen/Qwen3-8B", "model:\n  id: Qwen/Qwen3-8B # x\n"),
    ],
)  # fmt: skip
def test_what_is_chosen_is_put_where_it_belongs(
    editor: Editor, place: Path, text: str, chosen: str, result: str
) -> None:
    line, character = where(text, "|")
    typed = text.replace("|", "", 1)
    uri = editor.open(place / "typed.yaml", typed)
    assert inserted(typed, editor.complete(uri, line, character)[chosen]) == result
    editor.close(uri)


def test_completion_knows_the_model_of_the_extended_file(editor: Editor, place: Path) -> None:
    text = CHILD.replace("rank: 32", "rank: 32, targets: [q")
    uri = editor.open(place / "child.yaml")
    editor.diagnostics(uri)
    editor.change(uri, text)
    found = editor.complete(uri, *where(text, "[q", 2))
    assert found["v_proj"].detail == "50 layers" and found["q_proj"].detail == "every layer"
    editor.close(uri)


def test_definitions_lead_to_the_file_that_gives_a_value(editor: Editor, place: Path) -> None:
    child, base = editor.open(place / "child.yaml"), editor.open(place / "base.yaml")
    found = editor.definition(child, *where(CHILD, "base.yaml", 2))
    assert found is not None and found.uri == base
    found = editor.definition(child, *where(CHILD, "rank", 1))
    assert found is not None and found.uri == base
    assert found.range.start == types.Position(*where(BASE, "16"))
    # The base as it stands in the editor, whatever lies on disk.
    editor.change(base, f"# a line more\n{BASE}")
    found = editor.definition(child, *where(CHILD, "rank", 1))
    assert found is not None and found.range.start.line == where(BASE, "16")[0] + 1
    assert editor.definition(child, *where(CHILD, "seed", 1)) is None
    editor.change(base, BASE)
    found = editor.definition(base, *where(BASE, "prepare.py", 3))
    assert found is not None and found.uri == (place / "prepare.py").as_uri()
    assert (found.range.start.line, found.range.end.character) == (3, len("def clean"))
    found = editor.definition(base, *where(BASE, "train.jsonl", 3))
    assert found is not None and found.uri == (place / "train.jsonl").as_uri()
    editor.close(child)
    editor.close(base)


@pytest.mark.parametrize(
    ("wrong", "right", "title"),
    [
        (("rank: 16", "rnak: 16"), ("rank: 16", "rank: 16"), "Change to `rank`"),
        (("attention: splash", "attention: splahs"), ("splash", "splash"), "Change to `splash`"),
        (("rank: 16", "rank: '16'"), ("rank: 16", "rank: 16"), "Change to `rank: 16`"),
        (("accelerator: v5p-8", "accelerator: v5p8"), ("v5p-8", "v5p-8"), "Change to `v5p-8`"),
        (("gemma-4-31B-it", "gemma-4-31b-it"), ("a", "a"), "Change to `google/gemma-4-31B-it`"),
        (
            ("rank: 16", "rank: 16, rank_pattern: {q_prj: 8}"),
            ("rank: 16", "rank: 16, rank_pattern: {q_proj: 8}"),
            "Change to `q_proj`",
        ),
        (
            ("lora:", "serve: {extra_args: {gpu_memory_utilisatio: 0.9}}\nlora:"),
            ("lora:", "serve: {extra_args: {gpu_memory_utilization: 0.9}}\nlora:"),
            "Change to `gpu_memory_utilization`",
        ),
        (
            ("lora:", "serve: {extra_args: {compilation_config: {mod: 3}}}\nlora:"),
            ("lora:", "serve: {extra_args: {compilation_config: {mode: 3}}}\nlora:"),
            "Change to `mode`",
        ),
        (("prepare.py:clean", "prepare.py:claen"), ("a", "a"), "Change to `prepare.py:clean`"),
        (
            ("lora:", "merge: {quantization: fp8}\nserve: {accelerator: v6e-8, quantization: fp8}\nlora:"),
            ("lora:", "merge: {quantization: fp8}\nserve: {accelerator: v6e-8, quantization: null}\nlora:"),
            "Change to `quantization: null`",
        ),
    ],
)
def test_repairs_make_the_diagnostic_go(
    editor: Editor, place: Path, wrong: tuple[str, str], right: tuple[str, str], title: str
) -> None:
    text = BASE.replace(*wrong)
    uri = editor.open(place / "repaired.yaml", text)
    shown = next(d for d in editor.diagnostics(uri) if d.severity == ERROR)
    (action,) = [a for a in editor.actions(uri, shown.range) if a.title == title]
    assert action.edit is not None and action.edit.changes is not None
    (edit,) = action.edit.changes[uri]
    item = types.CompletionItem("", text_edit=types.TextEdit(edit.range, edit.new_text))
    assert inserted(text, item) == BASE.replace(*right)
    editor.close(uri)


def test_a_key_that_is_missing_can_be_added(editor: Editor, place: Path) -> None:
    text = BASE.replace("name: base\n", "")
    uri = editor.open(place / "repaired.yaml", text)
    (shown,) = [d for d in editor.diagnostics(uri) if d.code == "E0102"]
    (action,) = editor.actions(uri, shown.range)
    assert action.edit is not None and action.edit.changes is not None
    (edit,) = action.edit.changes[uri]
    item = types.CompletionItem("", text_edit=types.TextEdit(edit.range, edit.new_text))
    editor.change(uri, inserted(text, item))
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == []
    editor.close(uri)


def test_symbols_are_the_sections_and_keys(editor: Editor, place: Path) -> None:
    uri = editor.open(place / "base.yaml")
    params = types.DocumentSymbolParams(types.TextDocumentIdentifier(uri))
    found = editor.ask(editor.client.text_document_document_symbol_async(params))
    assert [symbol.name for symbol in found] == ["recipe", "name", "model", "mesh", "lora", "data", "train"]
    mesh = next(symbol for symbol in found if symbol.name == "mesh")
    assert [child.name for child in mesh.children] == ["accelerator", "axes"]
    assert mesh.children[0].detail == "v5p-8" and mesh.children[1].children[1].name == "tp"
    assert mesh.range.start.line == 3 and mesh.range.end.line == 5
    editor.close(uri)


def test_wide_characters_do_not_move_places(editor: Editor, place: Path) -> None:
    text = "# 🙂🙂\n" + BASE.replace("{rank: 16}", '{targets: ["🙂🙂", q_porj], rank: 16}')
    uri = editor.open(place / "wide.yaml", text)
    found = [d for d in editor.diagnostics(uri) if d.severity == ERROR and "q_porj" in d.message]
    line, character = where(text, "q_porj")
    # Two of the characters before it are two units of UTF-16 each.
    assert found[0].range.start == types.Position(line, character + 2)
    assert "k_proj" in editor.complete(uri, line, character + 2)
    editor.close(uri)


def test_malformed_and_foreign_files_do_not_end_the_server(editor: Editor, place: Path) -> None:
    uri = editor.open(place / "bad.yaml", BASE + "lora: {rank: [1\nserve:\n\taccelerator: v6\n")
    assert editor.diagnostics(uri)[0].code in ("E0006", "E0007", "E0009")
    editor.change(uri, "services:\n  web: {image: nginx}\n")
    assert editor.diagnostics(uri) == []
    for text in ("\0", "\ufeffrecipe: 1\n", "recipe: 1\nname: \ud800\n", "{" * 3000, "recipe: &a *a\n"):
        editor.change(uri, text)
        editor.diagnostics(uri)
    editor.close(uri)
    uri = editor.open(place / "large.yaml", BASE + "#" * MAX_BYTES)
    assert [d.code for d in editor.diagnostics(uri)] == ["E0003"]
    editor.close(uri)


def framed(content: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%b" % (len(content), content)


ASKED = b'{"jsonrpc": "2.0", "id": 7, "method": "textDocument/hover", "params": {}}'
SKIPPED = "error: a message whose length is missing or cannot be taken is skipped"
UNSIZED = (
    b"\r\n" + ASKED,
    b"Content-Type: x\r\n\r\n" + ASKED,
    b"Content-Length: -5\r\n\r\n" + ASKED,
    b"Content-Length: 0\r\n\r\n",
    b"Content-Length: 99999999999999\r\n\r\n" + ASKED,
    b"Content-Length: " + b"9" * 100_000 + b"\r\n\r\n" + ASKED,
    b"Content-Length: many\r\n\r\n" + ASKED * 3_000,
)


@pytest.mark.parametrize("sent", UNSIZED, ids=range(len(UNSIZED)))
def test_a_message_of_unknown_length_costs_itself_alone(
    sent: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Frames(io.BytesIO(sent + framed(b"{}") + framed(b"[1]")))
    for body in (b"{}", b"[1]"):
        assert stream.readline() == b"Content-Length: %d\r\n" % len(body)
        assert stream.readline() == b"\r\n"
        assert stream.read(len(body)) == body
    assert stream.readline() == b""
    assert capsys.readouterr().err == f"{SKIPPED}\n"


def test_what_is_no_message_is_a_line_on_stderr() -> None:
    begin = framed(b'{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"capabilities": {}}}')
    bad = UNSIZED[2], *map(framed, (b"{no JSON", b"[" * 100_000, ASKED, b'{"jsonrpc": "2.0", "method": 5}'))
    end = framed(b'{"jsonrpc": "2.0", "id": 2, "method": "shutdown"}')
    end += framed(b'{"jsonrpc": "2.0", "method": "exit"}')
    command, sent = [sys.executable, "-m", "compiler.cli", "lsp"], b"".join((begin, *bad, end))
    done = subprocess.run(command, input=sent, capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, b'"id": 2' in done.stdout) == (0, True)
    lines = done.stderr.decode().splitlines()
    assert lines[0] == SKIPPED and len(lines) > len(bad) and max(map(len, lines)) <= 300
    assert all(line.startswith(("pygls.server: ", "pygls.protocol.json_rpc: ")) for line in lines[1:])


def test_a_large_file_and_a_flood_of_changes_are_answered_in_time(editor: Editor, place: Path) -> None:
    lines = "".join(f"  # line {i:>8}, and what it says\n" for i in range(7_000))
    text = f"{BASE}remat:\n{lines}  policy: decoder\n"
    assert 0.9 * MAX_BYTES < len(text) < MAX_BYTES
    uri = editor.open(place / "long.yaml", text)
    assert [d for d in editor.diagnostics(uri) if d.severity == ERROR] == []
    editor.close(uri)
    uri = editor.open(place / "flood.yaml", BASE)
    for number in range(500):
        editor.change(uri, BASE.replace("rank: 16", f"rank: {number % 7}"))
    editor.change(uri, BASE.replace("rank: 16", "rank: 0"))
    # It answers meanwhile, and what it says in the end is of the last text.
    assert "rslora" in editor.complete(uri, *where(BASE, "rank"))
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == ["E0105"]
    assert len(editor.published[uri]) < 30
    editor.close(uri)


def test_the_process_that_checks_is_started_again(editor: Editor, place: Path) -> None:
    uri = editor.open(place / "base.yaml")
    editor.diagnostics(uri)
    os.kill(child_of(editor.server.pid), signal.SIGKILL)
    editor.change(uri, BASE.replace("rank: 16", "rank: 0"))
    editor.until(lambda: editor.logged or editor.published[uri][-1].version == editor.versions[uri])
    editor.change(uri, BASE.replace("rank: 16", "rank: -1"))
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == ["E0105"]
    editor.close(uri)


def child_of(number: int) -> int:
    """The process that a process has started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # one that has ended meanwhile
            if path.read_text().rpartition(")")[2].split()[1] == str(number):
                return int(path.parent.name)
    raise AssertionError(f"{number} has no child")


def test_diagnostics_of_the_flagship_come_while_one_types(editor: Editor) -> None:
    path = ROOT / "recipes" / "gemma4-31b-v5p8.yaml"
    uri, text = editor.open(path), path.read_text(encoding="utf-8")
    editor.diagnostics(uri)
    took = []
    for number in range(3):
        start = time.monotonic()
        editor.change(uri, f"{text}# {number}\n")
        editor.diagnostics(uri)
        took.append(time.monotonic() - start)
    print(f"diagnostics of {path.name}: {min(took):.2f} s after a change, a pause of 0.15 s in it")
    assert min(took) < 5
    editor.close(uri)


def test_a_check_that_takes_too_long_is_given_up(place: Path) -> None:
    """A regular expression may go on for years."""
    endless = BASE.replace("{rank: 16}", '{targets: ["(.*.*.*.*.*.*)*!"]}')

    async def asked() -> list[str]:
        process = Process()
        await process.start()
        try:
            with pytest.raises(Unanswered, match="check took more than 1 seconds"):
                await process.ask(1, "check", Document(str(place / "x.yaml"), endless))
            with pytest.raises(Unanswered, match="failed"):
                await process.ask(20, "check", None)
            made = await process.ask(20, "check", Document(str(place / "x.yaml"), "a: 1"))
        finally:
            process.stop()
        return [diagnostic.code for diagnostic in made.diagnostics]

    assert "E0101" in asyncio.run(asked())


def test_without_pygls_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from compiler.cli_lsp import lsp
    from compiler.errors import ArtifactError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match="needs pygls") as raised:
        lsp()
    assert raised.value.help == install("lsp")
