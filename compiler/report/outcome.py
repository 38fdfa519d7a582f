"""Results of merging and serving a run: found next to it, or named with --results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.pages.html import Table
from recipec.compiler.pages.numbers import gib, number, significant
from recipec.compiler.report.place import Place, existing_place
from recipec.compiler.report.run import Run
from recipec.compiler.report.sweep import Sweep, read_sweep
from recipec.compiler.wording import plural

RECORD, SUMMARY = "merge.json", "summary.json"
BESIDE = ((), ("results", "bench"), ("results", "eval"), ("results",))
"""Folders in which an artifact's scripts leave results, below its own folder or --output."""


@dataclass(frozen=True)
class Result:
    """One result that was found.

    Attributes:
        kind: "merge", "evaluation" or "endpoint".
        title: name of the result, with its source.
        facts: names and values.
        tables: the result's tables.
        problems, notes: sentences.
    """

    kind: str
    title: str
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """All results that were found for a run."""

    results: tuple[Result, ...]
    sweeps: tuple[Sweep, ...]


def outcome(run: Run, given: Sequence[str]) -> Outcome:
    """Look for results next to a run and in the places the user names.

    Args:
        given: merged folders, results of a sweep or an evaluation, or the output of
            `recipe serve verify --json`.

    Raises:
        ArtifactError: when a given path is none of these.
    """
    beside = run.place.below("..")
    results = [merged(entry, beside) for entry in run.merges]
    told = {str(entry.get("folder")) for entry in run.merges}
    sweeps: list[Sweep] = []
    for place, asked in [*((one, False) for one in _beside(run)), *_given(given)]:
        if isinstance(place, Result):
            results.append(place)
            continue
        record, summary = place.value(RECORD), place.value(SUMMARY)
        if isinstance(record, dict) and "merge" in record:
            if place.path not in told:
                results.append(recorded(place, record))
                told.add(place.path)
        elif isinstance(summary, dict) and "sides" in summary:
            results.append(evaluation(place, summary))
        elif (sweep := read_sweep(place)) is not None:
            sweeps.append(sweep)
        elif asked:
            raise ArtifactError(
                f"{place.name} holds no results that a report can show",
                f"give a folder with {RECORD}, or with the {SUMMARY} of bench.sh or eval.sh, or a file that "
                "`recipe serve verify --json` printed",
            )
    return Outcome(tuple(results), tuple(sweeps))


def _beside(run: Run) -> list[Place]:
    """Return existing folders near the run that may hold results."""
    if run.place.system:
        return []
    roots, outputs = [run.place, run.place.below("..")], []
    if run.recipe is not None:
        outputs = [run.recipe.merge.output] if "://" not in run.recipe.merge.output else []
        directory = run.recipe.checkpoint.directory
        if "://" not in directory and not Path(directory).is_absolute():
            depth = len(Path(directory).parts)
            roots.append(run.place.below(*[".."] * depth))
    places = [root.below(*parts) for root in roots for parts in BESIDE]
    places += [root.below(output) for root in roots for output in outputs if not Path(output).is_absolute()]
    unique = {place.path: place for place in places if place.is_folder()}
    return list(unique.values())


def _given(names: Sequence[str]) -> Iterator[tuple[Place | Result, bool]]:
    for name in names:
        file = Path(name)
        if "://" not in name and file.is_file():
            yield _endpoint(file), True
        else:
            yield existing_place(name), True


def merged(entry: Mapping[str, Any], beside: Place) -> Result:
    """Return the result for an entry of merges.json.

    Args:
        beside: the folder next to the run, as the user named it; paths inside it are shown under this name.
    """

    def named(folder: Any) -> str:
        path = str(folder)
        return beside.name + path[len(beside.path) :] if path.startswith(f"{beside.path}/") else path

    facts = [
        ("step", number(entry.get("step"))),
        ("written", str(entry.get("at", ""))),
        ("size", gib(entry.get("bytes") or 0)),
        ("tensors", _tensors(entry.get("tensors"), entry.get("kept"), entry.get("quantized"))),
        ("in", str(entry.get("quantization") or entry.get("dtype"))),
        *([("PEFT adapter", named(entry["adapter"]))] if entry.get("adapter") else []),
    ]
    verified = entry.get("verified")
    if not isinstance(verified, dict):
        return Result("merge", named(entry.get("folder")), facts, notes=["It was not verified."])
    problem = verified.get("problem")
    notes = []
    if "logits_left_out" in verified:
        notes.append(f"Logits were not compared: {verified['logits_left_out']}.")
    return Result(
        "merge",
        named(entry.get("folder")),
        [*facts, ("verified", "no" if problem else "yes")],
        [table] if (table := _verified(verified)).rows else [],
        [f"{problem}."] if problem else [],
        notes,
    )


def _tensors(merged: Any, kept: Any, quantized: Any) -> str:
    out = f"{number(merged)} changed by training, {number(kept)} unchanged from the base"
    return f"{out}, {number(quantized)} quantized" if quantized else out


def _verified(found: Mapping[str, Any]) -> Table:
    """Tabulate what --verify compared: a line for each comparison, with its tolerance."""
    rows: list[tuple[str, ...]] = []
    if "files" in found:
        rows.append(("files, by SHA-256", number(found["files"]), "", "all as they were written"))
    tensors = found.get("tensors")
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
    logits = found.get("logits")
    if isinstance(logits, dict):
        for said, key, allowed in (
            ("logits of the merge rule, against training", "rule", "rule_tolerance"),
            ("logits of the files, against the merge in memory", "files", "files_tolerance"),
        ):
            rows.append((said, "", significant(logits.get(allowed), 2), significant(logits.get(key), 2)))
        rows.append(("what training changes the logits by", "", "", significant(logits.get("effect"), 2)))
    return Table(("compared", "how many", "allowed", "found"), rows)


def recorded(place: Place, record: Mapping[str, Any]) -> Result:
    """Return the result for a merged folder that the run does not list, from its merge.json."""
    tensors = record.get("tensors") or {}
    files = record.get("files") or {}
    size = sum(one.get("size", 0) for one in files.values() if isinstance(one, dict))
    facts = [
        ("step", number((record.get("checkpoint") or {}).get("step"))),
        ("size", f"{gib(size)} in {plural(len(files), 'file')}"),
        ("tensors", _tensors(tensors.get("merged"), tensors.get("kept"), tensors.get("quantized"))),
        ("in", str(record.get("quantization") or record.get("dtype"))),
    ]
    return Result("merge", place.name, facts, notes=["Whether it was verified is not recorded here."])


def evaluation(place: Place, summary: Mapping[str, Any]) -> Result:
    """Return the result of eval.sh: the base and the fine-tuned model side by side, with 95 % intervals."""
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
    sides = {name: one.get("model", "") for name, one in summary["sides"].items() if isinstance(one, dict)}
    return Result(
        "evaluation",
        place.name,
        [(name, str(model)) for name, model in sides.items()],
        [table] if rows else [],
        [str(one) for one in summary.get("problems") or []],
        [str(one) for one in summary.get("notes") or []],
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


def _endpoint(file: Path) -> Result:
    """Return the result in an output file of `recipe serve verify --json`."""
    try:
        found = json_value(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not {"checkpoint", "tolerance", "prompts"} <= found.keys():
        raise ArtifactError(
            f"{file} is not a result that a report can show",
            "recipe serve verify URL --artifact DIR --json > verify.json",
        )
    allowed, largest = found["tolerance"], found.get("largest")
    rows = tuple(
        (
            str(one.get("prompt")),
            f"{one.get('prompt_tokens')} + {one.get('tokens')}",
            "yes" if one.get("parts_at") is None else f"no, from token {one['parts_at']}",
            significant(one.get("largest"), 2),
        )
        for one in found["prompts"]
    )
    facts = [
        ("endpoint", f"{found.get('model')} at {found.get('url')}"),
        ("checkpoint", str(found["checkpoint"])),
        ("verdict", "the endpoint is not this checkpoint" if found.get("problems") else "the same model"),
        (
            "largest difference",
            f"{significant(largest, 2)}, allowed {significant(allowed.get('largest'), 2)}",
        ),
    ]
    head = ("prompt", "tokens", "same answer", "largest difference")
    return Result("endpoint", str(file), facts, [Table(head, rows)], [str(p) for p in found["problems"]])
