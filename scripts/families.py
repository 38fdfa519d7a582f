"""The table of docs/models.md: each family's proofs, a rehearsal, and a planned step.

    python -m scripts.families prove [FAMILY...]     run the proofs and record their results: an hour in all
    python -m scripts.families rehearse [FAMILY...]  `recipe rehearse` with a recipe of each: a minute each
    python -m scripts.families plan [FAMILY...]      compile a step of each at its real size: minutes each
    python -m scripts.families write                 the table, from docs/models.json

Each result is recorded as soon as it is known. scripts/recipes.py plans the families of SHIPPED.
tests/compiler/test_catalog.py compares the page with the record.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recipec.compiler import catalog
from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.plan.identity import versions
from recipec.compiler.plan.planner import plan
from recipec.compiler.vllm.features import implementation
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.families.decoder_family import DecoderFamily
from scripts import recipes
from scripts.recipe_pages import Planned
from scripts.recipe_pages import table as markdown

RECORD = recipes.ROOT / "docs" / "models.json"
PAGE = recipes.ROOT / "docs" / "models.md"
PROOFS = (
    "tests/runtime/test_decoder.py",
    "tests/runtime/test_merge_parity.py",
    "tests/runtime/test_parity.py",
)
CHOSEN = "test_logits_match or test_twenty or test_merged_model"
FIRST, LAST = "<!-- table: scripts/families.py -->", "<!-- end of the table -->"

SERVED = {"jax": "JAX", "torch": "torch", "transformers": "transformers", None: "no"}
"""How the pinned vLLM-TPU runs a class."""

PLANNED = {
    "afmoe": ("arcee-ai/Trinity-Nano-Preview", "v5e-8"),
    "apertus": ("swiss-ai/Apertus-8B-2509", "v5e-8"),
    "arcee": ("arcee-ai/AFM-4.5B", "v5e-8"),
    "cohere2": ("CohereLabs/c4ai-command-r7b-12-2024", "v5e-8"),
    "deepseek_v2": ("deepseek-ai/DeepSeek-V2-Lite", "v6e-8"),
    "deepseek_v3": ("moonshotai/Moonlight-16B-A3B", "v6e-8"),
    "ernie4_5": ("baidu/ERNIE-4.5-0.3B-PT", "v5e-8"),
    "ernie4_5_moe": ("baidu/ERNIE-4.5-21B-A3B-PT", "v6e-8"),
    "falcon": ("tiiuae/falcon-7b", "v5e-8"),
    "falcon_h1": ("tiiuae/Falcon-H1-0.5B-Base", "v5e-8"),
    "gemma1": ("google/gemma-7b", "v5e-8"),
    "glm": ("zai-org/glm-4-9b-chat-hf", "v5e-8"),
    "gemma2": ("google/gemma-2-9b", "v5e-8"),
    "glm4": ("zai-org/GLM-4-9B-0414", "v5e-8"),
    "glm4_moe": ("zai-org/GLM-4.5-Air", "tpu7x-8"),
    "gpt_neox": ("EleutherAI/pythia-6.9b", "v5e-8"),
    "glm4_moe_lite": ("zai-org/GLM-4.7-Flash", "v5p-8"),
    "glm_moe_dsa": ("zai-org/GLM-5", "tpu7x-64"),
    "granite": ("ibm-granite/granite-3.3-8b-base", "v5e-8"),
    "granitemoe": ("ibm-granite/granite-3.1-3b-a800m-base", "v5e-8"),
    "granitemoehybrid": ("ibm-granite/granite-4.0-h-tiny-base", "v5e-8"),
    "hunyuan_v1_dense": ("tencent/Hunyuan-7B-Instruct", "v5e-8"),
    "jamba": ("ai21labs/AI21-Jamba-Reasoning-3B", "v5e-8"),
    "lfm2": ("LiquidAI/LFM2-1.2B", "v5e-8"),
    "lfm2_moe": ("LiquidAI/LFM2-8B-A1B", "v5e-8"),
    "llama": ("meta-llama/Llama-2-7b-hf", "v5e-8"),
    "minimax_m2": ("ModelCloud/MiniMax-M2-BF16", "tpu7x-8"),
    "ministral3": ("mistralai/Ministral-3-8B-Base-2512", "v5e-8"),
    "mistral": ("mistralai/Mistral-7B-v0.1", "v5e-8"),
    "mistral4": ("axolotl-ai-co/Mistral-Small-4-119B-2603-BF16", "tpu7x-16"),
    "mixtral": ("mistralai/Mixtral-8x7B-v0.1", "v6e-8"),
    "nemotron": ("nvidia/Nemotron-Mini-4B-Instruct", "v5e-8"),
    "nemotron_h": ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "v5e-8"),
    "olmo": ("allenai/OLMo-1B-hf", "v5e-8"),
    "olmo2": ("allenai/OLMo-2-1124-7B", "v5e-8"),
    "olmo3": ("allenai/Olmo-3-1025-7B", "v5e-8"),
    "olmoe": ("allenai/OLMoE-1B-7B-0125", "v5e-8"),
    "phi": ("microsoft/phi-2", "v5e-8"),
    "phi3": ("microsoft/phi-4", "v5e-8"),
    "qwen2": ("Qwen/Qwen2.5-7B", "v5e-8"),
    "qwen2_moe": ("Qwen/Qwen1.5-MoE-A2.7B", "v5e-8"),
    "qwen3": ("Qwen/Qwen3-8B", "v5e-8"),
    "qwen3_5": ("Qwen/Qwen3.5-9B", "v5e-8"),
    "qwen3_next": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "v6e-8"),
    "seed_oss": ("ByteDance-Seed/Seed-OSS-36B-Instruct", "v6e-8"),
    "smollm3": ("HuggingFaceTB/SmolLM3-3B", "v5e-8"),
    "stablelm": ("stabilityai/stablelm-2-12b", "v5e-8"),
    "starcoder2": ("bigcode/starcoder2-7b", "v5e-8"),
}
"""A model of every other family, and the machine that its step is compiled for."""

SHIPPED = {
    "gemma3": "gemma3-12b-v5e8",
    "gemma4": "gemma4-31b-v5p8",
    "gpt_oss": "gpt-oss-20b-v6e4",
    "llama4": "llama4-scout-v5p32",
    "qwen3_5_moe": "qwen35-35b-a3b-v6e8",
    "qwen3_moe": "qwen3-30b-a3b-v6e8",
}
"""Families that a recipe in recipes/ trains on the machine that it is for."""

COLUMNS = ("--set", "data.format=prompt_completion", "--set", "data.chat_template=null")
"""Settings for data that needs no chat template, because some models have none."""

USUAL = 16_384
"""The tokens of a micro-batch that the page names once, for all cells without a number."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.families", description="The table of families.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, (doing, _, known) in FOUND.items():
        of = commands.add_parser(command, help=doing)
        of.add_argument(
            "names", nargs="*", metavar="FAMILY", help=f"all when none is given: {', '.join(known)}"
        )
    commands.add_parser("write", help="write the table of docs/models.md")
    asked = parser.parse_args(argv)
    if asked.command in FOUND:
        _, find, known = FOUND[asked.command]
        if unknown := set(asked.names) - set(known):
            parser.error(f"{asked.command} knows no family {', '.join(sorted(unknown))}")
        find(asked.names or known)
    PAGE.write_text(page(read()), encoding="utf-8")
    return 0


def read() -> dict[str, Any]:
    """Read the record by kind: `plans` and `rehearsals` by family, `proofs` by the tests' case."""
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {"proofs": {}, "plans": {}, "rehearsals": {}} | record


def keep(kind: str, name: str, result: Mapping[str, Any]) -> None:
    """Add a result to the record."""
    record = read()
    record[kind][name] = {**result, "versions": versions(), "date": datetime.now(UTC).date().isoformat()}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def prove(names: Sequence[str]) -> None:
    """Run the families' proofs, and record the largest difference that each reports."""
    import pytest

    class Keeper:
        """A plugin that records a test's figures when it has passed."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" and report.passed:
                case = report.nodeid.partition("[")[2].rstrip("]")
                differences = {what: f"{value:.2e}" for what, value in report.user_properties}
                keep("proofs", case, read()["proofs"].get(case, {}) | differences)

    cases = " or ".join(f"[{name}] or [{name}-" for name in names)
    chosen = ["-m", "", "-k", f"({CHOSEN}) and ({cases})", *PROOFS]
    if pytest.main(["-qs", "-o", "timeout=0", *chosen], plugins=[Keeper()]):
        raise SystemExit("a proof fails")


def written(name: str, folder: Path) -> Path:
    """Write a recipe of a family: LoRA on a model of its real size."""
    if name in SHIPPED:
        return recipes.FOLDER / f"{SHIPPED[name]}.yaml"
    model, machine = PLANNED[name]
    path = folder / "cell.yaml"
    devices = from_name(machine).devices
    text = recipes.CELL.format(model=model, machine=machine, devices=devices, lora="lora: {rank: 32}")
    path.write_text(f"{text}checkpoint: {{directory: gs://bucket/run}}\n", encoding="utf-8")  # of all hosts
    return path


def rehearse(names: Sequence[str]) -> None:
    """Train each in miniature on virtual CPU devices, kill and resume the run, merge and verify it."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = written(name, Path(folder))
            figures = recipes.figures(path, *(() if name in SHIPPED else COLUMNS))
            keep("rehearsals", name, {"model": recipes.program(path).recipe.model.id, **figures})


def compile_steps(names: Sequence[str]) -> None:
    """Compile a step of each."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            of = recipes.program(written(name, Path(folder)))
            planned = recipes.planned(of, plan(of))
        result = {
            "model": of.recipe.model.id,
            "machine": of.recipe.mesh.accelerator,
            "gib": round(planned.memory.used / 2**30, 1),
            "available": round(planned.memory.available / 2**30, 2),
            "seconds": round(planned.seconds, 2),
            "tokens": planned.tokens,
            "layers": list(planned.compiled_layers),
        }
        keep("plans", name, result)


FOUND: dict[str, tuple[str, Callable[[Sequence[str]], None], Sequence[str]]] = {
    "prove": ("run the proofs of families", prove, [*PLANNED, *SHIPPED]),
    "rehearse": ("rehearse a recipe of each family", rehearse, [*PLANNED, *SHIPPED]),
    "plan": ("compile a step of each family", compile_steps, [*PLANNED]),
}
"""The commands that produce results: help, function, and families."""


def page(record: Mapping[str, Any]) -> str:
    """Return docs/models.md with the record's table."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(FIRST)
    return f"{head}{FIRST}\n\n{table(record)}\n{LAST}{rest.partition(LAST)[2]}"


def table(record: Mapping[str, Any]) -> str:
    rows = []
    shipped = recipes.read().recipes
    for name, family in FAMILIES.items():
        if not isinstance(family, DecoderFamily):
            continue
        known = [known for known, entry in catalog.entries().items() if entry.get("family") == name]
        cases = [proof for case, proof in record["proofs"].items() if case.partition("-")[0] == name]
        recipe, planned = SHIPPED.get(name), record["plans"].get(name)
        row = (
            family.title,
            ", ".join(f"`{kind}`" for kind in family.model_types),
            f"{len(known)}: `{planned['model'] if planned else known[0]}`" if known else "none",
            _largest(cases),
            _shipped(recipe, shipped[recipe]) if recipe else _planned(planned) if planned else "",
            SERVED[implementation({"model_type": family.model_types[-1]})],
        )
        rows.append(row)
    head = ("Family", "`model_type`", "In the catalog", "Difference", "By plan", "vLLM-TPU")
    return markdown(head, rows)


def _largest(cases: Sequence[Mapping[str, str]]) -> str:
    differences = [
        float(case[what]) for case in cases for what in ("logits", "losses", "merged") if what in case
    ]
    return f"{max(differences):.0e}" if differences else ""


def _planned(planned: Mapping[str, Any]) -> str:
    takes = f"{planned['machine']}: {planned['gib']} GiB"
    return (
        takes + (f", {planned['seconds']} s" if "seconds" in planned else "") + _of_tokens(planned["tokens"])
    )


def _shipped(recipe: str, planned: Planned) -> str:
    """Describe a micro-batch of a recipe."""
    takes = f"`{recipe}`: {planned.memory.used / 2**30:.1f} GiB"
    seconds = "" if planned.seconds is None else f", {planned.seconds:.2f} s"
    return takes + seconds + _of_tokens(planned.tokens // planned.micro_batches)


def _of_tokens(tokens: int) -> str:
    return "" if tokens == USUAL else f" for {tokens:,} tokens"


if __name__ == "__main__":
    sys.exit(main())
