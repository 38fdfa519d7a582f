"""Results of merging and serving a run: found next to it, or named with --results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.pages.document import Facts, Section, Table, Text
from recipec.compiler.pages.numbers import gib, number, significant
from recipec.compiler.report.recorded_run import ReportedRun
from recipec.compiler.report.run_folder import Folder, existing_folder
from recipec.compiler.report.sweep import Sweep, percentiles, plots, read_sweep
from recipec.compiler.wording import plural

RECORD, SUMMARY = "merge.json", "summary.json"
RESULT_FOLDERS = ((), ("results", "bench"), ("results", "eval"), ("results",))
"""Folders in which an artifact's scripts leave results, below its own folder or --output."""


NONE = (
    "No results of a merge or a server were found next to the run. --results PATH names a merged folder, "
    "results of bench.sh or eval.sh, or what `recipe serve verify --json` printed."
)

Blocks = list[Any]
"""Blocks of a page."""


def outcome_section(run: ReportedRun, results: Sequence[str]) -> Section:
    """Return the section with the results next to a run, and in the places that the user names.

    Args:
        given: merged folders, results of a sweep or an evaluation, or the output of
            `recipe serve verify --json`.

    Raises:
        ArtifactError: when a given path is none of these.
    """
    parent = run.folder.below("..")
    blocks = [block for entry in run.merges for block in merged(entry, parent)]
    merged_folders = {str(entry.get("folder")) for entry in run.merges}
    sweeps: list[Sweep] = []
    files = [name for name in results if "://" not in name and Path(name).is_file()]
    folders = _beside(run)
    for folder in [*folders, *(existing_folder(name) for name in results if name not in files)]:
        record, summary = folder.object(RECORD), folder.object(SUMMARY)
        if "merge" in record:
            if folder.path not in merged_folders:
                blocks += recorded(folder, record)
                merged_folders.add(folder.path)
        elif "sides" in summary:
            blocks += evaluation(folder, summary)
        elif (sweep := read_sweep(folder)) is not None:
            sweeps.append(sweep)
        elif folder not in folders:
            raise ArtifactError(
                f"{folder.name} holds no results that a report can show",
                f"give a folder with {RECORD}, or with the {SUMMARY} of bench.sh or eval.sh, or a file that "
                "`recipe serve verify --json` printed",
            )
    blocks += [block for file in files for block in _endpoint(Path(file))]
    for sweep in sweeps:
        text = f"{sweep.sentence} TTFT is the time to the first token, TPOT the time per output token."
        blocks += [Text(f"benchmark {sweep.name}", "heading"), Text(text), percentiles(sweep)]
    blocks += plots(sweeps)
    return Section("outcome", "Merging and serving", (), blocks or [Text(NONE, "")])


def _result(
    title: str,
    facts: Sequence[tuple[str, str]],
    table: Table | None = None,
    problems: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Blocks:
    tables = [table] if table is not None and table.rows else []
    sentences = [*(Text(problem, "alarm") for problem in problems), *map(Text, notes)]
    return [Facts(facts, title), *tables, *sentences]


def _beside(run: ReportedRun) -> list[Folder]:
    """Return existing folders near the run that may hold results."""
    if run.folder.system:
        return []
    roots, outputs = [run.folder, run.folder.below("..")], []
    if run.recipe is not None:
        outputs = [run.recipe.merge.output] if "://" not in run.recipe.merge.output else []
        directory = run.recipe.checkpoint.directory
        if "://" not in directory and not Path(directory).is_absolute():
            depth = len(Path(directory).parts)
            roots.append(run.folder.below(*[".."] * depth))
    folders = [root.below(*parts) for root in roots for parts in RESULT_FOLDERS]
    folders += [root.below(output) for root in roots for output in outputs if not Path(output).is_absolute()]
    unique = {folder.path: folder for folder in folders if folder.exists()}
    return list(unique.values())


def merged(entry: Mapping[str, Any], parent: Folder) -> Blocks:
    """Return the blocks for an entry of merges.json.

    Args:
        parent: the folder that the run is in, as the user named it; paths inside it get this name.
    """

    def named(folder: Any) -> str:
        path = str(folder)
        return parent.name + path[len(parent.path) :] if path.startswith(f"{parent.path}/") else path

    facts = [
        ("step", number(entry.get("step"))),
        ("written", str(entry.get("at", ""))),
        ("size", gib(entry.get("bytes") or 0)),
        ("tensors", _tensors(entry.get("tensors"), entry.get("kept"), entry.get("quantized"))),
        ("in", str(entry.get("quantization") or entry.get("dtype"))),
        *([("PEFT adapter", named(entry["adapter"]))] if entry.get("adapter") else []),
    ]
    title, verified = f"merge {named(entry.get('folder'))}", entry.get("verified")
    if not isinstance(verified, dict):
        return _result(title, facts, notes=["It was not verified."])
    problem, left_out = verified.get("problem"), verified.get("logits_left_out")
    notes = [f"Logits were not compared: {left_out}."] if left_out is not None else []
    facts.append(("verified", "no" if problem else "yes"))
    return _result(title, facts, _verified(verified), [f"{problem}."] if problem else [], notes)


def _tensors(merged: Any, kept: Any, quantized: Any) -> str:
    out = f"{number(merged)} changed by training, {number(kept)} unchanged from the base"
    return f"{out}, {number(quantized)} quantized" if quantized else out


def _verified(check: Mapping[str, Any]) -> Table:
    """Tabulate what --verify compared: a line for each comparison, with its tolerance."""
    rows: list[tuple[str, ...]] = []
    if "files" in check:
        rows.append(("files, by SHA-256", number(check["files"]), "", "all as they were written"))
    tensors = check.get("tensors")
    if isinstance(tensors, dict):
        rows.append(
            (
                "trained tensors, against float64",
                number(tensors.get("trained")),
                "one rounding",
                f"largest difference {significant(tensors.get('largest'), 2)}",
            )
        )
        rows.append(
            (
                "other tensors, against the base",
                number(tensors.get("kept")),
                "none",
                "byte for byte",
            )
        )
    logits = check.get("logits")
    if isinstance(logits, dict):
        for label, key, allowed in (
            ("logits of the merge rule, against training", "rule", "rule_tolerance"),
            ("logits of the files, against the merge in memory", "files", "files_tolerance"),
        ):
            rows.append((label, "", significant(logits.get(allowed), 2), significant(logits.get(key), 2)))
        rows.append(("what training changes the logits by", "", "", significant(logits.get("effect"), 2)))
    return Table(("compared", "how many", "allowed", "found"), rows)


def recorded(folder: Folder, record: Mapping[str, Any]) -> Blocks:
    """Return the blocks for a merged folder that the run does not list, from its merge.json."""
    tensors = record.get("tensors") or {}
    files = record.get("files") or {}
    size = sum(file.get("size", 0) for file in files.values() if isinstance(file, dict))
    facts = [
        ("step", number((record.get("checkpoint") or {}).get("step"))),
        ("size", f"{gib(size)} in {plural(len(files), 'file')}"),
        ("tensors", _tensors(tensors.get("merged"), tensors.get("kept"), tensors.get("quantized"))),
        ("in", str(record.get("quantization") or record.get("dtype"))),
    ]
    return _result(f"merge {folder.name}", facts, notes=["Whether it was verified is not recorded here."])


def evaluation(folder: Folder, summary: Mapping[str, Any]) -> Blocks:
    """Return the blocks for eval.sh: the base and the fine-tuned model side by side, with 95 % intervals."""
    rows = []
    prompts = summary.get("prompts")
    if isinstance(prompts, dict):
        rates = prompts.get("pass_at") or {}
        rows += [(f"pass@{k}, {prompts.get('file')}", *_sides(row)) for k, row in rates.items()]
    rows += [
        (f"{row.get('task')}, {row.get('metric')}", *_sides(row))
        for row in summary.get("tasks") or []
        if isinstance(row, dict)
    ]
    table = Table(("", "base", "fine-tuned", "difference"), rows)
    sides = {name: side.get("model", "") for name, side in summary["sides"].items() if isinstance(side, dict)}
    return _result(
        f"evaluation {folder.name}",
        [(name, str(model)) for name, model in sides.items()],
        table,
        [str(problem) for problem in summary.get("problems") or []],
        [str(note) for note in summary.get("notes") or []],
    )


def _sides(row: Mapping[str, Any]) -> tuple[str, str, str]:
    base, tuned, difference = (_interval(row.get(key)) for key in ("base", "tuned", "difference"))
    return base, tuned, difference


def _interval(value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("value"), int | float):
        return ""
    low, high = value.get("low"), value.get("high")
    text = f"{value['value']:.3f}"
    return f"{text} ({low:.3f} to {high:.3f})" if low is not None and high is not None else text


def _endpoint(file: Path) -> Blocks:
    """Return the blocks for an output file of `recipe serve verify --json`."""
    try:
        answers = json_value(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        answers = None
    if not isinstance(answers, dict) or not {"checkpoint", "tolerance", "prompts"} <= answers.keys():
        raise ArtifactError(
            f"{file} is not a result that a report can show",
            "recipe serve verify URL --artifact DIR --json > verify.json",
        )
    allowed, largest = answers["tolerance"], answers.get("largest")
    rows = tuple(
        (
            str(row.get("prompt")),
            f"{row.get('prompt_tokens')} + {row.get('tokens')}",
            "yes" if row.get("parts_at") is None else f"no, from token {row['parts_at']}",
            significant(row.get("largest"), 2),
        )
        for row in answers["prompts"]
    )
    facts = [
        ("endpoint", f"{answers.get('model')} at {answers.get('url')}"),
        ("checkpoint", str(answers["checkpoint"])),
        ("verdict", "the endpoint is not this checkpoint" if answers.get("problems") else "the same model"),
        (
            "largest difference",
            f"{significant(largest, 2)}, allowed {significant(allowed.get('largest'), 2)}",
        ),
    ]
    head = ("prompt", "tokens", "same answer", "largest difference")
    return _result(
        f"endpoint {file}", facts, Table(head, rows), [str(problem) for problem in answers["problems"]]
    )
