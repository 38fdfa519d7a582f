"""The command line's parser, which typer builds from the arguments of the command that is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from recipec.compiler.cli.commands import Command, Group, command_of, names
from recipec.compiler.terminal import Commands, add_flags


class AllCommands(Commands):
    """The commands of `recipe`. Each is built for typer when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name, None for an unknown name.

        Raises:
            ArtifactError: the command's package is missing.
        """
        if cmd_name not in self.commands and (command := command_of(cmd_name)) is not None:
            built = _built(cmd_name, command)
            add_flags(built)
            self.add_command(built, cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, without building each one's options."""
        listed: dict[str, Any] = {
            name: TyperCommand(name, help=_help(command)) for name in names() if (command := command_of(name))
        }
        TyperGroup(commands=listed).format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a command line. An error about an unknown one suggests similar names."""
        if args and self.get_command(ctx, args[0]) is None:
            for name in names():
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


class _Subcommands(TyperGroup):
    """A group whose default subcommand gets the words of a line that names no subcommand."""

    default = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name for param in self.params for name in param.opts} | {*ctx.help_option_names}
        first = next((word for word in args if word not in flags), None)
        asks = first is None and (ctx.resilient_parsing or set(args) & {*ctx.help_option_names})
        as_typed = not self.default or first in self.commands or asks
        return super().parse_args(ctx, args if as_typed else [self.default, *args])


def _help(command: Command | Group) -> str | None:
    if isinstance(command, Group):
        return command.help
    return inspect.getdoc(resolve_name(command.arguments))


def _built(name: str, command: Command | Group) -> Any:
    """Return a command as typer builds it."""
    app = typer.Typer(
        cls=_Subcommands,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    if isinstance(command, Command):
        app.command(name)(_callback(command))
        return typer.main.get_command(app)
    app.callback(help=command.help, no_args_is_help=not command.default, subcommand_metavar=command.usage)(
        lambda: None
    )
    for inner, subcommand in command.commands.items():
        app.command(inner)(_callback(subcommand))
    group: Any = typer.main.get_command(app)
    group.name = name
    group.default = command.default
    return group


def _callback(command: Command) -> Callable[..., object]:
    """Return a function with the signature of a command's arguments, which imports and calls its work."""
    arguments = resolve_name(command.arguments)

    def run(**values: Any) -> object:
        return resolve_name(command.work)(arguments(**values))

    run.__doc__ = inspect.getdoc(arguments)
    run.__annotations__ = get_type_hints(arguments, include_extras=True)
    run.__signature__ = inspect.signature(arguments, eval_str=True)  # type: ignore[attr-defined]
    return run
