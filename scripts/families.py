"""The table of docs/models.md: what each family was held against, and a step of it by plan.

    python -m scripts.families prove             run the proofs and keep what they print: an hour
    python -m scripts.families plan [FAMILY...]  compile a step of each at its real size: minutes each
    python -m scripts.families write             the table, from docs/models.json

tests/compiler/test_catalogue.py holds the page against the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from recipec.compiler.lowering import catalog
from recipec.compiler.plan.planner import plan
from recipec.compiler.serving.features import implementation
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.families.decoder import DecoderFamily
from scripts.recipes import CELL, ROOT, planned, program

RECORD = ROOT / "docs" / "models.json"
PAGE = ROOT / "docs" / "models.md"
PROOFS = (
    "tests/runtime/test_decoder.py",
    "tests/runtime/test_decoder_training.py",
    "tests/runtime/test_merge_parity.py",
)
CHOSEN = "test_logits_are or test_twenty or test_the_merged_model"
FIRST, LAST = "<!-- table: scripts/families.py -->", "<!-- end of the table -->"

SERVED = {"jax": "natively", "torch": "through torch", "transformers": "through transformers", None: "not"}
"""How the pinned vLLM-TPU runs a class."""

PLANNED = {
    "cohere2": ("CohereLabs/c4ai-command-r7b-12-2024", "v5e-8"),
    "gemma1": ("google/gemma-7b", "v5e-8"),
    "glm4": ("zai-org/GLM-4-9B-0414", "v5e-8"),
    "glm4_moe": ("zai-org/GLM-4.5-Air", "tpu7x-8"),
    "gpt_oss": ("openai/gpt-oss-20b", "v6e-4"),
    "granite": ("ibm-granite/granite-3.3-8b-base", "v5e-8"),
    "granitemoe": ("ibm-granite/granite-3.1-3b-a800m-base", "v5e-8"),
    "llama": ("meta-llama/Llama-2-7b-hf", "v5e-8"),
    "llama4": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "v5p-32"),
    "ministral3": ("mistralai/Ministral-3-8B-Base-2512", "v5e-8"),
    "mistral": ("mistralai/Mistral-7B-v0.1", "v5e-8"),
    "mixtral": ("mistralai/Mixtral-8x7B-v0.1", "v6e-8"),
    "olmo2": ("allenai/OLMo-2-1124-7B", "v5e-8"),
    "olmo3": ("allenai/Olmo-3-1025-7B", "v5e-8"),
    "olmoe": ("allenai/OLMoE-1B-7B-0125", "v5e-8"),
    "phi3": ("microsoft/phi-4", "v5e-8"),
    "qwen2": ("Qwen/Qwen2.5-7B", "v5e-8"),
    "qwen3": ("Qwen/Qwen3-8B", "v5e-8"),
    "qwen3_5": ("Qwen/Qwen3.5-9B", "v5e-8"),
    "qwen3_5_moe": ("Qwen/Qwen3.5-35B-A3B", "v6e-8"),
    "qwen3_moe": ("Qwen/Qwen3-30B-A3B", "v6e-8"),
    "qwen3_next": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "v6e-8"),
    "smollm3": ("HuggingFaceTB/SmolLM3-3B", "v5e-8"),
    "starcoder2": ("bigcode/starcoder2-7b", "v5e-8"),
}
"""A model of each family and the machine that its step is compiled for."""


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.families", description="The table of families.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prove", help="run the proofs of every family")
    planning = commands.add_parser("plan", help="compile a step of each family")
    planning.add_argument("names", nargs="*", metavar="FAMILY", help="all when none is given")
    commands.add_parser("write", help="write the table of docs/models.md")
    asked = parser.parse_args(given)
    if asked.command == "prove":
        keep("proofs", proofs())
    elif asked.command == "plan":
        for name in asked.names or PLANNED:
            keep("plans", {name: step(*PLANNED[name])})
    PAGE.write_text(page(read()), encoding="utf-8")
    return 0


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"proofs": {}, "plans": {}}
    return found


def keep(kind: str, found: Mapping[str, Any]) -> None:
    """Puts what was found of some families beside what is known of the others."""
    record = read()
    record[kind] |= found
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def proofs() -> dict[str, dict[str, str]]:
    """What each proof says of each case, by the case: the largest differences, by what was compared."""
    out: dict[str, dict[str, str]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "",
            "-k",
            CHOSEN,
            f"--junitxml={report}",
            *PROOFS,
        ]
        subprocess.run(tests, cwd=ROOT, check=True)
        for case in ElementTree.parse(report).iter("testcase"):
            for found in case.iter("property"):
                name = case.attrib["name"].partition("[")[2].rstrip("]")
                out[name][found.attrib["name"]] = found.attrib["value"]
    return dict(out)


def step(model: str, machine: str) -> dict[str, Any]:
    """The step of a LoRA run, by plan."""
    devices = machine.rpartition("-")[2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.yaml"
        path.write_text(
            CELL.format(model=model, machine=machine, devices=devices, lora="lora: {rank: 32}"),
            encoding="utf-8",
        )
        of = program(path)
        made = planned(of, plan(of))
    memory = made.memory
    return {
        "model": model,
        "machine": machine,
        "date": made.date,
        "gib": round(memory.used / 2**30, 1),
        "available": round(memory.available / 2**30, 2),
        "seconds": round(made.seconds, 2),
        "tokens": made.tokens,
        "layers": list(made.compiled_layers),
    }


def page(record: Mapping[str, Any]) -> str:
    """docs/models.md with the table of the record."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(FIRST)
    return f"{head}{FIRST}\n\n{table(record)}\n{LAST}{rest.partition(LAST)[2]}"


def table(record: Mapping[str, Any]) -> str:
    rows = [
        "| Family | `model_type` | In the catalogue | Logits | LoRA | Merged | By plan | vLLM-TPU |",
        f"|{' --- |' * 8}",
    ]
    for name, family in FAMILIES.items():
        if not isinstance(family, DecoderFamily):
            continue
        known = [known for known, entry in catalog.entries().items() if entry.get("family") == name]
        cases = [found for case, found in record["proofs"].items() if case.partition("-")[0] == name]
        cells = [
            family.title,
            ", ".join(f"`{kind}`" for kind in family.model_types),
            f"{len(known)}, such as `{known[0]}`" if known else "none",
            *(_worst(cases, what) for what in ("logits", "losses", "merged")),
            _planned(record["plans"].get(name)),
            SERVED[implementation({"model_type": family.model_types[-1]})],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _worst(cases: Sequence[Mapping[str, str]], what: str) -> str:
    found = [float(case[what]) for case in cases if what in case]
    return f"{max(found):.0e}" if found else ""


def _planned(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return (
        f"`{found['model']}` on {found['machine']}: {found['gib']} of {found['available']} GiB, "
        f"{found['seconds']} s for {found['tokens']:,} tokens"
    )


if __name__ == "__main__":
    sys.exit(main())
