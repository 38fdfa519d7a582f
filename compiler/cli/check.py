"""`recipe check`."""

from __future__ import annotations

from recipec.compiler import store
from recipec.compiler.cli.arguments.recipes import CheckArguments
from recipec.compiler.cli.printing import fail, show
from recipec.compiler.cli.together import read_together
from recipec.compiler.terminal import tell
from recipec.spec.diagnostics import has_errors, in_order


def check(args: CheckArguments) -> None:
    """Run `recipe check`."""
    pairs, diagnostics = read_together(args.recipes, args.sets)
    if not has_errors(diagnostics) and store.folder().is_dir():
        # Only where something was planned before: planning takes a tenth of a check to import.
        from recipec.compiler.cli.planned import planned_before

        diagnostics += planned_before(pairs)
    diagnostics = in_order(diagnostics)
    if has_errors(diagnostics):
        fail(diagnostics, args.format)
    show(diagnostics, args.format)
    if args.format == "text":
        for path in args.recipes:
            tell(f"{path}: ok")
