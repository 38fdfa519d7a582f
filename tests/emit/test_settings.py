"""Tests that scripts state the settings of a plan and a preview, with the language's defaults."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.runtime_settings import run_settings
from recipec.runtime import sections
from recipec.runtime import settings as runtime
from recipec.runtime.model.adapters import LoraSettings
from recipec.spec.load import load

SETS: list[tuple[str, ...]] = [
    (),
    ("data.chat_template='{{ messages }}'", "data.train=[a.jsonl, {path: b.jsonl, weight: 2.0, limit: 3}]"),
    ("lora.layers=0-9", "lora.rank_pattern={down_proj: 4}", "lora.rslora=true", "model.revision=abc"),
    ("lora=null", "merge.adapter=false", "serve=null", "data.packing=false", "data.shuffle_seed=null"),
    ("data.eval_fraction=0.1", "data.eval=[]", "checkpoint.local={directory: /mnt/x, every_steps: 3}"),
    (
        "data.train=[a.jsonl, {path: b.jsonl, format: text, fields: {text: body}, loss_on: all}]",
        "data.loss_on=[assistant, tool]",
        "data.format=chat",
    ),
    ("sharding.rules=[{match: '.*norm.*', spec: [null]}]", "train.steps=3", "train.epochs=null"),
]


def stated(text: str, folder: Path) -> dict[str, Any]:
    """Return the constants of a script, without its imports and definitions."""
    names = {"LoraSettings": LoraSettings, "ARTIFACT": folder} | vars(sections) | vars(runtime)
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "ARTIFACT":
            exec(compile(ast.Module([node], []), "train.py", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("recipe", "sets"), [("qwen3-8b-dpo-v5e8", ()), *(("llama31-8b-v6e8", sets) for sets in SETS)]
)
def test_script_constants_equal_plan_settings(
    root: Path, tmp_path: Path, recipe: str, sets: tuple[str, ...]
) -> None:
    program = lower(load(root / "recipes" / f"{recipe}.yaml", sets), planning=True).program
    assert program is not None
    files = emit(program, (Backend.TORCHAX, Backend.TRL))
    if "chat_template.jinja" in files:
        (tmp_path / "chat_template.jinja").write_bytes(files["chat_template.jinja"])
    settings = run_settings(program)
    for script in ("train.py", "train_torchax.py", "baseline/train_trl.py"):
        found = stated(files[script].decode(), tmp_path)
        assert found["MODEL"] == settings.model and found["TRAIN"] == settings.train
        assert found.get("LORA") == settings.lora
        data = found["DATA"]
        whole = [runtime.Source(one) if isinstance(one, str) else one for one in (*data.train, *data.eval)]
        assert whole == [*settings.data.train, *settings.data.eval]
        assert replace(data, train=(), eval=()) == replace(settings.data, train=(), eval=())
        if script != "baseline/train_trl.py":
            assert found["MESH"] == settings.mesh and found["CHECKPOINT"] == settings.checkpoint
            assert found.get("SHARDING_RULES", ()) == settings.rules


def test_data_source_uses_artifact_copies_of_transform_and_template(root: Path, tmp_path: Path) -> None:
    recipe, artifact = tmp_path / "recipe.yaml", tmp_path / "artifact"
    artifact.mkdir()
    recipe.write_text((root / "recipes" / "llama31-8b-v6e8.yaml").read_text())
    (tmp_path / "own.py").write_text("def one(row):\n    return row\n")
    (tmp_path / "own.jinja").write_text("{{ 1 }}")
    inline = "{path: c.jsonl, chat_template: '{{ 2 }}'}"
    own = f"{{path: b.jsonl, transform: 'own.py:one', chat_template: own.jinja}}, {inline}"
    sets = (f"data.train=[a.jsonl, {own}]", "data.eval=[]")
    program = lower(load(recipe, sets), planning=True).program
    assert program is not None
    files = emit(program, (Backend.TORCHAX, Backend.TRL))
    assert files["own.py"] == (tmp_path / "own.py").read_bytes()
    for name in ("own.jinja", "chat_template.jinja"):
        (artifact / name).write_bytes(files[name])
    for script in ("train.py", "train_torchax.py", "baseline/train_trl.py"):
        data = stated(files[script].decode(), artifact)["DATA"]
        assert data.train == (
            "a.jsonl",
            runtime.Source("b.jsonl", transform=f"{artifact}/own.py:one", chat_template="{{ 1 }}"),
            runtime.Source("c.jsonl", chat_template="{{ 2 }}"),
        )
