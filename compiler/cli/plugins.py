"""Commands that packages of their own add to `recipe`, such as port/.

Each is an entry point of the group `recipec.commands`, whose name is the command's and whose value is a
function that typer can run. It is imported only if it is asked for, or if all commands are listed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from recipec import ROOT
from recipec.compiler.errors import ArtifactError
from recipec.compiler.terminal import Commands, add_flags

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "recipec.commands"
PROJECT = ROOT / "pyproject.toml"


@functools.cache
def plugins() -> Mapping[str, EntryPoint]:
    """Return the entry points of all added commands by name.

    A checkout's pyproject.toml counts too, because an editable installation has the entry points that the
    file had when it was installed.
    """
    import tomllib
    from importlib.metadata import EntryPoint, entry_points

    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        for name, value in project.get("entry-points", {}).get(GROUP, {}).items():
            installed[name] = EntryPoint(name, value, GROUP)
    return installed


def _importable(entry: EntryPoint) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(entry.module) is not None
    except ModuleNotFoundError:
        return False


class AllCommands(Commands):
    """The commands of `recipe`, with those of other packages behind its own."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands whose packages are installed."""
        added = [name for name, entry in plugins().items() if _importable(entry)]
        return list(dict.fromkeys([*super().list_commands(ctx), *added]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name, None for an unknown name.

        Raises:
            ArtifactError: the command's package is missing.
        """
        command = super().get_command(ctx, cmd_name)
        if command is None and (entry := plugins().get(cmd_name)) is not None:
            if not _importable(entry):
                raise ArtifactError(
                    f"`recipe {cmd_name}` is in the module {entry.module}, which this installation lacks",
                    "install recipec again, from a clone or from its wheel",
                )
            command = _command(entry)
            add_flags(command)
            self.add_command(command, cmd_name)
        return command


def _command(entry: EntryPoint) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(entry.name)(entry.load())
    return typer.main.get_command(app)
