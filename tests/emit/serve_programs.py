"""Helpers for the tests of serve/: programs with other serve sections, and the words that files lead to."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emitting import program_of

from recipec.compiler.emitters.server import emit_serve
from recipec.compiler.lowering.program import Program
from recipec.compiler.vllm.container import Container, container
from recipec.spec.language import Serve


def served(program: Program, **changes: Any) -> Program:
    """Change the program's serve section; keys of other sections are written section__key.

    Only the language validates the changes. The checks do not run, because these tests do not test what vLLM
    serves.
    """
    recipe = program.recipe
    assert recipe.serve is not None
    for name in [name for name in changes if "__" in name]:
        section, _, key = name.partition("__")
        changed = getattr(recipe, section).model_copy(update={key: changes.pop(name)})
        recipe = recipe.model_copy(update={section: changed})
    recipe = recipe.model_copy(update={"name": changes.pop("name", recipe.name)})
    serve = Serve.model_validate(recipe.serve.model_dump() | changes)
    return replace(program, recipe=recipe.model_copy(update={"serve": serve}))


@functools.cache
def base(*sets: str) -> Program:
    """Return the program of the recipe that these tests vary, without its folder."""
    with tempfile.TemporaryDirectory() as folder:
        return program_of(Path(folder), sets)


def server_of(program: Program) -> Container:
    return container(program.recipe, program.family.name)


def variant(*sets: str, **changes: Any) -> dict[str, str]:
    """Return the files of serve/ for a recipe."""
    return emit_serve(served(base(*sets), **changes))


def image_words(dockerfile: str) -> list[str]:
    """Return the words that the image runs."""
    entry = dockerfile.partition("\nENTRYPOINT ")[2].replace("\\\n", "")
    words: list[str] = json.loads(entry)
    return words


def image_environment(dockerfile: str) -> dict[str, str]:
    """Return the image's variables, as Docker reads double quotes.

    A backslash only escapes these three characters.
    """
    found = re.findall(r'^ENV ([A-Za-z0-9_]+)="(.*)"$', dockerfile, re.MULTILINE)
    assert len(found) == len(re.findall(r"^ENV ", dockerfile, re.MULTILINE))
    for _, value in found:
        assert re.fullmatch(r'([^"\\$]|\\["\\$])*', value), value
    return {name: re.sub(r'\\(["\\$])', r"\1", value) for name, value in found}


TOOLS = ("bash", "sh", "dirname", "mkdir", "touch", "env", "sed")
"""The tools that serve.sh and the stubs need."""


@dataclass(frozen=True)
class Ran:
    """The result of a script.

    Attributes:
        words, environment: of the vllm that it started; () and {} if it started none.
        copied: the words of each gcloud call.
        client: the words of its Python call.
    """

    status: int
    stderr: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    copied: tuple[tuple[str, ...], ...]
    client: tuple[str, ...]


STUBS = {
    "python3": 'printf "%s\\0" "$@" > "$STUBS/python3.words"',
    "vllm": 'printf "%s\\0" vllm "$@" > "$STUBS/vllm.words"; env --null > "$STUBS/vllm.env"',
    "gcloud": 'printf "%s\\0" "$@" > "$STUBS/gcloud.words.$$"; for last; do :; done; '
    'touch "$last/config.json" "$last/adapter_config.json" "$last/generation_config.json"',
}
"""Commands that record their arguments. The gcloud among them copies empty files."""


def run_script(
    folder: Path, script: str, *arguments: str, stubs: Sequence[str] = ("vllm", "gcloud"), **environ: str
) -> Ran:
    """Run a script as folder/serve/run.sh, with stubs that record their arguments."""
    (folder / "serve").mkdir(exist_ok=True)
    (folder / "serve/run.sh").write_text(script, encoding="utf-8")
    records = folder / "stubs"
    records.mkdir(exist_ok=True)
    for old in records.iterdir():
        old.unlink()
    for name in stubs:
        (records / name).write_text(f"#!/bin/sh\n{STUBS[name]}\n")
        (records / name).chmod(0o755)
    # Hide the rest of this machine, which may have its own gcloud or vllm.
    for name in TOOLS:
        (records / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(records), "HOME": str(folder), "STUBS": str(records), **environ}
    command = ["bash", str(folder / "serve/run.sh"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60)
    return Ran(
        done.returncode,
        done.stderr.decode(),
        _parts(records / "vllm.words"),
        dict(pair.split("=", 1) for pair in _parts(records / "vllm.env")),
        tuple(_parts(path) for path in sorted(records.glob("gcloud.words.*"))),
        _parts(records / "python3.words"),
    )


def _parts(path: Path) -> tuple[str, ...]:
    return tuple(os.fsdecode(path.read_bytes()).split("\0")[:-1]) if path.exists() else ()


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Expand a container's word as Kubernetes does: $(NAME) if NAME is set, and $$ to one $."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda found: "$" if found[1] == "$" else environment.get(found[2], found[0]),
        text,
    )
