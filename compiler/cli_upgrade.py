"""The command `recipe upgrade`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from compiler.cli_base import DONE, FAILED, Format, Recipes, color, has_errors, note, on_ctrl_c, show, tell
from compiler.wording import plural

if TYPE_CHECKING:
    from spec.upgrade import File


def upgrade(
    recipes: Recipes,
    write: Annotated[
        bool, typer.Option("--write", help="Write the files; without it they are shown.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 when there is something to upgrade.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what is written, with --write too.")] = False,
) -> None:
    """Rewrite recipes of older versions of the language, with the files that they extend.

    Shows a diff of each file, as `patch` takes it. Comments, order and layout stay; what cannot be kept is
    refused.
    """
    from spec import versions
    from spec.load import display
    from spec.upgrade import upgrade as upgraded

    if write and check:
        raise typer.BadParameter("it writes nothing, and --write does", param_hint="--check")
    made = upgraded(recipes)
    show(made.diagnostics, Format.TEXT)
    if has_errors(made.diagnostics):
        raise typer.Exit(FAILED)
    changed = [file for file in made.files if file.changed]
    if not write or diff:
        for file in changed:
            _show_difference(file)
    if write:
        _write(changed)
    for file in made.files:
        name = display(file.path)
        if not file.changed:
            tell(f"{name}: up to date (version {versions.VERSION} of the language)")
        elif write:
            tell(f"{name}: version {file.version} -> {versions.VERSION}")
        else:
            note(f"{name}: of version {file.version}; version {versions.VERSION} is read")
    if changed and not write:
        note(f"{plural(len(changed), 'file')} to upgrade: --write writes what is shown")
    raise typer.Exit(FAILED if check and changed else DONE)


def _show_difference(file: File) -> None:
    from compiler.artifact import difference
    from spec.diagnostics import printable
    from spec.load import display
    from spec.versions import VERSION

    name = display(file.path)
    # What follows the tab is no part of the name to `patch`.
    text = difference(
        file.before.encode(), file.after.encode(), name, f"{name}\tversion {VERSION} of the language"
    )
    for line in text.splitlines(keepends=True):
        hue = {"-": "31", "+": "32", "@": "36"}.get(line[0])
        shown = printable(line) if sys.stdout.isatty() else line
        print(f"\x1b[{hue}m{shown[:-1]}\x1b[0m\n" if hue and color(sys.stdout) else shown, end="")


def _write(files: Sequence[File]) -> None:
    """Writes the files, unless one has been changed since it was read."""
    from compiler.errors import ArtifactError
    from compiler.new.files import write
    from spec.load import display

    for file in files:
        if file.path.read_bytes() != file.before.encode():
            raise ArtifactError(f"{display(file.path)} was changed meanwhile", "upgrade again")
    on_ctrl_c("each file is as it was, or upgraded; the same command goes on")
    write({}, {file.path.resolve(): file.after for file in files})
