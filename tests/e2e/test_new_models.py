"""Tests of `recipe new` on a terminal, and for every model of the catalog."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from itertools import cycle
from pathlib import Path

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import catalog
from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.new.recipe import NewRecipeOptions, make
from recipec.compiler.new.source import NewData
from recipec.spec.load import load

BIN = Path(sys.executable).parent
ACCELERATORS = ("v5e-8", "v5p-8", "v6e-8", "tpu7x-8", "cpu-8")


def conversation(at: Path, *answers: tuple[str, str]) -> tuple[int, str]:
    """Run `recipe new demo` on a terminal.

    Args:
        answers: pairs of a printed text and what to type after it.
    """
    pid, end = pty.fork()
    if pid == 0:
        os.chdir(at)
        os.execv(BIN / "recipe", ["recipe", "new", "demo"])
    shown, left, deadline, seen = "", list(answers), time.monotonic() + 300, 0
    while time.monotonic() < deadline:
        if not select.select([end], [], [], 1)[0]:
            continue
        try:
            data = os.read(end, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data.decode()
        if left and left[0][0] in shown[seen:]:
            seen = len(shown)
            os.write(end, left.pop(0)[1].encode())
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(end)
    _, status = os.waitpid(pid, 0)
    assert not left, (left, shown)
    return os.waitstatus_to_exitcode(status), shown


@pytest.mark.e2e
def test_recipe_new_asks_for_missing_values(tmp_path: Path) -> None:
    at = tmp_path / "folder"
    at.mkdir()
    (at / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 300)
    status, shown = conversation(
        at,
        ("Model: ", "gemma-9\r"),
        ("is not in the catalog", "google/gemma-3-4b-it\r"),
        ("Accelerator [", "v6e-5\r"),
        ("the slices are", "v6e-4\r"),
        ("Data [", "chats.jsonl\r"),
        ("Serve on [", "\r"),
    )
    assert status == 0 and "Machines on which it fits" in shown, shown
    recipe = load(at / "demo.yaml").recipe
    assert recipe is not None
    assert (recipe.model.id, recipe.mesh.accelerator) == ("google/gemma-3-4b-it", "v6e-4")
    assert recipe.data.train[0].path == "chats.jsonl" and recipe.serve is None


@pytest.mark.nightly
def test_recipe_new_handles_every_catalog_model(tmp_path: Path) -> None:
    """Try all ids of the catalog: the written recipe passes its checks, or the refusal names machines.

    The first model of each family tries every machine, and the others try one.
    """
    known = {name: entry for name, entry in catalog.entries().items() if "unsupported" not in entry}
    families: set[str] = set()
    written, refused = 0, []
    for (name, entry), turn in zip(known.items(), cycle(ACCELERATORS), strict=False):
        format = "text" if entry.get("chat") is False else "chat"
        for accelerator in (turn,) if entry["family"] in families else ACCELERATORS:
            source = NewData("data/train.jsonl", format)
            asked = NewRecipeOptions(
                "a", name, from_name(accelerator), None, source, None, tmp_path / "a.yaml"
            )
            try:
                made = make(asked)
            except ArtifactError as error:
                refused.append((name, accelerator, str(error), error.help))
                continue
            worse = {d.code for d in made.diagnostics if d.severity != "note"}
            assert worse <= {"W0401", "W0805"}, name  # the recipe omits dropout within the model
            written += 1
        families.add(entry["family"])
    assert written >= 200 and len(refused) < 10, refused
    assert all("does not fit" in said and "it fits" in (help or "") for *_, said, help in refused), refused
