"""The arguments of `recipe lsp` and `recipe schema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class LspArguments:
    """Run the language server for editors, over stdin and stdout.

    The editor starts it. docs/editors.md explains how, for each editor.
    """

    stdio: Annotated[bool, typer.Option("--stdio", help="Use stdin and stdout, as always.", hidden=True)] = (
        True
    )


@dataclass(frozen=True)
class SchemaArguments:
    """Print the JSON Schema of the language."""
