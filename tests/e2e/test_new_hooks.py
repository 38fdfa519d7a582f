"""Tests of the files of `recipe new` in their programs: pre-commit, bash and a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import pytest

from recipec.compiler import catalog
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.new.data_source import NewData
from recipec.compiler.new.new_recipe import NewRecipeOptions, make
from recipec.spec.load import load

BIN = Path(sys.executable).parent
ACCELERATORS = ("v5e-8", "v5p-8", "v6e-8", "tpu7x-8", "cpu-8")


def environment(home: Path) -> dict[str, str]:
    """Return an environment without the user's own git and bash settings."""
    own = {"HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}", "PRE_COMMIT_HOME": str(home / "cache")}
    names = {f"GIT_{who}_{what}": "someone" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return {**os.environ, **own, **names, "GIT_CONFIG_NOSYSTEM": "1"}


def run(*words: str, at: Path, ok: bool = True) -> str:
    done = subprocess.run(
        words, cwd=at, env=environment(at.parent), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert (done.returncode == 0) is ok, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


@pytest.mark.e2e
def test_pre_commit_hooks_pass_built_recipes_and_block_bad_ones(tmp_path: Path) -> None:
    at = tmp_path / "repository"
    at.mkdir()
    run("git", "init", "--quiet", at=at)
    words = ("--model", "google/gemma-3-1b-it", "--accelerator", "v6e-1")
    run("recipe", "new", "demo", *words, "--pre-commit", "--github", at=at)
    run("recipe", "build", "recipes/demo.yaml", at=at)
    run("pre-commit", "install", at=at)
    run("git", "add", "--all", at=at)
    said = run("git", "commit", "--message", "a recipe", at=at)
    assert re.search(r"recipe check\.+Passed", said) and re.search(r"recipe build --check\.+Passed", said)

    recipe = at / "recipes/demo.yaml"
    whole = recipe.read_text()
    recipe.write_text(whole.replace("fsdp: 1", "fsdp: 3"))
    run("git", "add", "--all", at=at)
    said = run("git", "commit", "--message", "a bad one", at=at, ok=False)
    assert "error[E0202]" in said and re.search(r"recipe check\.+Failed", said)

    recipe.write_text(whole.replace("rank: 16", "rank: 8"))
    run("git", "add", "--all", at=at)
    said = run("git", "commit", "--message", "not built", at=at, ok=False)
    assert re.search(r"recipe check\.+Passed", said) and re.search(r"recipe build --check\.+Failed", said)
    assert run("git", "log", "--format=%s", at=at) == "a recipe\n"


@pytest.mark.e2e
def test_bash_completion_offers_commands(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = tmp_path / "completion.sh"
    env = environment(tmp_path)
    shown = subprocess.run(
        [bash, "-c", "recipe --show-completion bash || recipe --show-completion"],
        capture_output=True,
        text=True,
        env=env,
    )
    script.write_text(shown.stdout)

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("recipe", *words))
        command = (
            f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
            '$(complete -p recipe | sed "s/.*-F \\([^ ]*\\).*/\\1/") recipe; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run([bash, "-c", command], capture_output=True, text=True, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert completed("bui") == ["build"]


def conversation(at: Path, *answers: tuple[str, str]) -> tuple[int, str]:
    """Run `recipe new demo` on a terminal.

    Args:
        answers: pairs of a printed text and what to type after it.
    """
    pid, end = pty.fork()
    if pid == 0:
        os.chdir(at)
        os.execve(BIN / "recipe", ["recipe", "new", "demo"], environment(at.parent))
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
def test_recipe_new_asks_for_missing_values_and_completes_answers(tmp_path: Path) -> None:
    at = tmp_path / "repository"
    at.mkdir()
    run("git", "init", "--quiet", at=at)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (at / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 300)
    status, shown = conversation(
        at,
        ("Model: ", "gemma-9\r"),
        ("is not in the catalog", "google/gemma-3-4b-i\t\r"),
        ("Accelerator [", "v6e-5\r"),
        ("the slices are", "v6e-4\r"),
        ("Data [", "chats.j\t\r"),
        ("Serve on [", "\r"),
        ("at each push?", "y\r"),
        ("before each commit?", "y\r"),
    )
    assert status == 0 and "Machines on which it fits" in shown, shown
    recipe = load(at / "demo.yaml").recipe
    assert recipe is not None
    assert (recipe.model.id, recipe.mesh.accelerator) == ("google/gemma-3-4b-it", "v6e-4")
    assert recipe.data.train[0].path == "chats.jsonl" and recipe.serve is None
    assert (at / ".github/workflows/recipes.yml").is_file() and (at / ".pre-commit-config.yaml").is_file()


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
