"""The commands that plan: `recipe plan`, `recipe cost`, and `recipe calibrate`, which takes probes in."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipec.compiler.cli.base import (
    DONE,
    FAILED,
    AsJson,
    DataDir,
    Format,
    Recipe,
    Sets,
    Tokenizer,
    fail,
    has_errors,
    note,
    on_ctrl_c,
    print_document,
    read_program,
    result,
    say,
    show,
)
from recipec.compiler.lowering.backend import Backend
from recipec.spec.codes import Code

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.pages.document import Document
    from recipec.compiler.plan.plan_session import Planned
    from recipec.compiler.plan.pool import Progress
    from recipec.spec.load import Loaded

Step = Annotated[
    Backend, typer.Option("--backend", help="The step to compile: train.py's, or train_torchax.py's.")
]


def plan(
    recipe: Recipe,
    backend: Step = Backend.TUNIX,
    exact: Annotated[bool, typer.Option("--exact", help="Compile all layers completely.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Search for better meshes, micro-batches, remat and attention.")
    ] = False,
    most: Annotated[
        int,
        typer.Option("--most", metavar="N", min=1, help="Number of configurations that a search compiles."),
    ] = 24,
    free_batch: Annotated[
        bool, typer.Option("--free-batch", help="Allow a search to use more rows in an optimizer step.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Also compile the server's step, in a separate environment.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one page with charts."),
    ] = None,
    as_json: AsJson = False,
    model: Tokenizer = None,
    data_dir: DataDir = None,
    sets: Sets = None,
) -> None:
    """Compile the training step for its TPU: memory, time, collectives, cost.

    No TPU is needed. Exits with 1 if the step does not fit, or exceeds the recipe's budget.
    """
    from recipec.compiler.plan import plan_session
    from recipec.compiler.plan.search import SearchInterrupted

    format: Format = "json" if as_json else "text"
    loaded, lowered, program = read_program(recipe, sets, format, planning=True)
    _refuse_backend(loaded, program, backend, format)
    _refuse_early(program, serve, html)
    asked = plan_session.PlanOptions(
        tuple(sets or ()), exact, search, most, free_batch, model, data_dir, backend
    )
    try:
        with _refused_flags(loaded, format), progress_line(f"planning {program.name}") as progress:
            planned = plan_session.run(loaded, lowered, asked, progress)
    except SearchInterrupted as interrupted:
        from recipec.compiler.plan.plan_text import WIDTH, search_document

        print_document(search_document(program, interrupted.found), WIDTH)
        say(f"interrupted: {_kept()}")
        raise typer.Exit(130) from None
    served: list[tuple[str, Document]] = []
    data = None
    if serve:
        from recipec.compiler.plan.server_step.server_search import plan_serve

        title, shown, data = plan_serve(program, exact, search, note)
        served = [(title, shown)]
    if html is not None:
        _page(html, planned, served)
    if as_json:
        print(json.dumps(planned.to_dict() | {"compiled_serving": data}, indent=2))
    else:
        _print(planned, program, served)
        if html is not None:
            result(f"\n{html}: written")
    raise typer.Exit(FAILED if has_errors(planned.diagnostics) else DONE)


def _refuse_backend(loaded: Loaded, program: Program, backend: Backend, format: Format) -> None:
    """End the command if nothing can be compiled, or if the backend cannot train the recipe."""
    from recipec.compiler.checks.backends import diagnosed
    from recipec.compiler.plan.planner import check_target
    from recipec.spec.load import locate

    check_target(program, backend)
    found = locate(diagnosed(program, (backend,)), loaded.sources)
    if has_errors(found):
        fail(found, format)


E1008 = Code(
    "E1008",
    "flag value that libtpu refuses",
    cause="libtpu has the flag, but the value has another type. libtpu reports this when it is loaded.",
    cure="Use a value of the flag's type.",
)


@contextmanager
def _refused_flags(loaded: Loaded, format: Format) -> Iterator[None]:
    """Report a value of the recipe's `xla` that libtpu refused, at its line in the recipe."""
    from recipec.compiler.plan.planner import CompileError
    from recipec.spec.diagnostics import Diagnostic
    from recipec.spec.load import locate

    try:
        yield
    except CompileError as error:
        path = f"xla.flags.{error.failed.flag}"
        if not error.failed.flag or loaded.sources.origin(path).kind == "default":
            raise
        fail(locate([Diagnostic(E1008, str(error), path, error.help or "")], loaded.sources), format)


def _refuse_early(program: Program, serve: bool, html: Path | None) -> None:
    """Refuse what would fail after minutes of compiling.

    Raises:
        ArtifactError: the recipe has no server to plan, or the page cannot be drawn or written.
    """
    from recipec.compiler.errors import ArtifactError
    from recipec.compiler.pages.html import require_plotly
    from recipec.compiler.writing import demand_writable

    if serve and program.recipe.serve is None:
        raise ArtifactError("the recipe has no `serve` section", "add one, or plan without --serve")
    if html is not None:
        require_plotly("recipe plan --html", "plan")
        demand_writable(html)


def compare(before: tuple[Program, tuple[str, ...]], after: tuple[Program, tuple[str, ...]]) -> Document:
    """Compare memory, time and cost of two programs, for `recipe diff --plan`.

    Args:
        before, after: a program with the --set that made it.
    """
    from recipec.compiler.lowering.run_length import statistics
    from recipec.compiler.plan.plan_text import comparison
    from recipec.compiler.plan.planner import plan as planned

    plans = []
    for program, sets in (before, after):
        with progress_line(f"planning {program.name}") as progress:
            plans.append(planned(program, sets, data=statistics(program), progress=progress))
    return comparison(*plans)


@contextmanager
def progress_line(label: str) -> Iterator[Progress]:
    """Show the progress of the compiles in a line on stderr."""
    from recipec.runtime.progress import Progress as Line

    on_ctrl_c(_kept)
    with Line(label, 1.0, foreseen=False) as line:

        def show(share: float, what: str) -> None:
            line.label = f"{label}, {what}"
            if share < line.done:  # what comes next: a search after the plan
                line.done, line.started = 0.0, time.monotonic()
            line.advance(share - line.done)

        yield show


def _kept() -> str:
    """Say which results Ctrl-C keeps."""
    from recipec.compiler import store
    from recipec.compiler.wording import plural

    count = len(store.put_now)
    kept = f"{plural(count, 'result')} of this command" if count else "what was compiled before"
    return f"{kept} {'are' if count > 1 else 'is'} kept, and the same command continues from there"


def _page(file: Path, planned: Planned, served: list[tuple[str, Document]]) -> None:
    from recipec.compiler.plan.page import page
    from recipec.compiler.roofline.server_text import document
    from recipec.compiler.writing import write_text

    on_paper = [] if planned.serving is None else [("Serving, on paper", document(planned.serving))]
    write_text(file, page(planned.plan, planned.search, [*on_paper, *served]))


def _print(planned: Planned, program: Program, served: list[tuple[str, Document]]) -> None:
    from recipec.compiler.pages.document import Document, Section
    from recipec.compiler.plan.plan_text import WIDTH, document, search_document
    from recipec.compiler.roofline.server_text import document as serving_document

    sections = [*document(planned.plan).sections]
    if planned.search is not None:
        sections += search_document(program, planned.search).sections
    if planned.serving is not None:
        sections += serving_document(planned.serving).sections
    for title, shown in served:
        sections += [Section("", title, (), ()), *shown.sections]
    print_document(Document("", sections), WIDTH)
    show(planned.diagnostics)


def cost(
    recipe: Recipe,
    hours: Annotated[
        float | None,
        typer.Option(
            "--serve-hours",
            "--hours",
            metavar="H",
            help="Hours that the server runs, in addition to 1 and 24; for the training see --train-hours.",
        ),
    ] = None,
    train_hours: Annotated[
        float | None,
        typer.Option("--train-hours", metavar="H", help="Hours that the training takes."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Folder of a run; use its measured hours."),
    ] = None,
    as_json: AsJson = False,
    backend: Step = Backend.TUNIX,
    model: Tokenizer = None,
    data_dir: DataDir = None,
    sets: Sets = None,
) -> None:
    """Show what training and serving cost, for given, measured or planned hours.

    Without --train-hours and --run the training is planned, as with `recipe plan`.
    """
    from recipec.compiler.explain.cost import COST, document
    from recipec.compiler.explain.cost import cost as costs
    from recipec.compiler.plan import plan_session
    from recipec.compiler.plan.run_hours import training_hours

    if train_hours is not None and run is not None:
        raise typer.BadParameter(
            "--train-hours also gives the hours: keep one of the two", param_hint="--run"
        )
    format: Format = "json" if as_json else "text"
    loaded, _, program = read_program(recipe, sets, format, planning=True)
    planned = None
    if train_hours is None and run is None:
        _refuse_backend(loaded, program, backend, format)
        with _refused_flags(loaded, format), progress_line(f"planning {program.name}") as progress:
            asked = plan_session.PlanOptions(
                tuple(sets or ()), model=model, data_dir=data_dir, backend=backend
            )
            planned = plan_session.plan_run(program, asked, progress)
    made = costs(program, training_hours(train_hours, run, planned, program.recipe.train.steps), hours)
    if as_json:
        print(COST.dump_json(made, indent=2).decode())
    else:
        print_document(document(made))


def calibrate(
    probes: Annotated[
        list[Path],
        typer.Argument(metavar="PROBE...", help="probe.json files of machines."),
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="The recipe that was probed; by default recipe.yaml next to each file.",
        ),
    ] = None,
) -> None:
    """Compare the step times of probes with their plans, and use them in later plans."""
    from recipec.compiler.errors import ArtifactError
    from recipec.compiler.plan import calibration
    from recipec.compiler.plan.planner import plan

    rows = []
    for file in probes:
        found = calibration.read(file)
        source = recipe or file.with_name("recipe.yaml")
        if not source.is_file():
            raise ArtifactError(
                f"{source}: there is no recipe next to the probe",
                "name the recipe that was probed with --recipe",
            )
        program = read_program(source, None, planning=True)[2]
        if calibration.digest(program) != found["recipe"]:
            raise ArtifactError(
                f"{file} is the probe of another recipe than {source}",
                "name the recipe that was built with --recipe",
            )
        with progress_line(f"planning {program.name}") as progress:
            made = plan(program, progress=progress)
        row = calibration.measured(program, found, made)
        result(f"{file}: {program.name} on {program.accelerator.name}, {row.date}")
        for line in calibration.compared(program, found, made, row):
            result(f"  {line}")
        rows.append(row)
    calibration.keep(rows)
    result(f"{calibration.path()}: written; later plans use it and name it. Delete it to plan without it")
    result("The measured time of the whole micro-batch over the planned one is the factor of later plans")
