"""The command `recipe port`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from recipec.compiler.cli.base import DONE, FAILED, color, note, show
from recipec.port.tools import NAMES, WRITTEN, choice
from recipec.spec.codes import Code

if TYPE_CHECKING:
    from recipec.compiler.lowering.hardware import Accelerator
    from recipec.port.port import Asked, Ported
    from recipec.spec.diagnostics import Diagnostic

USUAL = {"-o": "recipe.yaml", "--report": "port.md", "--html": "port.html"}
"""What the files of options may be called."""
MACHINE = "v5p-8"
"""What a recipe is for unless it is said."""
PLAIN_WIDTH = 110
"""Columns of the table where the output is no terminal."""


FROM, TO = (f"<{'|'.join(names)}>" for names in (NAMES, WRITTEN))
Script = Literal["sft", "dpo", "orpo", "cpo", "kto"]
ReportFormat = Literal["text", "markdown", "json"]


def port(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="The config of another tool, or its Python script, notebook or command line, followed by "
            "its other files: accelerate's or DeepSpeed's config, dataset_info.json, adapter_config.json. "
            "Or a folder. With --to, a recipe.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="RECIPE",
            help="The file to write, or with folders the folder for recipes; by default, and with -, stdout.",
        ),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(
            "--from",
            parser=choice([*NAMES]),
            metavar=f"<{'|'.join(NAMES)}>",
            help="The tool of the config; by default recognized from its keys.",
        ),
    ] = None,
    tool: Annotated[
        str | None,
        typer.Option(
            "--to",
            parser=choice(WRITTEN),
            metavar=f"<{'|'.join(WRITTEN)}>",
            help="Port a recipe to this tool's config.",
        ),
    ] = None,
    script: Annotated[
        Script | None,
        typer.Option(
            "--script", help="The TRL script that the config is for; by default recognized from its keys."
        ),
    ] = None,
    command: Annotated[
        int | None,
        typer.Option(
            "--command",
            metavar="N",
            min=1,
            help="The training command to use, if a shell script has several.",
        ),
    ] = None,
    trainer: Annotated[
        int | None,
        typer.Option(
            "--trainer",
            metavar="N",
            min=1,
            help="The trainer to port, if a Python script or a notebook constructs several.",
        ),
    ] = None,
    accelerator: Annotated[
        str,
        typer.Option("--accelerator", metavar="NAME", help="The machine that the recipe is for."),
    ] = MACHINE,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            metavar="N",
            min=1,
            help="Number of GPUs of the source, if its files do not give it; with --to, of the config.",
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Choose the mesh by compiling the step for the accelerator.")
    ] = False,
    add_model: Annotated[
        bool,
        typer.Option(
            "--add-model",
            help="Add a model that the catalog lacks from the hub, to the folder models next to the recipe.",
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if any key is approximated or unsupported.")
    ] = False,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="Write the recipe even if it is incomplete; its comments name what is missing."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the report as .md or .json."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with both files side by side."),
    ] = None,
    format: Annotated[ReportFormat, typer.Option("--format", help="Format of the report.")] = "text",
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the config; may be repeated."),
    ] = None,
) -> None:
    """Turn another tool's config into a recipe, with a report on every key.

    With --to it turns a recipe into a config. The report goes to stdout, or to stderr if the recipe goes to
    stdout. Exits with 1 if the run cannot be ported.
    """
    from recipec.compiler.writing import write_text
    from recipec.port.port import Asked, port

    target = None if output is None or str(output) == "-" else output
    if report is not None and report.suffix not in (".md", ".json"):
        raise typer.BadParameter(f"{report} is neither .md nor .json", param_hint="--report")
    several = any(path.is_dir() for path in files) or (len(files) > 1 and target and target.is_dir())
    if tool and (
        len(files) != 1
        or several
        or dialect
        or script
        or command
        or trainer
        or plan
        or accelerator != MACHINE
    ):
        raise typer.BadParameter(
            "it takes one recipe, and cannot be combined with --from, --script, --command, --trainer, "
            "--accelerator and --plan",
            param_hint="--to",
        )
    if several:
        problems = _of_a_folder(
            target,
            {"--report": report, "--html": html, "--plan": plan or None, "--add-model": add_model or None},
        )
    else:
        wanted = {"-o": target, "--report": report, "--html": html}
        problems = [one for option, path in wanted.items() for one in _in_the_way(path, option, files, force)]
    machine = _accelerator(accelerator)
    if problems or isinstance(machine, list):
        _fail([*problems, *(machine if isinstance(machine, list) else [])], format)
    place = target or Path("config.yaml" if tool else "recipe.yaml")
    asked = Asked(
        machine,
        dialect,
        devices,
        partial,
        place,
        tuple(sets or ()),
        writes=target is not None,
        force=force,
        script=script,
        command=command,
        trainer=trainer,
    )
    if several:
        _port_folder(files, asked, target, strict, format)
    made = _back(files[0], tool, asked) if tool else port(files, asked)
    if add_model and not tool and _added(made, asked):
        made = port(files, asked)
    if plan and made.whole:
        _plan(made, asked)
    refusal = _strict(made) if strict else None
    made.diagnostics += [refusal] if refusal else []
    written = bool(made.text) and refusal is None and (made.whole or partial)
    _show(made, format, stdout=target is not None or not written)
    if report is not None and made.rows:
        write_text(report, _rendered(made, "json" if report.suffix == ".json" else "markdown"))
    if html is not None and made.rows:
        from recipec.port.page import page

        write_text(html, page(made, str(place)))
    if not written:
        raise typer.Exit(FAILED)
    if target is None:
        print(made.text, end="")
    else:
        _write(made, target, schema=not tool)
        kind = "config" if tool else "recipe"
        note(
            f"{target}: {f'a partial {kind}, ' if made.missing else ''}"
            f"ported {'to' if tool else 'from'} {made.title}"
        )
    raise typer.Exit(DONE)


def _added(made: Ported, asked: Asked) -> bool:
    """Add the model of a port from the hub if the catalog lacks it, and return whether it did."""
    from recipec.compiler.hub.fetch import fetch, write
    from recipec.port.port import lacking

    id = str(made.ledger.value("model.id") or "") if made.ledger else ""
    if made.ledger is None or not any(lacking(each, id) for each in made.diagnostics):
        return False
    revision = made.ledger.value("model.revision")
    fetched = fetch(id, str(revision) if revision else None)
    note(f"{write(fetched, asked.place.parent / 'models')}: {fetched}")
    return True


def _back(recipe: Path, tool: str, asked: Asked) -> Ported:
    """Port a recipe to a tool's config."""
    from recipec.compiler.cli.base import read
    from recipec.port import back
    from recipec.port.port import Ported, in_the_way
    from recipec.spec.diagnostics import has_errors, in_order

    loaded, lowered = read(recipe, asked.sets)
    made = back.back(loaded, lowered, back.Asked(tool, asked.devices, asked.place))
    files = made.ledger.files if made.ledger else {}
    obstacles = [*in_the_way(files, asked.place.parent, asked.writes, asked.force, "config")]
    if has_errors(obstacles):
        return Ported(diagnostics=obstacles)
    made.diagnostics = in_order([*made.diagnostics, *obstacles])
    return made


def _write(made: Ported, target: Path, schema: bool = True) -> None:
    """Write the result, the files that it needs, and the schema that a recipe's first line names."""
    from recipec.compiler.artifacts.artifact import SCHEMA
    from recipec.compiler.writing import write_text
    from recipec.spec.schema import text

    for name, content in (made.ledger.files if made.ledger else {}).items():
        write_text(target.parent / name, content)
    write_text(target, made.text)
    if schema and not (target.parent / SCHEMA).exists():
        write_text(target.parent / SCHEMA, text())


E1188 = Code(
    "E1188",
    "folder that cannot be ported this way",
    cause="The folder contains no run of a known tool, or an option applies to a single run only.",
    cure="Use `recipe port FOLDER -o RECIPES`, which ports each run of a folder into another folder.",
)


def _of_a_folder(target: Path | None, of_one: Mapping[str, object]) -> list[Diagnostic]:
    """Return errors about options that apply only to a single run."""
    from recipec.spec.diagnostics import Diagnostic

    if target is not None and (target.suffix in (".yaml", ".yml") or target.is_file()):
        message = f"several files are ported, and {target} is the file of one recipe"
        return [Diagnostic(E1188, message, help=f"-o {target.with_suffix('')}, a folder for their recipes")]
    return [
        Diagnostic(
            E1188, f"{option} applies to one run, and several files are ported", help="port only that file"
        )
        for option, given in of_one.items()
        if given is not None
    ]


def _port_folder(
    files: Sequence[Path], asked: Asked, target: Path | None, strict: bool, format: ReportFormat
) -> NoReturn:
    """Port each file of the folders, and print one table."""
    from recipec.compiler.wording import plural
    from recipec.port.folder import port_all
    from recipec.port.port import E1112
    from recipec.port.report import table, to_json
    from recipec.spec.diagnostics import Diagnostic

    ones = []
    for one in port_all(files, asked, target):
        made = one.made
        refusal = _strict(made) if strict and made.whole else None
        if made.whole and one.target is not None and one.target.exists() and not asked.force:
            refusal = Diagnostic(E1112, f"{one.target} exists already", help="--force replaces it")
        if refusal is not None:
            made.diagnostics.append(refusal)
        elif one.target is not None and made.text and (made.whole or asked.partial):
            one.target.parent.mkdir(parents=True, exist_ok=True)
            _write(made, one.target)
        ones.append(one)
    if not ones:
        message = f"{files[0]} has no file of a supported tool"
        help = "name the config itself; it may be in a hidden folder, whose name starts with a dot"
        _fail([Diagnostic(E1188, message, help=help)], format)
    whole = sum(one.whole for one in ones)
    if format == "json":
        print(to_json([one.to_dict() for one in ones]), end="")
    else:
        rows = [(one.name, one.made.title or "-", one.result) for one in ones]
        print(table(("file", "tool", "result"), rows, markdown=format == "markdown"), end="")
        note(f"{whole} of {plural(len(ones), 'run')} ported")
    raise typer.Exit(DONE if whole == len(ones) else FAILED)


def _in_the_way(target: Path | None, option: str, files: Sequence[Path], force: bool) -> list[Diagnostic]:
    """Return an error if the target file cannot be written, before any work is done."""
    from recipec.port.port import E1112
    from recipec.spec.diagnostics import Diagnostic

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
        return [Diagnostic(E1112, f"{target} is a folder", help=f"{option} {target / USUAL[option]}")]
    if not target.parent.is_dir():
        message = f"{target} cannot be written: there is no folder {target.parent}"
        return [Diagnostic(E1112, message, help=f"mkdir -p {target.parent}")]
    if target.exists() and not force:
        return [Diagnostic(E1112, f"{target} exists already", help="--force replaces it")]
    return []


def _accelerator(name: str) -> Accelerator | list[Diagnostic]:
    from recipec.compiler.lowering.facts import E0201
    from recipec.compiler.lowering.hardware import UnknownAccelerator, from_text
    from recipec.spec.diagnostics import Diagnostic

    try:
        return from_text(name)
    except UnknownAccelerator as error:
        return [Diagnostic(E0201, str(error), help=error.help)]


def _fail(diagnostics: Sequence[Diagnostic], format: ReportFormat) -> NoReturn:
    """Print diagnostics that occur before there is a report."""
    from recipec.port.port import Ported
    from recipec.port.report import to_json

    if format == "json":
        print(to_json(Ported(diagnostics=list(diagnostics)).to_dict()), end="")
    else:
        show(diagnostics)
    raise typer.Exit(FAILED)


def _plan(made: Ported, asked: Asked) -> None:
    from recipec.compiler.cli.plan import progress_line
    from recipec.compiler.plan.search import SearchOptions, search
    from recipec.port.plan import FIXED, MOST, plan

    with progress_line("planning the mesh") as progress:
        plan(made, asked, lambda program: search(program, SearchOptions(most=MOST, fixed=FIXED), progress))


E1113 = Code(
    "E1113",
    "not an exact port",
    cause="With `--strict` every key must have an exact counterpart, and some have none.",
    cure="The report lists them. Change the source, or port without `--strict`.",
)


def _strict(made: Ported) -> Diagnostic | None:
    """Return one diagnostic about the keys that --strict refuses, at the first of them."""
    from recipec.compiler.wording import plural
    from recipec.spec.diagnostics import Diagnostic

    if not made.inexact:
        return None
    first = made.inexact[0]
    keys = plural(len(made.inexact), "key")
    message = f"--strict: {keys} without an exact counterpart, the first is `{first.key}`"
    return Diagnostic(E1113, message, help="remove those keys from the source, or port without --strict")


def _show(made: Ported, format: ReportFormat, stdout: bool) -> None:
    """Print the report and the diagnostics. In JSON the report contains the diagnostics."""
    stream = sys.stdout if stdout else sys.stderr
    if format == "json" or made.rows:
        print(_rendered(made, format, stream), end="", file=stream)
    if format != "json":
        stream.flush()
        show(made.diagnostics)


def _rendered(made: Ported, format: ReportFormat, stream: object = None) -> str:
    from recipec.port.report import markdown, terminal, to_json

    if format == "json":
        return to_json(made.to_dict())
    if format == "markdown":
        return markdown(made.title, made.files, made.rows, made.to)
    colored = stream is not None and color(stream)
    width = os.get_terminal_size().columns if colored and sys.stdout.isatty() else PLAIN_WIDTH
    return terminal(made.title, made.files, made.rows, width, colored, made.to)
