"""`recipe port`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import typer

from recipec.compiler.artifacts.artifact import SCHEMA
from recipec.compiler.cli.guard import DONE, FAILED
from recipec.compiler.cli.planning import progress_line
from recipec.compiler.cli.printing import show
from recipec.compiler.cli.reading import read
from recipec.compiler.hub.fetch import fetch
from recipec.compiler.hub.fetch import write as write_model
from recipec.compiler.lowering.facts import E0201
from recipec.compiler.lowering.hardware import Accelerator, UnknownAccelerator, from_text
from recipec.compiler.pages import html, markdown, text
from recipec.compiler.pages.document import Document, Table, sheet
from recipec.compiler.plan.search import SearchOptions, search
from recipec.compiler.terminal import note
from recipec.compiler.wording import plural
from recipec.compiler.writing import write_text
from recipec.port import back
from recipec.port.folder import port_all
from recipec.port.options import MACHINE, PortArguments, ReportFormat
from recipec.port.plan import FIXED, MOST, plan
from recipec.port.port import E1112, Asked, Ported, in_the_way, lacking
from recipec.port.port import port as port_files
from recipec.port.report import document, to_json
from recipec.port.side_by_side import sides
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, has_errors, in_order
from recipec.spec.schema import text as schema_text

DEFAULT_NAMES = {"-o": "recipe.yaml", "--report": "port.md", "--html": "port.html"}
"""Names for the files of options."""
MOST_COLUMNS = 110
"""The most columns of the report's sentences."""


def port(args: PortArguments) -> None:
    """Run `recipe port`."""
    target = None if args.output is None or str(args.output) == "-" else args.output
    if args.report is not None and args.report.suffix not in (".md", ".json"):
        raise typer.BadParameter(f"{args.report} is neither .md nor .json", param_hint="--report")
    several = any(path.is_dir() for path in args.files) or (
        len(args.files) > 1 and target and target.is_dir()
    )
    if args.tool and (
        len(args.files) != 1
        or several
        or args.dialect
        or args.script
        or args.command
        or args.trainer
        or args.plan
        or args.accelerator != MACHINE
    ):
        raise typer.BadParameter(
            "it takes one recipe, and cannot be combined with --from, --script, --command, --trainer, "
            "--accelerator and --plan",
            param_hint="--to",
        )
    if several:
        problems = _of_a_folder(
            target,
            {
                "--report": args.report,
                "--html": args.html,
                "--plan": args.plan or None,
                "--add-model": args.add_model or None,
            },
        )
    else:
        outputs = {"-o": target, "--report": args.report, "--html": args.html}
        problems = [
            problem
            for option, path in outputs.items()
            for problem in _in_the_way(path, option, args.files, args.force)
        ]
    machine = _accelerator(args.accelerator)
    if problems or isinstance(machine, list):
        _fail([*problems, *(machine if isinstance(machine, list) else [])], args.format)
    place = target or Path("config.yaml" if args.tool else "recipe.yaml")
    asked = Asked(
        machine,
        args.dialect,
        args.devices,
        args.partial,
        place,
        tuple(args.sets or ()),
        writes=target is not None,
        force=args.force,
        script=args.script,
        command=args.command,
        trainer=args.trainer,
    )
    if several:
        _port_folder(args.files, asked, target, args.strict, args.format)
    ported = _back(args.files[0], args.tool, asked) if args.tool else port_files(args.files, asked)
    if args.add_model and not args.tool and _added(ported, asked):
        ported = port_files(args.files, asked)
    if args.plan and ported.whole:
        _plan(ported, asked)
    refusal = _strict(ported) if args.strict else None
    ported.diagnostics += [refusal] if refusal else []
    written = bool(ported.text) and refusal is None and (ported.whole or args.partial)
    _print(ported, args.format, stdout=target is not None or not written)
    if args.report is not None and ported.rows:
        as_json = args.report.suffix == ".json"
        write_text(args.report, to_json(ported.to_dict()) if as_json else markdown.write(_document(ported)))
    if args.html is not None and ported.rows:
        write_text(args.html, _page(ported, str(place)))
    if not written:
        raise typer.Exit(FAILED)
    if target is None:
        print(ported.text, end="")
    else:
        _write(ported, target, schema=not args.tool)
        kind = "config" if args.tool else "recipe"
        note(
            f"{target}: {f'a partial {kind}, ' if ported.missing else ''}"
            f"ported {'to' if args.tool else 'from'} {ported.title}"
        )
    raise typer.Exit(DONE)


def _added(ported: Ported, asked: Asked) -> bool:
    """Add the model of a port from the hub if the catalog lacks it, and return whether it did."""
    id = str(ported.ledger.value("model.id") or "") if ported.ledger else ""
    if ported.ledger is None or not any(lacking(problem, id) for problem in ported.diagnostics):
        return False
    revision = ported.ledger.value("model.revision")
    fetched = fetch(id, str(revision) if revision else None)
    note(f"{write_model(fetched, asked.place.parent / 'models')}: {fetched}")
    return True


def _back(recipe: Path, tool: str, asked: Asked) -> Ported:
    """Port a recipe to a tool's config."""
    loaded, lowered = read(recipe, asked.sets)
    ported = back.back(loaded, lowered, back.Asked(tool, asked.devices, asked.place))
    files = ported.ledger.files if ported.ledger else {}
    obstacles = [*in_the_way(files, asked.place.parent, asked.writes, asked.force, "config")]
    if has_errors(obstacles):
        return Ported(diagnostics=obstacles)
    ported.diagnostics = in_order([*ported.diagnostics, *obstacles])
    return ported


def _write(ported: Ported, target: Path, schema: bool = True) -> None:
    """Write the result, the files that it needs, and the schema that a recipe's first line names."""
    for name, content in (ported.ledger.files if ported.ledger else {}).items():
        write_text(target.parent / name, content)
    write_text(target, ported.text)
    if schema and not (target.parent / SCHEMA).exists():
        write_text(target.parent / SCHEMA, schema_text())


E1188 = Code(
    "E1188",
    "folder that cannot be ported this way",
    cause="The folder contains no run of a known tool, or an option applies to a single run only.",
    cure="Use `recipe port FOLDER -o RECIPES`, which ports each run of a folder into another folder.",
)


def _of_a_folder(target: Path | None, options: Mapping[str, object]) -> list[Diagnostic]:
    """Return errors about options that apply only to a single run.

    Args:
        options: their values, None for those that the command line omits.
    """
    if target is not None and (target.suffix in (".yaml", ".yml") or target.is_file()):
        message = f"several files are ported, and {target} is the file of one recipe"
        return [Diagnostic(E1188, message, help=f"-o {target.with_suffix('')}, a folder for their recipes")]
    return [
        Diagnostic(
            E1188, f"{option} applies to one run, and several files are ported", help="port only that file"
        )
        for option, value in options.items()
        if value is not None
    ]


def _port_folder(
    files: Sequence[Path], asked: Asked, target: Path | None, strict: bool, format: ReportFormat
) -> NoReturn:
    """Port each file of the folders, and print one table."""
    runs = []
    for run in port_all(files, asked, target):
        ported = run.ported
        refusal = _strict(ported) if strict and ported.whole else None
        if ported.whole and run.target is not None and run.target.exists() and not asked.force:
            refusal = Diagnostic(E1112, f"{run.target} exists already", help="--force replaces it")
        if refusal is not None:
            ported.diagnostics.append(refusal)
        elif run.target is not None and ported.text and (ported.whole or asked.partial):
            run.target.parent.mkdir(parents=True, exist_ok=True)
            _write(ported, run.target)
        runs.append(run)
    if not runs:
        message = f"{files[0]} has no file of a supported tool"
        help = "name the config itself; it may be in a hidden folder, whose name starts with a dot"
        _fail([Diagnostic(E1188, message, help=help)], format)
    whole = sum(run.whole for run in runs)
    if format == "json":
        print(to_json([run.to_dict() for run in runs]), end="")
    else:
        rows = [(run.name, run.ported.title or "-", run.result) for run in runs]
        table = Table(("file", "tool", "result"), rows, words=(1, 2))
        if format == "markdown":
            print("\n".join(markdown.table(table)))
        else:
            text.show(sheet("", [table]))
        note(f"{whole} of {plural(len(runs), 'run')} ported")
    raise typer.Exit(DONE if whole == len(runs) else FAILED)


def _in_the_way(target: Path | None, option: str, files: Sequence[Path], force: bool) -> list[Diagnostic]:
    """Return an error if the target file cannot be written, before any work is done."""
    if target is None:
        return []
    if any(os.path.realpath(target) == os.path.realpath(file) for file in files):
        return [
            Diagnostic(
                E1112,
                f"{target} is an input and would be replaced",
                help=f"give another file with {option}",
            )
        ]
    if target.is_dir():
        return [Diagnostic(E1112, f"{target} is a folder", help=f"{option} {target / DEFAULT_NAMES[option]}")]
    if not target.parent.is_dir():
        message = f"{target} cannot be written: there is no folder {target.parent}"
        return [Diagnostic(E1112, message, help=f"mkdir -p {target.parent}")]
    if target.exists() and not force:
        return [Diagnostic(E1112, f"{target} exists already", help="--force replaces it")]
    return []


def _accelerator(name: str) -> Accelerator | list[Diagnostic]:
    try:
        return from_text(name)
    except UnknownAccelerator as error:
        return [Diagnostic(E0201, str(error), help=error.help)]


def _fail(diagnostics: Sequence[Diagnostic], format: ReportFormat) -> NoReturn:
    """Print diagnostics that occur before there is a report, and end the command."""
    _print(Ported(diagnostics=list(diagnostics)), format, stdout=True)
    raise typer.Exit(FAILED)


def _plan(ported: Ported, asked: Asked) -> None:
    with progress_line("planning the mesh") as progress:
        plan(ported, asked, lambda program: search(program, SearchOptions(most=MOST, fixed=FIXED), progress))


E1113 = Code(
    "E1113",
    "not an exact port",
    cause="With `--strict` every key must have an exact counterpart, and some have none.",
    cure="The report lists them. Change the source, or port without `--strict`.",
)


def _strict(ported: Ported) -> Diagnostic | None:
    """Return one diagnostic about the keys that --strict refuses, at the first of them."""
    if not ported.inexact:
        return None
    first = ported.inexact[0]
    keys = plural(len(ported.inexact), "key")
    message = f"--strict: {keys} without an exact counterpart, the first is `{first.key}`"
    return Diagnostic(E1113, message, help="remove those keys from the source, or port without --strict")


def _print(ported: Ported, format: ReportFormat, stdout: bool) -> None:
    """Print the report and the diagnostics. In JSON the report contains the diagnostics."""
    stream = sys.stdout if stdout else sys.stderr
    if format == "json":
        print(to_json(ported.to_dict()), end="", file=stream)
        return
    if ported.rows and format == "markdown":
        print(markdown.write(_document(ported)), end="", file=stream)
    elif ported.rows:
        text.show(_document(ported), MOST_COLUMNS, stream)
    stream.flush()
    show(ported.diagnostics)


def _document(ported: Ported) -> Document:
    return document(ported.title, ported.files, ported.rows, ported.to)


def _page(ported: Ported, name: str) -> str:
    """Return the report as a page.

    Args:
        name: the name of the file that is written, or would be.
    """
    errors = [problem.message for problem in ported.diagnostics if problem.severity == "error"]
    files = [sides(ported, name)]
    return html.write(document(ported.title, ported.files, ported.rows, ported.to, files, errors))
