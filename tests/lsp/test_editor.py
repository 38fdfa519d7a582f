"""Tests of `recipe lsp` with a real client over its stdin and stdout."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lsprotocol import types

from recipec.compiler.lsp.frames import Frames
from recipec.compiler.lsp.process import Checked, EditorDocument, Process
from recipec.compiler.packages import install
from recipec.spec.language.section import E0105
from recipec.spec.load import MAX_BYTES
from tests.lsp.edited import BASE, CHILD, mended, recipe_check, recipe_explain, where
from tests.lsp.editor_client import Editor, checking

ROOT = Path(__file__).resolve().parents[2]

ERROR, WARNING = types.DiagnosticSeverity.Error, types.DiagnosticSeverity.Warning


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    (folder / "child.yaml").write_text(CHILD, encoding="utf-8")
    (folder / "train.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    (folder / "prepare.py").write_text("import re\n\n\ndef clean(row):\n    'Cleans.'\n    return row\n")
    return folder


@pytest.fixture(scope="module")
def editor(place: Path) -> Iterator[Editor]:
    made = Editor(place)
    yield made
    assert made.end() == 0


def test_diagnostics_match_recipe_check(editor: Editor, place: Path) -> None:
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
    assert unknown.code_description is None, "no page is known"


def test_notes_are_hints_and_a_comment_accepts_one(editor: Editor, place: Path) -> None:
    uri = editor.open(place / "base.yaml")
    assert {d.code: d.severity for d in editor.diagnostics(uri)}["N0227"] == types.DiagnosticSeverity.Hint
    editor.change(uri, BASE.replace("tp: 1}", "tp: 1}  # N0227: the other mesh is slower"))
    assert "N0227" not in {d.code for d in editor.diagnostics(uri)}
    editor.close(uri)
    editor.until(lambda: editor.published[uri][-1].diagnostics in ([], ()))


def test_diagnostics_follow_unsaved_edits(editor: Editor, place: Path) -> None:
    uri = editor.open(place / "base.yaml")
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == []
    editor.change(uri, BASE.replace("rank: 16", "rank: 0"))
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == ["E0105"]
    editor.change(uri, BASE)
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == []
    editor.close(uri)
    editor.until(lambda: editor.published[uri][-1].diagnostics in ([], ()))


def test_error_in_extended_base_is_reported_in_base_and_child(editor: Editor, place: Path) -> None:
    child, base = editor.open(place / "child.yaml"), editor.open(place / "base.yaml")
    assert [d for d in editor.diagnostics(child) if d.severity == ERROR] == []
    # The base is changed without saving: the server checks its dependents again.
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


def test_hover_explains_keys_values_and_diagnostics(
    editor: Editor, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    text = BASE + "remat: {policy: decoder}\n"
    uri = editor.open(place / "base.yaml", text)
    editor.diagnostics(uri)
    shown = editor.hover(uri, *where(text, "rank", 1))
    assert shown == f"```text\n{recipe_explain(place / 'base.yaml', text, 'lora.rank')}```"
    assert "trained parameters" in shown and "base.yaml:7" in shown
    shown = editor.hover(uri, *where(text, "decoder", 1))
    assert shown.startswith("```text\nremat.policy\n")
    shown = editor.hover(uri, *where(text, "train.jsonl", 1))
    assert shown.startswith("```text\ndata.train[0]\n")
    editor.change(uri, text.replace("rank: 16", "rank: 0"))
    editor.diagnostics(uri)
    shown = editor.hover(uri, *where(text, "rank: 16", 6))
    assert shown.startswith(f"**E0105: {E0105.heading}**\n\n{E0105.cause}")
    child = editor.open(place / "child.yaml")
    assert editor.hover(child, *where(CHILD, "train")).startswith("```text\ntrain\n")
    assert editor.hover(child, 0, 8) != "" and editor.hover(child, 99, 0) == ""
    editor.close(uri)
    editor.close(child)


def test_go_to_definition_leads_to_extended_base(editor: Editor, place: Path) -> None:
    child, base = editor.open(place / "child.yaml"), editor.open(place / "base.yaml")
    found = editor.definition(child, *where(CHILD, "base.yaml", 2))
    assert found is not None and found.uri == base
    found = editor.definition(child, *where(CHILD, "rank", 1))
    assert found is not None and found.uri == base
    assert found.range.start == types.Position(*where(BASE, "16"))
    # The server uses the editor's text of the base, not the file's.
    editor.change(base, f"# a line more\n{BASE}")
    found = editor.definition(child, *where(CHILD, "rank", 1))
    assert found is not None and found.range.start.line == where(BASE, "16")[0] + 1
    assert editor.definition(child, *where(CHILD, "seed", 1)) is None
    assert editor.definition(base, *where(BASE, "rank", 1)) is None
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
        (("prepare.py:clean", "prepare.py:claen"), ("a", "a"), "Change to `prepare.py:clean`"),
        (
            ("lora:", "serve: {extra_args: {compilation_config: {mod: 3}}}\nlora:"),
            ("lora:", "serve: {extra_args: {compilation_config: {mode: 3}}}\nlora:"),
            "Change to `mode`",
        ),
    ],
)
def test_quick_fix_gives_the_corrected_text(
    editor: Editor, place: Path, wrong: tuple[str, str], right: tuple[str, str], title: str
) -> None:
    text = BASE.replace(*wrong)
    uri = editor.open(place / "repaired.yaml", text)
    shown = next(d for d in editor.diagnostics(uri) if d.severity == ERROR)
    (action,) = [a for a in editor.actions(uri, shown.range) if a.title == title]
    assert action.edit is not None and action.edit.changes is not None
    assert mended(text, *action.edit.changes[uri]) == BASE.replace(*right)
    editor.close(uri)


@pytest.mark.parametrize(
    ("given", "lacking", "added"),
    [
        ("name: base\n", "", "name: gemma4-31b-codev\n"),
        ("{id: google/gemma-4-31B-it, ", "{", "{id: google/gemma-4-31B-it, "),
        (
            "[train.jsonl]",
            "\n    - weight: 1.0\n\n      limit: 3",
            "\n    - path: data/train.jsonl\n      weight: 1.0\n\n      limit: 3",
        ),
    ],
)
def test_quick_fix_adds_missing_required_key(
    editor: Editor, place: Path, given: str, lacking: str, added: str
) -> None:
    text = BASE.replace(given, lacking)
    uri = editor.open(place / "repaired.yaml", text)
    (shown,) = [d for d in editor.diagnostics(uri) if d.code == "E0102"]
    (action,) = editor.actions(uri, shown.range)
    assert action.edit is not None and action.edit.changes is not None
    assert mended(text, *action.edit.changes[uri]) == BASE.replace(given, added)
    editor.close(uri)


def test_quick_fix_removes_conflicting_key_only_if_on_its_own_line(editor: Editor, place: Path) -> None:
    text = f"{BASE}checkpoint: {{directory: gs://bucket/run}}\nlaunch:\n  spot: true\n"
    uri = editor.open(place / "removed.yaml", f"{text}  reservation: ours   # of March\n")
    (shown,) = [d for d in editor.diagnostics(uri) if d.code == "E1304"]
    (action,) = editor.actions(uri, shown.range)
    assert action.title == "Remove the line"
    assert action.edit is not None and action.edit.changes is not None
    assert mended(f"{text}  reservation: ours   # of March\n", *action.edit.changes[uri]) == text
    editor.change(uri, text.replace("\n  spot: true", " {spot: true, reservation: ours}"))
    (shown,) = [d for d in editor.diagnostics(uri) if d.code == "E1304"]
    assert editor.actions(uri, shown.range) == []
    editor.close(uri)


def test_positions_count_wide_characters_in_utf16_units(editor: Editor, place: Path) -> None:
    text = "# 🙂🙂\n" + BASE.replace("{rank: 16}", '{targets: ["🙂🙂", q_porj], rank: 16}')
    uri = editor.open(place / "wide.yaml", text)
    found = [d for d in editor.diagnostics(uri) if d.severity == ERROR and "q_porj" in d.message]
    line, character = where(text, "q_porj")
    # Each of two characters before it is two units of UTF-16.
    assert found[0].range.start == types.Position(line, character + 2)
    (action,) = editor.actions(uri, found[0].range)
    assert action.edit is not None and action.edit.changes is not None
    edited = types.Range(found[0].range.start, types.Position(line, character + 2 + len("q_porj")))
    assert list(action.edit.changes[uri]) == [types.TextEdit(edited, "q_proj")]
    editor.change(uri, text.replace("q_porj", "q_proj").replace("🙂🙂", "k_proj"))
    shown = editor.hover(uri, *where(text.replace("🙂🙂", "k_proj"), "q_porj", 1))
    assert shown.startswith("```text\nlora.targets\n")
    editor.close(uri)


def test_server_survives_malformed_and_foreign_files(editor: Editor, place: Path) -> None:
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
    b"Content-Length: -5\r\n\r\n" + ASKED,
    b"Content-Length: " + b"9" * 100_000 + b"\r\n\r\n" + ASKED,
    b"Content-Length: many\r\n\r\n" + ASKED * 3_000,
)


@pytest.mark.parametrize("sent", UNSIZED, ids=range(len(UNSIZED)))
def test_message_with_invalid_content_length_is_skipped(
    sent: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Frames(io.BytesIO(sent + framed(b"{}") + framed(b"[1]")))
    for body in (b"{}", b"[1]"):
        assert stream.readline() == b"Content-Length: %d\r\n" % len(body)
        assert stream.readline() == b"\r\n"
        assert stream.read(len(body)) == body
    assert stream.readline() == b""
    assert capsys.readouterr().err == f"{SKIPPED}\n"


def test_server_logs_malformed_messages_to_stderr_and_continues() -> None:
    begin = framed(b'{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"capabilities": {}}}')
    bad = UNSIZED[1], *map(framed, (b"{no JSON", b"[" * 100_000, ASKED, b'{"jsonrpc": "2.0", "method": 5}'))
    end = framed(b'{"jsonrpc": "2.0", "id": 2, "method": "shutdown"}')
    end += framed(b'{"jsonrpc": "2.0", "method": "exit"}')
    command, sent = [sys.executable, "-m", "recipec.compiler.cli.main", "lsp"], b"".join((begin, *bad, end))
    done = subprocess.run(command, input=sent, capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, b'"id": 2' in done.stdout) == (0, True)
    lines = done.stderr.decode().splitlines()
    assert lines[0] == SKIPPED and len(lines) > len(bad) and max(map(len, lines)) <= 300
    assert all(line.startswith(("pygls.server: ", "pygls.protocol.json_rpc: ")) for line in lines[1:])


def test_server_handles_large_file_and_coalesces_rapid_changes(editor: Editor, place: Path) -> None:
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
    # The server answers meanwhile, and its last diagnostics are those of the last text.
    assert editor.definition(uri, *where(BASE, "rank")) is None
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == ["E0105"]
    assert len(editor.published[uri]) < 30
    editor.close(uri)


def test_killed_check_process_is_restarted(editor: Editor, place: Path) -> None:
    uri = editor.open(place / "base.yaml")
    editor.diagnostics(uri)
    os.kill(checking(editor.server.pid), signal.SIGKILL)
    editor.change(uri, BASE.replace("rank: 16", "rank: 0"))
    editor.until(lambda: editor.logged or editor.published[uri][-1].version == editor.versions[uri])
    editor.change(uri, BASE.replace("rank: 16", "rank: -1"))
    assert [d.code for d in editor.diagnostics(uri) if d.severity == ERROR] == ["E0105"]
    editor.close(uri)


def test_check_process_recovers_after_timeout_and_failure(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    """Try a regular expression that would run for years."""
    endless = BASE.replace("{rank: 16}", '{targets: ["(.*.*.*.*.*.*)*!"]}')
    path, told = str(place / "x.yaml"), list[str]()

    async def asked() -> Checked:
        monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the process sets it permanently; the patch undoes it
        process = Process(told.append)
        try:
            await process.ask("ready")
            process.seconds = 0.3
            assert await process.ask("check", EditorDocument(path, endless)) is None
            process.seconds = 60
            assert await process.ask("check", None) is None
            made = await process.ask("check", EditorDocument(path, "a: 1"))
        finally:
            process.stop()
        assert isinstance(made, Checked)
        return made

    assert "E0101" in [found.code for found, _ in asyncio.run(asked()).diagnostics]
    assert told[0] == "check took more than 0.3 seconds" and told[1].startswith(
        "check failed: AttributeError"
    )
    assert len(told) == 2


def test_lsp_without_pygls_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:

    from recipec.compiler.cli import lsp
    from recipec.compiler.cli.arguments.editors import LspArguments
    from recipec.compiler.errors import ArtifactError

    monkeypatch.setattr(lsp, "find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match="needs pygls") as raised:
        lsp.lsp(LspArguments())
    assert raised.value.help == install("lsp")
