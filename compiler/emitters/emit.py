"""Turn a program into the files of its artifact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipec.compiler.artifacts.artifact import IGNORE, LOCK
from recipec.compiler.emitters import backends as other_backends
from recipec.compiler.emitters.data_files import data_files
from recipec.compiler.emitters.ignored import emit_ignored
from recipec.compiler.emitters.launch import emit_launch
from recipec.compiler.emitters.lock import emit_lock
from recipec.compiler.emitters.notebook import emit_notebook
from recipec.compiler.emitters.probe import emit_probe
from recipec.compiler.emitters.readme import emit_readme
from recipec.compiler.emitters.rollout import emit_rollout
from recipec.compiler.emitters.server import emit_bench, emit_evaluate, emit_serve, emit_smoke
from recipec.compiler.emitters.train import emit_merge, emit_train, requirements_text
from recipec.compiler.lowering import pins

if TYPE_CHECKING:
    from recipec.compiler.lowering.backend import Backend
    from recipec.compiler.lowering.program import Program


REQUIREMENTS = "requirements-train.txt"
"""The tested packages of train.py and merge.py."""


def emit(program: Program, backends: Sequence[Backend] = ()) -> dict[str, bytes]:
    """Return the contents of every file of generated/NAME/, by path relative to it, sorted.

    The same program gives the same bytes everywhere. Nothing here reads the clock, the environment or the
    machine. In the recipe's folder, only the files that the artifact copies are read.

    Args:
        backends: the backends besides Tunix that the artifact is built for.
    """
    texts = {
        "README.md": emit_readme(program, backends if program.family.tunix else ()),
        "recipe.yaml": program.text,
        "train.py": emit_train(program),
        "merge.py": emit_merge(program),
        **emit_probe(program),
        REQUIREMENTS: requirements_text(program, pins.training(program)),
        **other_backends.files(program, backends),
        **emit_rollout(program),
        **emit_serve(program),
        **emit_smoke(program),
        **emit_bench(program),
        **emit_evaluate(program),
        **emit_launch(program),
        **emit_notebook(program),
    }
    files = {path: text.encode() for path, text in texts.items()}
    files = data_files(program) | files
    files[IGNORE] = emit_ignored(program, files, backends).encode()
    files = dict(sorted(files.items()))
    files[LOCK] = emit_lock(program, files, backends).encode()
    return dict(sorted(files.items()))
