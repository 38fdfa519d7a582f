"""Tests of a container's output in `recipe serve up`: whole lines, without secrets."""

from __future__ import annotations

import pytest

from recipec.compiler.serving.logs import Hider, Lines
from tests.serving.up_artifact import SENTINEL


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_log_in_chunks_of_any_size_hides_secrets(size: int) -> None:
    text = f"one ██\r\ntwo: {SENTINEL}\rthree\n\nfour {SENTINEL}{SENTINEL} é"
    lines = Lines(Hider([SENTINEL, ""]))
    data = text.encode()
    shown = "".join(lines.feed(data[at : at + size]) for at in range(0, len(data), size)) + lines.end()
    assert shown == text.replace(SENTINEL, "***") + "\n"


def test_log_without_newlines_hides_secrets() -> None:
    lines = Lines(Hider([SENTINEL]))
    data = (f"{'x' * 997}{SENTINEL}" * 200).encode()
    shown = "".join(lines.feed(data[at : at + 4096]) for at in range(0, len(data), 4096)) + lines.end()
    assert shown == f"{'x' * 997}***" * 200 + "\n"


def test_invalid_utf8_in_a_log_becomes_replacement_characters() -> None:
    lines = Lines(Hider([]))
    assert lines.feed(b"\xff\xfe\n\xe2") + lines.end() == "\ufffd\ufffd\n\ufffd\n"
