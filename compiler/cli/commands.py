"""The commands of `recipe`: for each, where its arguments are declared, and what does its work.

The module of the arguments is imported to parse a command line, or to print help. The module that does the
work is imported when the command runs, so it has its imports at the top. Packages of their own, such as
port/, add a command by an entry point of the group `recipec.commands`, whose value is a `Command`.
"""

from __future__ import annotations

import functools
import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipec import ROOT
from recipec.compiler.errors import ArtifactError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "recipec.commands"
PROJECT = ROOT / "pyproject.toml"


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        arguments: the dataclass of its arguments, as "module:name". typer reads its fields, and its docstring
            is the help text.
        work: the function that gets these arguments, as "module:name".
    """

    arguments: str
    work: str


@dataclass(frozen=True)
class Group:
    """A command with subcommands.

    Attributes:
        help: its help text.
        commands: the subcommands by name.
        default: the subcommand that runs if the first word is no subcommand; "" to refuse other words.
        usage: the arguments in the line of its usage.
    """

    help: str
    commands: Mapping[str, Command]
    default: str = ""
    usage: str = "COMMAND [ARGS]..."


def _own(arguments: str, work: str) -> Command:
    """Return a command whose modules are in this folder."""
    return Command(f"recipec.compiler.cli.arguments.{arguments}", f"recipec.compiler.cli.{work}")


COMMANDS: Mapping[str, Command | Group] = {
    "build": _own("recipes:BuildArguments", "build:build"),
    "check": _own("recipes:CheckArguments", "check:check"),
    "explain": _own("recipes:ExplainArguments", "explain:explain"),
    "card": _own("recipes:CardArguments", "card:card"),
    "pack": _own("recipes:PackArguments", "pack:pack"),
    "diff": _own("recipes:DiffArguments", "diff:diff"),
    "new": _own("new:NewArguments", "new:new"),
    "parity": _own("runs:ParityArguments", "parity:parity"),
    "plan": _own("planning:PlanArguments", "plan:plan"),
    "calibrate": _own("planning:CalibrateArguments", "calibrate:calibrate"),
    "cost": _own("planning:CostArguments", "cost:cost"),
    "report": _own("runs:ReportArguments", "report:report"),
    "sweep": _own("runs:SweepArguments", "sweep:sweep"),
    "watch": _own("runs:WatchArguments", "watch:watch"),
    "lsp": _own("editors:LspArguments", "lsp:lsp"),
    "chat": _own("trained:ChatArguments", "chat:chat"),
    "push": _own("trained:PushArguments", "push:push"),
    "schema": _own("editors:SchemaArguments", "schema:schema"),
    "rehearse": _own("runs:RehearseArguments", "rehearse:rehearse"),
    "preview": _own("recipes:PreviewArguments", "preview:preview"),
    "adapters": Group(
        "Combine PEFT adapters.",
        {"merge": _own("trained:MergeAdaptersArguments", "adapters:merge")},
    ),
    "models": Group(
        "List the models of the catalog, or add one from the Hugging Face hub.",
        {
            "list": _own("models:ListModelsArguments", "models:list_models"),
            "add": _own("models:AddModelArguments", "models:add_model"),
        },
        default="list",
        usage="[WORD] | COMMAND [ARGS]...",
    ),
    "serve": Group(
        "Pin a server's image, run it, measure it and compare its answers.",
        {
            "pin": _own("serve:PinArguments", "serve:pin"),
            "up": _own("serve:UpArguments", "serve:up"),
            "down": _own("serve:DownArguments", "serve:down"),
            "bench": _own("serve:BenchArguments", "serve:bench"),
            "verify": _own("serve:VerifyArguments", "serve:verify"),
        },
    ),
}
"""The commands in the order of `recipe --help`."""


@functools.cache
def plugins() -> Mapping[str, EntryPoint]:
    """Return the entry points of all added commands by name.

    A checkout's pyproject.toml counts too, because an editable installation has the entry points that the
    file had when it was installed.
    """
    from importlib.metadata import EntryPoint, entry_points

    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        for name, value in project.get("entry-points", {}).get(ENTRY_POINTS, {}).items():
            installed[name] = EntryPoint(name, value, ENTRY_POINTS)
    return installed


def _importable(entry: EntryPoint) -> bool:
    try:
        return importlib.util.find_spec(entry.module) is not None
    except ModuleNotFoundError:
        return False


def names() -> list[str]:
    """Return the names of all commands whose packages are installed: those of COMMANDS, then added ones."""
    added = [name for name, entry in plugins().items() if _importable(entry)]
    return list(dict.fromkeys([*COMMANDS, *added]))


def command_of(name: str) -> Command | Group | None:
    """Return the command of a name; None for an unknown name.

    Raises:
        ArtifactError: the command's package is missing.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    if (entry := plugins().get(name)) is None:
        return None
    if not _importable(entry):
        raise ArtifactError(
            f"`recipe {name}` is in the module {entry.module}, which this installation lacks",
            "install recipec again, from a clone or from its wheel",
        )
    added: Command = entry.load()
    return added
