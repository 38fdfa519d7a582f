"""Tests of `recipe rehearse` on each shipped recipe: train, kill, resume, merge and verify, in miniature.

`make e2e` runs one recipe of each family, and `make nightly` runs the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from recipec.compiler.miniature import small_checkpoint
from recipec.runtime.model.families import family_of
from tests.preloaded import preloaded_scripts

RECIPES = Path(__file__).resolve().parent.parent.parent / "recipes"
ELSEWHERE = {
    "gemma3-270m-cpu": "the real model in test_gemma3_270m.py",
    "gemma4-31b-v5p8": "test_rehearse.py",
    "llama31-70b-v5p8": "the same model on two slices, llama31-70b-2xv5p16",
    "quickstart": "`make quickstart` does more, in test_quickstart.py",
}
"""Recipes that other tests rehearse."""
ONE_OF_EACH = ("gemma3-12b-v5e8", "llama31-8b-v6e8", "qwen3-8b-dpo-v5e8")
"""One recipe of each family that ELSEWHERE lacks, and one of preferences."""
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem not in ELSEWHERE)
STEPS = ("miniature", "compile", "train", "kill", "resume", "compare", "merge", "verify")


@pytest.fixture(scope="module", autouse=True)
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run scripts that share imports and compiled code.

    Gemma 4 has one layer of each kind here. Tunix supports Gemma 3 only in whole periods of six.
    """
    whole = small_checkpoint.pattern

    def one_of_each(config: Mapping[str, Any]) -> tuple[int, ...]:
        family = family_of(config)
        if family.name != "gemma4":
            return whole(config)
        types = family.architecture(config).layer_types
        return tuple(sorted(types.index(kind) for kind in set(types)))

    folder = tmp_path_factory.mktemp("preloaded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        patch.setattr(small_checkpoint, "pattern", one_of_each)
        with preloaded_scripts(folder):
            yield


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.e2e if name in ONE_OF_EACH else pytest.mark.nightly)
        for name in NAMES
    ],
)
def test_shipped_recipe_passes_its_rehearsal(name: str) -> None:
    result = CliRunner().invoke(cli.app, ["rehearse", str(RECIPES / f"{name}.yaml"), "--steps", "4"])
    assert result.exit_code == 0, result.output
    table = result.stdout
    assert all(f"{step:<12} ok " in table for step in STEPS), table
    assert "bit-identical" in table and "verified: max logits difference" in table


PICTURED = {
    "llama4": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "llava": "llava-hf/llava-1.5-7b-hf",
    "mistral3": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "paddleocr_vl": "PaddlePaddle/PaddleOCR-VL",
    "pixtral": "mistral-community/pixtral-12b",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-3B-Instruct",
    "qwen3_5": "Qwen/Qwen3.5-0.8B",
    "qwen3_vl_moe": "Qwen/Qwen3-VL-30B-A3B-Instruct",
}
"""Models with a tower of each kind that no shipped recipe has."""
WITH_PICTURES = """\
recipe: 1
name: pictured
model: {{id: {model}}}
mesh: {{accelerator: cpu-4, axes: {{fsdp: 4, tp: 1}}}}
lora: {{rank: 4}}
data: {{train: [train.jsonl], max_length: 1024, images: {{}}}}
train: {{global_batch_size: 4, micro_batch_size: 1, steps: 20}}
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", PICTURED)
def test_every_tower_passes_its_rehearsal(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "pictured.yaml"
    recipe.write_text(WITH_PICTURES.format(model=PICTURED[name]), "utf-8")
    result = CliRunner().invoke(cli.app, ["rehearse", str(recipe), "--steps", "4"])
    assert result.exit_code == 0, result.output
    assert all(f"{step:<12} ok " in result.stdout for step in STEPS), result.stdout
