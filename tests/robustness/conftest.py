"""Fixtures that run `recipe` under odd conditions: see fork_server.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inside import RECIPE, Done, Run, fill, recipe


@pytest.fixture(scope="session")
def server(root: Path) -> Iterator[Callable[[dict[str, Any]], Done]]:
    """Start a process that runs `recipe` on request."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # The script's own folder too, which Python omits if PYTHONSAFEPATH is set.
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(Path(__file__).parent)])},
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    source, sink = process.stdout, process.stdin

    def ask(request: dict[str, Any]) -> Done:
        sink.write(json.dumps(request) + "\n")
        sink.flush()
        return Done(**json.loads(source.readline()))

    yield ask
    sink.close()
    assert process.wait(30) == 0


@pytest.fixture
def run(server: Callable[[dict[str, Any]], Done], tmp_path: Path) -> Run:
    """Return a function that runs a command in `tmp_path`, which holds a recipe, under named conditions."""

    def run(*arguments: str | Path, **conditions: Any) -> Done:
        return server({"arguments": [str(a) for a in arguments], "cwd": str(tmp_path), **conditions})

    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return run


CONFIG = "base_model: meta-llama/Llama-3.2-1B-Instruct\nadapter: lora\nlora_r: 8\nsequence_len: 512\n"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Write bad files into the working folder, and return their names by kind."""
    folder = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder / "home"))
        names = fill(folder)
        (folder / "config.yaml").write_text(CONFIG)
        assert recipe("build", "good.yaml", "-o", "built").status == 0
        yield names
        (folder / "locked").chmod(0o700)
