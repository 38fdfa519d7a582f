"""How many public configs `recipe port` carries over: of folders of them, by dialect and by reason.

    python -m recipec.port.scripts.coverage FOLDER...            a table, as docs/porting.md has it
    python -m recipec.port.scripts.coverage FOLDER... --json     each file, with what became of it
    python -m recipec.port.scripts.coverage FOLDER... --commands   the training commands of shell scripts

FOLDER is a checkout of a tool, or any folder of configs. Every YAML and JSON file in it is read as `recipe
port` reads it, with the dataset_info.json that LLaMA-Factory would find, and ported in this process: nothing
is fetched, executed or left behind. A config is carried when `recipe port` writes a whole recipe of it, which
passes `recipe check`; the machine is the first of MACHINES that it fits. TRL's script is that of the file's
path, as its user calls it. Files that train nothing are counted apart: those of launchers, of inference,
evaluation and merging. Pre-training is another kind of training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recipec.compiler.lowering.hardware import from_name
from recipec.port import dialects
from recipec.port.commands import read_command
from recipec.port.mesh import E1111
from recipec.port.port import Asked, Ported, port
from recipec.port.read import read
from recipec.port.recognize import Recognized, recognize
from recipec.port.source import Source
from recipec.spec.diagnostics import Diagnostic, has_errors

MACHINES = ("v5p-8", "v5p-64", "v5p-512")
SETS = {
    "torchtune": "output_dir=gs://bucket/run",
    "litgpt": "out_dir=gs://bucket/run",
    "maxtext": "base_output_directory=gs://bucket/run",
    "oumi": "training.output_dir=gs://bucket/run",
    "automodel": "checkpoint.checkpoint_dir=gs://bucket/run",
}
"""The checkpoint folder of a run on several hosts, which all hosts can reach."""
SCRIPTS = ("sft", "dpo", "orpo", "cpo", "kto")

UNKNOWN = "model not known"
REASONS = {
    "pictures or sound": ("E1150",),
    "another kind of training": ("E1149", "E1152", "E1171"),
    UNKNOWN: ("E0801", "E0802", "E0803", "E0804"),
    "changes what is learned": ("E1163", "E1180"),
    "chat template not known": ("E1147",),
    "reward without a counterpart": ("E1189",),
    "data set without a counterpart": ("E1142", "E1143", "E1151"),
    "something else": (),
}
"""Reasons why a config is not carried, by error code. If several apply, the first counts."""
BEYOND = ("pictures or sound", "another kind of training")
"""Reasons that no recipe could remove; all other configs train on text with a supported objective."""


@dataclass(frozen=True)
class Config:
    """A config and the result of porting it.

    Attributes:
        dialect: the tool's title; "" for a file that is not a fine-tuning config.
        reason: why it is not carried; "" if it is.
        codes, errors: codes and messages of the errors that prevent it.
    """

    file: str
    dialect: str
    reason: str = ""
    codes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="every file, in place of the table")
    parser.add_argument("--commands", action="store_true", help="shell scripts, in place of configs")
    asked = parser.parse_args(arguments)
    of = commands if asked.commands else configs
    every = [config for folder in asked.folders for config in of(folder)]
    print(json.dumps([asdict(config) for config in every], indent=1) if asked.json else table(every))


def configs(folder: Path) -> Iterator[Config]:
    """Port each file of a folder by itself, with the folder's chat templates where its user has them."""
    with TemporaryDirectory() as place:
        for template in folder.rglob("*.jinja"):
            copy = Path(place, template.relative_to(folder))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(template, copy)
        for path in sorted(path for end in ("yaml", "yml", "json") for path in folder.rglob(f"*.{end}")):
            if path.is_file():
                yield examined(path, folder, Path(place))


def commands(folder: Path) -> Iterator[Config]:
    """Port each training command of the shell scripts of a folder, which is the working folder of all."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with TemporaryDirectory() as place:
            for path in sorted(Path().rglob("*.sh")):
                for number in itertools.count(1):
                    config = commanded(path, number, Path(place))
                    if config is None:
                        break
                    yield config
    finally:
        os.chdir(before)


def commanded(path: Path, number: int, place: Path) -> Config | None:
    """Port one command of a script, or return None if the script has not that many of a known tool."""
    command, problems = read_command(path, number)
    codes = {d.code for d in problems if d.severity == "error"}
    if command is None and (codes & NO_COMMAND or (UNREADABLE in codes and number > 1)):
        return None
    name = f"{path}:{number}"
    if command is None:
        return Config(name, "", "cannot be read", *_of(problems))
    title = dialects.load(command.dialect).TITLE
    ported = _fitted([path], command.dialect, place, command=number)
    return Config(name, title) if ported.whole else Config(name, title, *_reason(ported))


NO_COMMAND, UNREADABLE = {"E1181", "E1182"}, "E1183"
"""A script without so many commands, or without any; a script that bash cannot read."""


def examined(path: Path, folder: Path, place: Path) -> Config:
    """Port one file.

    Args:
        folder: the file is at any depth below this folder.
        place: a folder for the files that the recipe needs next to it during the check.
    """
    name = os.path.relpath(path, folder)
    source, problems = read(path)
    if source is None or has_errors(problems):
        return Config(name, "", "cannot be read", *_of(problems))
    known = recognize([source])
    if not isinstance(known, Recognized):
        return Config(name, "", "no config of these tools", *_of(known))
    dialect = known.dialect
    if not trains(dialect.NAME, source):
        return Config(name, "", "fine-tunes nothing")
    files = [path, *_beside(dialect.NAME, source, folder)]
    script = next(
        (script for script in SCRIPTS if script in path.parts or script in path.stem.split("_")), None
    )
    ported = _fitted(files, dialect.NAME, place)
    if any(d.code == "E1172" for d in ported.diagnostics) and script:
        ported = _fitted(files, dialect.NAME, place, script=script)
    if ported.whole:
        return Config(name, dialect.TITLE)
    return Config(name, dialect.TITLE, *_reason(ported))


def _fitted(files: list[Path], dialect: str, place: Path, **options: Any) -> Ported:
    """Return the port to the first of MACHINES that the run fits, else that to the last."""
    for machine in MACHINES:
        sets = (SETS.get(dialect, "output_dir=gs://bucket/run"),) if machine != MACHINES[0] else ()
        place_of = place / "recipe.yaml"
        ported = port(files, Asked(from_name(machine), None, place=place_of, sets=sets, **options))
        if not any(d.code == E1111 for d in ported.diagnostics):
            break
    return ported


def trains(dialect: str, source: Source) -> bool:
    """Return whether a config starts a fine-tuning, and not another of its tool's tasks."""
    match dialect:
        case "llamafactory":
            return bool(source.get("do_train", False))
        case "torchtune":
            return source.has("optimizer")
        case "litgpt":
            return source.has("checkpoint_dir") or source.has("model_name")
        case "oumi":
            return source.has("training")
        case "automodel":
            return source.has("dataset")
        case "swift":
            return source.has("dataset")
        case "axolotl":
            return source.has("base_model")
        case "llamafactory_v1":
            return source.has("train_dataset")
        case "maxtext":
            return bool(source.get("use_sft", False))
    return True


def _beside(dialect: str, source: Source, folder: Path) -> list[Path]:
    """Find LLaMA-Factory's dataset_info.json, or v1's YAML, in a folder above the config."""
    where = source.get("train_dataset", "")
    if dialect == "llamafactory":
        where = f"{source.get('dataset_dir', 'data')}/dataset_info.json"
    if not dialect.startswith("llamafactory") or not isinstance(where, str):
        return []
    above = [parent for parent in source.path.parents if parent == folder or folder in parent.parents]
    candidates = [parent / where for parent in above]
    return [path for path in candidates if path.is_file()][:1]


def _reason(ported: Ported) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    codes, errors = _of(ported.diagnostics)
    for reason, of in REASONS.items():
        if not of or any(code in of for code in codes):
            return reason, codes, errors
    raise AssertionError


def _of(diagnostics: Iterable[Diagnostic]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the codes and messages of the errors."""
    errors = [d for d in diagnostics if d.severity == "error"]
    return tuple(dict.fromkeys(d.code for d in errors)), tuple(d.message for d in errors)


def table(all_configs: Sequence[Config]) -> str:
    """Return two tables in Markdown: the shares by dialect, and the reasons."""
    runs = [config for config in all_configs if config.dialect]
    columns = ("dialect", "carried", "of all", "of those on text with a supported objective")
    lines = [f"| {' | '.join(columns)} | of those, with a known model |", "|---|---|---|---|---|"]
    for title in [*dict.fromkeys(config.dialect for config in runs), "all"]:
        of = [config for config in runs if title in (config.dialect, "all")]
        here = [config for config in of if config.reason not in BEYOND]
        known = [config for config in here if config.reason != UNKNOWN]
        carried = sum(not config.reason for config in of)
        shares = [f"{len(part)} ({share(carried, len(part))})" for part in (of, here, known)]
        lines.append(f"| {' | '.join([title, str(carried), *shares])} |")
    lines += ["", "| reason | configs |", "|---|---|"]
    counts = Counter(config.reason for config in runs)
    lines += [f"| {reason} | {counts[reason]} |" for reason in REASONS if counts[reason]]
    others = Counter(config.reason for config in all_configs if not config.dialect)
    lines += [
        "",
        "Not counted: " + ", ".join(f"{count} {reason}" for reason, count in sorted(others.items())),
    ]
    return "\n".join(lines)


def share(part: int, whole: int) -> str:
    """Return a share as "26 %"."""
    return f"{100 * part / whole:.0f} %" if whole else "none"


if __name__ == "__main__":
    main()
