"""`recipe explain`."""

from __future__ import annotations

from recipec.compiler.cli.arguments.recipes import ExplainArguments
from recipec.compiler.cli.printing import fail
from recipec.compiler.cli.reading import read
from recipec.compiler.explain.explain import explain as explained
from recipec.compiler.explain.explain import unknown_path
from recipec.compiler.pages.text import show as print_document


def explain(args: ExplainArguments) -> None:
    """Run `recipe explain`."""
    loaded, lowered = read(args.recipe, args.sets)
    problem = None if args.path is None else unknown_path(args.path, loaded)
    if problem is not None or lowered.program is None:
        fail(lowered.diagnostics if problem is None else [problem])
    print_document(explained(lowered.program, loaded, args.path))
