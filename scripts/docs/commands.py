"""The page of the commands, made from the command line itself."""

from __future__ import annotations

import functools
import re
from typing import Any

from scripts.docs.made import Page, heading

HEAD = """\
# Commands

Exit status 0: done; 1: the recipe or a check failed; 2: the command line was wrong; 130: stopped by Ctrl-C.
Findings and progress go to stderr, what was asked for goes to stdout. `recipe COMMAND --help` says the same
as this page.

Every command has `-q, --quiet` (print only errors), `-v, --verbose` (print what the command is doing) and
`--help`. RECIPE is the YAML file of a recipe. Most that take one have `--notes` (print notes in full)
and `--set PATH=VALUE`, which sets a key to a YAML value and may be repeated:
`--set train.steps=10 --set 'mesh.axes={fsdp: 2, tp: 2}'`. ARTIFACT is an artifact's folder: generated/NAME.
Where it is listed, `--json` prints JSON.

"""

SHARED = ("-q, --quiet", "-v, --verbose", "--help", "--notes", "--set PATH=VALUE")
"""Options that the head describes, once for all commands."""


@functools.cache
def pages() -> tuple[Page, ...]:
    """Return the one page."""
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from recipec.compiler.cli.main import app

    command: Any = get_command(app)
    context = typer.Context(command)
    commands = {name: command.get_command(context, name) for name in command.list_commands(context)}
    text = get_docs_for_click(obj=command, ctx=context, name="recipe")
    text = text[text.index("**Usage**") :].replace("```console\n$ ", "```text\n")
    # Each command under its own name, its whole first sentence in lists, and defaults that are not links.
    text = re.sub(
        r"^(#+) `recipe ([a-z -]+)`$",
        lambda m: heading(m[1], f"`recipe {m[2]}`", _anchor(m[2])),
        text,
        flags=re.M,
    )
    groups = {
        f"{name} ": command.commands for name, command in commands.items() if hasattr(command, "commands")
    }
    for group, names in {"": commands, **groups}.items():
        links = ", ".join(f"[`{name}`](#{_anchor(group + name)})" for name in names)
        text = re.sub(
            r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+", f"Commands: {links}\n", text, count=1, flags=re.M
        )
    text = re.sub(r"\s+\[(default: [^\]]*|required)\]", r" (\1)", text)
    for option in SHARED:
        text = re.sub(rf"^\* `{re.escape(option)}`: .*\n", "", text, flags=re.M)
    text = re.sub(
        r"^\* `RECIPE <(?:path|list\[Path\])>`: YAML files? of (?:a recipe|recipes)\. \(required\)\n"
        r"|^\* `ARTIFACT <path>`: An artifact's folder: generated/NAME\. \(required\)\n",
        "",
        text,
        flags=re.M,
    )
    text = re.sub(r"\*\*(?:Usage|Arguments|Options)\*\*:\n\n", "", text)
    # A usage says which arguments a command takes; the usage of a group says nothing more than its list.
    text = re.sub(r"```text\n(recipe .*) COMMAND \[ARGS\]\.\.\.\n```\n\n", "", text)
    text = re.sub(r"```text\n(?:recipe [a-z ]+) \[OPTIONS\]\n```\n", "", text)
    text = re.sub(r"```text\n(recipe [a-z ]+) \[OPTIONS\] (.+)\n```", r"`\1 \2`", text)
    return (Page("commands.md", "Commands", HEAD + re.sub("\n{3,}", "\n\n", text).rstrip("\n") + "\n"),)


def _anchor(command: str) -> str:
    return command.replace(" ", "-")
