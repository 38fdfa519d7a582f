"""The tables of docs/coming-from.md: other tools' keys and what `recipe port` says about each.

    python -m recipec.port.scripts.coming_from write

The keys are in coming_from.yaml. Each is ported by itself in its tool's run, only by the dialect, and
the tables show its findings. tests/docs/test_docs_extending.py compares the page with them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from recipec.port import dialects
from recipec.port.ledger import SEVERITY, Finding, Ledger, Verdict
from recipec.port.python_source import RENAMED, read_script
from recipec.port.read import read
from recipec.port.source import Source, Sources
from recipec.spec.core_schema import flow
from recipec.spec.structure import choices_of, field_at
from recipec.spec.yaml_document import Refused

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "coming-from.md"
TRIED: Mapping[str, Mapping[str, Any]] = yaml.safe_load((HERE / "coming_from.yaml").read_text())
BLOCK = re.compile(r"(<!-- tables: port/scripts/coming_from.py (\w+) -->\n).*?(<!-- end -->)", re.S)

LONGEST = 120
"""The most characters of a value to show."""

SCRIPT = """from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
from datasets import load_dataset
model, tokenizer = FastLanguageModel.from_pretrained({from_pretrained})
model = FastLanguageModel.get_peft_model(model, {get_peft_model})
rows = load_dataset("our/chats", split="train")
SFTTrainer(model=model, train_dataset=rows, args=SFTConfig({SFTConfig})).train()
"""
"""A run of Unsloth, whose keys are arguments: CALL.NAME."""
CALLS = {"from_pretrained": "model", "get_peft_model": "lora", "SFTConfig": "trainer"}
"""The calls, by the names under which port groups their arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="docs/coming-from.md")
    parser.add_argument("command", choices=["write"], help="write the tables")
    parser.parse_args(argv)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def page(text: str) -> str:
    """Return the page with new tables."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{tables(block[2])}\n{block[3]}", text)


def tables(tool: str) -> str:
    """Return what becomes of a tool's keys.

    First those that only have another name, then those that set something else in a recipe. The others are
    grouped by finding, most severe first. Exact keys that set nothing in a recipe are left out.
    """
    tried = TRIED[tool]
    renamed: list[str] = []
    rows: list[str] = []
    others: dict[tuple[str, str], list[str]] = {}
    for key, value in tried["keys"].items():
        run = {**tried["run"], **tried.get("with", {}).get(key, {}), key: value}
        findings, ledger = ported(tool, run, key)
        shown = _code(f"{key.replace('.', '(')}={value!r})" if tool == "unsloth" else f"{key}: {flow(value)}")
        paths = [path for finding in findings for path in finding.recipe if path in ledger.lines]
        error = next(
            (diagnostic.code for diagnostic in ledger.diagnostics if diagnostic.severity == "error"), ""
        )
        note = "; ".join(dict.fromkeys(finding.note for finding in findings if finding.note and finding.span))
        verdict = max((finding.verdict for finding in findings if finding.span), key=SEVERITY.index)
        if (
            tool != "unsloth"
            and not error
            and verdict is Verdict.EXACT
            and _only_renamed(value, paths, ledger)
        ):
            renamed.append(f"{_code(key)} ({_code(paths[0])})")
        elif paths and not error:
            cells = "<br>".join(_set(path, ledger) for path in dict.fromkeys(paths))
            differs = (
                "" if verdict is Verdict.EXACT else f"{verdict.value}: {note}" if note else verdict.value
            )
            rows.append(f"| {shown} | {cells} | {_cell(differs)} |")
        elif error or verdict is not Verdict.EXACT:
            why = re.sub("^`[^`]+` changes what is learned: ", "", note)
            others.setdefault((error or verdict.value, why), []).append(shown)
    ranks = [verdict.value for verdict in SEVERITY]
    order = sorted(others, key=lambda group: -ranks.index(group[0]) if group[0] in ranks else -len(ranks))
    lines = [f"With the same value in the recipe: {', '.join(renamed)}.", ""] if renamed else []
    lines += ["| key | in the recipe | differs |", "|---|---|---|", *rows]
    lines += ["", "| key without a counterpart | verdict | why |", "|---|---|---|"]
    for verdict_, why in order:
        differs = verdict_ if verdict_ in ranks else f"error {verdict_}"
        lines.append(f"| {'<br>'.join(others[verdict_, why])} | {differs} | {_cell(why)} |")
    return "\n".join(lines) + "\n"


def ported(tool: str, run: Mapping[str, Any], key: str) -> tuple[list[Finding], Ledger]:
    """Return the findings of the tool's dialect about one key of a run, and the ledger."""
    with TemporaryDirectory() as folder:
        ledger = Ledger(
            Sources(_source(tool, run, Path(folder)), {}), script="sft" if tool == "trl" else None
        )
        try:
            dialects.apply(dialects.load("trl" if tool == "unsloth" else tool), ledger)
        except Refused as stop:
            ledger.diagnostics.append(stop.diagnostic)
            span = ledger.sources.main.place("")
            return [Finding("", key, None, Verdict.UNSUPPORTED, (), stop.diagnostic.message, span)], ledger
    if tool == "unsloth":
        call, _, name = key.partition(".")
        key = RENAMED[CALLS[call]].get(name, name)
    findings = [
        finding for finding in ledger.findings if re.match(rf"{re.escape(key)}(?![^.\[])", finding.key)
    ]
    assert findings, f"{tool}: nothing is said of {key}"
    return findings, ledger


def _source(tool: str, run: Mapping[str, Any], folder: Path) -> Source:
    """Return a run as it is read from a file."""
    path = folder / ("train.py" if tool == "unsloth" else "config.yaml")
    if tool == "unsloth":
        calls = dict.fromkeys(CALLS, "")
        for key, value in run.items():
            call, _, name = key.partition(".")
            calls[call] += f"{name}={value!r}, "
        text, reader = SCRIPT.format_map(calls), read_script
    else:
        text, reader = yaml.safe_dump(dict(run)), read
    path.write_text(text, encoding="utf-8")
    source, problems = reader(path)
    assert source is not None, problems
    return source


def _only_renamed(value: object, paths: Sequence[str], ledger: Ledger) -> bool:
    """Return whether any value of a key becomes the same value of one key of the recipe."""
    if [ledger.value(path) for path in paths] != [value]:
        return False
    field = field_at(tuple(paths[0].split(".")))
    return isinstance(value, bool) or field is None or not choices_of(field.annotation)[0]


def _set(path: str, ledger: Ledger) -> str:
    """Return a value of the recipe, or only its path if the value is too long."""
    text = f"{path}: {flow(ledger.value(path))}"
    return _code(text if len(text) <= LONGEST else path)


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
