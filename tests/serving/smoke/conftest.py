"""Fixture that runs smoke against a server."""

from __future__ import annotations

import re

import pytest

from recipec.runtime.serving import smoke
from tests.serving.fake_vllm import FakeVllm
from tests.serving.smoke.runs import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run smoke, and return its exit status and output, with URL for addresses and N for times."""

    def run(server: FakeVllm | str, *arguments: object, model: str = "tuned") -> tuple[int, str]:
        url = server if isinstance(server, str) else server.url
        status = smoke.main(["--url", url, "--model", model, *map(str, arguments)])
        captured = capsys.readouterr()
        out = captured.out + captured.err
        out = out.replace(url, "URL")
        out = re.sub(r" +\d+\.\d s(?=  |$|;)", " N s", out, flags=re.MULTILINE)
        return status, re.sub(
            r"\d+ ms|\d\.\d\d s", "N ms", re.sub(r"then [\d.e+]+ tokens", "then N tokens", out)
        )

    return run
