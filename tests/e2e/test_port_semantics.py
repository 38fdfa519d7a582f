"""Tests of ports against LLaMA-Factory and Axolotl themselves: the same tokens, targets and modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from recipec.port.dialects.axolotl_data import plain_type, user_defined
from recipec.port.dialects.axolotl_prompts import PROMPTS
from recipec.port.meaning import templates
from recipec.runtime.data.encoding import Encoder, coding
from recipec.runtime.data.formats import PARSERS, ParsedSample
from recipec.runtime.settings import DataSettings
from tests.e2e import port_tools
from tests.runtime.chats import tokenizer

pytestmark = pytest.mark.nightly

TOOLS = ("axolotl==0.19.0", "llamafactory==0.9.5")


@pytest.fixture(scope="module")
def theirs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Collect the tools' results once for all tests."""
    wheels, sources = root / "build" / "dialects", tmp_path_factory.mktemp("sources")
    for tool in TOOLS:
        name = tool.replace("==", "-")
        if not list(wheels.glob(f"{name}-*.whl")):
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                str(wheels),
                tool,
            ]
            subprocess.run(command, check=True)
        (wheel,) = wheels.glob(f"{name}-*.whl")
        zipfile.ZipFile(wheel).extractall(sources)
    run = subprocess.run(
        [sys.executable, "-m", "tests.e2e.port_tools"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(sources)))},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def encoded(
    row: ParsedSample, template: str | None, format: str, loss_on: str
) -> tuple[list[int], list[bool]]:
    """Encode a row here, and return its tokens and which of them are targets."""
    data = DataSettings(train=(), format=format, loss_on=loss_on, max_length=8192, packing=False)
    samples, report = Encoder(coding(tokenizer(), template, data, None)).encode([row], 0)
    assert report.kept == 1, report
    return samples[0].tokens.tolist(), samples[0].targets.tolist()


def learned(labels: list[int]) -> list[bool]:
    """Return which tokens have a label. The first token is never predicted."""
    return [label != -100 and index > 0 for index, label in enumerate(labels)]


@pytest.mark.parametrize("name", templates.LLAMAFACTORY)
def test_ported_llamafactory_template_gives_the_same_tokens(theirs: Any, name: str) -> None:
    compared = 0
    for key, (ids, labels) in theirs["templates"].items():
        template, thinking, title, system = key.split("|")
        if template != name or (templates.LLAMAFACTORY[name].last and title == "two turns"):
            continue  # it trains on the next question's first token as an end of sequence: the port says so
        messages = port_tools.CONVERSATIONS[title]
        given = [{"role": "system", "content": system}, *messages] if system else messages
        made = templates.llamafactory(name, None, thinking == "True").sets["data.chat_template"]
        assert encoded(ParsedSample("x", messages=given), made, "chat", "assistant") == (
            ids,
            learned(labels),
        ), key
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("name", [*PROMPTS, "user_defined"])
def test_ported_axolotl_dataset_type_gives_the_same_prompts(theirs: Any, name: str) -> None:
    kind = user_defined(port_tools.OWN) if name == "user_defined" else plain_type(name)
    assert kind is not None
    namespace: dict[str, Any] = {}
    exec(kind.transform, namespace)
    for title, row in (("input", port_tools.ROW), ("none", {**port_tools.ROW, "input": ""})):
        made = PARSERS["prompt_completion"]("x", namespace["convert"](row), {})
        ids, labels = theirs["prompts"][f"{name}|{title}"]
        assert encoded(made, None, "prompt_completion", "completion") == (ids, learned(labels)), title


@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_texts_are_cut_as_by_axolotl_and_by_llamafactory_without_packing(theirs: Any, overlong: str) -> None:
    data = DataSettings(
        train=(),
        format="text",
        loss_on="all",
        overlong=overlong,
        max_length=port_tools.ROW_LENGTH,
        packing=False,
    )
    rows = [ParsedSample("x", completion=text) for text in port_tools.TEXTS]
    samples, _ = Encoder(coding(tokenizer(), None, data, None)).encode(rows, 0)
    assert [sample.tokens.tolist() for sample in samples] == theirs["texts"][overlong]
