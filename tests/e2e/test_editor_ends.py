"""Tests of how `recipe lsp` ends (its editor, a signal, a closed pipe), and of what editors may ask."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from lsprotocol import types

from tests.lsp.editor_client import Editor, checking

pytestmark = pytest.mark.e2e

INITIALIZE = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"capabilities":{}}}'


def framed(message: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%s" % (len(message), message)


@pytest.mark.parametrize(
    ("given", "output", "said"),
    [
        (
            b"garbage\n" + framed(b"{nope"),
            subprocess.PIPE,
            "the editor closed the connection without ending the session",
        ),
        (framed(INITIALIZE), "/dev/full", "cannot write to the editor: No space left on device"),
    ],
    ids=["nonsense", "does not listen"],
)
def test_invalid_input_or_full_output_ends_lsp_with_one_sentence(
    given: bytes, output: int | str, said: str
) -> None:
    command = [sys.executable, "-m", "recipec.compiler.cli.main", "lsp"]
    with open(output, "wb") if isinstance(output, str) else nullcontext(output) as stdout:
        done = subprocess.run(command, input=given, stdout=stdout, stderr=subprocess.PIPE, timeout=300)
    errors = done.stderr.decode()
    assert done.returncode == 1 and errors.endswith(f"error: {said}\n")
    assert "Traceback" not in errors and len(errors.splitlines()) < 5


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signal_ends_lsp_and_its_checker_process(tmp_path: Path, sent: int, status: int) -> None:
    editor = Editor(tmp_path)
    uri = editor.open(tmp_path / "a.yaml", "recipe: 1\n")
    assert editor.diagnostics(uri) != []
    checks = checking(editor.server.pid)
    os.kill(editor.server.pid, sent)
    assert editor.gone() == status
    end = time.monotonic() + 60
    while Path(f"/proc/{checks}").exists():
        assert time.monotonic() < end, "what checks goes on"
        time.sleep(0.1)


def test_lsp_uses_the_editors_position_encoding_and_docs_url(tmp_path: Path) -> None:
    editor = Editor(tmp_path, ("utf-8",), {"docs": "https://docs.example.com/diagnostics/"})
    assert editor.initialized.capabilities.position_encoding == "utf-8"
    text = (
        "recipe: 1\nname: wide\nmodel: {id: google/gemma-4-31B-it}\n"
        "mesh: {accelerator: v5p-8, axes: {fsdp: 4}}\ndata: {train: [a.jsonl]}\n"
        'lora: {targets: ["🙂", q_porj]}\n'
    )
    uri = editor.open(tmp_path / "wide.yaml", text)
    found = [d for d in editor.diagnostics(uri) if "q_porj" in d.message]
    line, character = 5, text.split("\n")[5].index("q_porj")
    assert found[0].range.start == types.Position(line, character + 3)
    assert found[0].code_description is not None
    href = found[0].code_description.href
    assert re.fullmatch(r"https://docs\.example\.com/diagnostics/#e0302-[a-z0-9-]+", href)
    # The editor disconnects without a message.
    assert editor.server.stdin is not None
    editor.server.stdin.close()
    assert editor.gone() == 1
