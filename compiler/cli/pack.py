"""`recipe pack`."""

from __future__ import annotations

from recipec.compiler.cli.arguments.recipes import PackArguments
from recipec.compiler.cli.builds import complete_build
from recipec.compiler.pack import pack as packed
from recipec.compiler.terminal import result


def pack(args: PackArguments) -> None:
    """Run `recipe pack`."""
    complete_build(args.folder)
    result(str(packed(args.name, args.folder, args.recipe, args.output)))
