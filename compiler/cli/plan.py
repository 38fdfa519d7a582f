"""`recipe plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from recipec.compiler.cli.arguments.planning import PlanArguments
from recipec.compiler.cli.arguments.shared_arguments import Format
from recipec.compiler.cli.guard import DONE, FAILED
from recipec.compiler.cli.planning import kept, progress_line, refuse_backend, refused_flags
from recipec.compiler.cli.printing import show
from recipec.compiler.cli.reading import read_program
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages import html
from recipec.compiler.pages.document import Document
from recipec.compiler.pages.text import WIDTH
from recipec.compiler.pages.text import show as print_document
from recipec.compiler.plan import plan_session
from recipec.compiler.plan.plan_document import document, first_document
from recipec.compiler.plan.planner import settings
from recipec.compiler.plan.results import Plan
from recipec.compiler.plan.search import SearchInterrupted
from recipec.compiler.plan.search_document import document as search_document
from recipec.compiler.plan.server_step.server_search import plan_serve
from recipec.compiler.roofline.server_text import document as serving_document
from recipec.compiler.terminal import manner, note, result, say
from recipec.compiler.writing import demand_writable, write_text
from recipec.spec.diagnostics import has_errors


def plan(args: PlanArguments) -> None:
    """Run `recipe plan`."""
    format: Format = "json" if args.as_json else "text"
    loaded, lowered, program = read_program(args.recipe, args.sets, format, planning=True)
    refuse_backend(loaded, program, args.backend, format)
    _refuse_early(program, args.serve, args.html)
    options = plan_session.PlanOptions(
        tuple(args.sets or ()),
        args.exact,
        args.search,
        args.most,
        args.free_batch,
        args.model,
        args.data_dir,
        args.backend,
    )
    first = None if args.as_json else _show_first
    try:
        with refused_flags(loaded, format), progress_line(f"planning {program.name}") as progress:
            planned = plan_session.run(loaded, lowered, options, progress, first)
    except SearchInterrupted as interrupted:
        axes, devices = program.recipe.mesh.axes, program.accelerator.devices
        search_only = search_document(interrupted.search, settings(program), axes, devices)
        print_document(search_only, WIDTH)
        say(f"interrupted: {kept()}")
        raise typer.Exit(130) from None
    served: list[tuple[str, Document]] = []
    data = None
    if args.serve:
        title, shown, data = plan_serve(program, args.exact, args.search, note)
        served = [(title, shown)]
    if planned.serving is not None:
        served.insert(0, ("On paper", serving_document(planned.serving)))
    plan_document = document(planned.plan, planned.search, served)
    if args.html is not None:
        write_text(args.html, html.write(plan_document, "plan"))
    if args.as_json:
        print(json.dumps(planned.to_dict() | {"compiled_serving": data}, indent=2))
    else:
        print_document(plan_document, WIDTH)
        show(planned.diagnostics)
        if args.html is not None:
            result(f"\n{args.html}: written")
    raise typer.Exit(FAILED if has_errors(planned.diagnostics) else DONE)


def _show_first(plan: Plan) -> None:
    """Print a first estimate to stderr, because stdout has the plan alone."""
    if manner.quiet:
        return
    print_document(first_document(plan), WIDTH, sys.stderr)


def _refuse_early(program: Program, serve: bool, page: Path | None) -> None:
    """Refuse what would fail after minutes of compiling.

    Raises:
        ArtifactError: the recipe has no server to plan, or the page cannot be drawn or written.
    """
    if serve and program.recipe.serve is None:
        raise ArtifactError("the recipe has no `serve` section", "add one, or plan without --serve")
    if page is not None:
        html.require_plotly("recipe plan --html", "plan")
        demand_writable(page)
