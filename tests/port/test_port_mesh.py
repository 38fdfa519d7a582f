"""Test meshes of ports: experts are split over ep if they do not fit on fsdp, as in `recipe new`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.new.draft import drafts
from recipec.compiler.new.new_recipe import look
from recipec.port.port import Asked, port

AXOLOTL: dict[str, Any] = {
    "base_model": "openai/gpt-oss-20b",
    "datasets": [{"path": "some/talks", "type": "chat_template"}],
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_linear": True,
    "sequence_len": 4096,
    "sample_packing": True,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 16,
    "num_epochs": 1,
    "learning_rate": 2.0e-4,
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
}


def mesh(folder: Path, machine: str, **changes: Any) -> tuple[dict[str, int], str]:
    """Return the axes of a port, and the comment on them."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({**AXOLOTL, **changes}), encoding="utf-8")
    asked = Asked(from_name(machine), None, place=folder / "recipe.yaml", sets=("output_dir=gs://b/run",))
    ported = port([config], asked)
    assert ported.whole, ported.diagnostics
    assert ported.ledger is not None
    line = ported.ledger.lines["mesh.axes"]
    return line.value, line.comment


@pytest.mark.parametrize("machine", ["v6e-8", "v6e-16", "v5p-8"])
@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B"])
def test_experts_are_split_where_recipe_new_splits_them(tmp_path: Path, machine: str, model: str) -> None:
    axes, comment = mesh(tmp_path, machine, base_model=model)
    assert axes == axes_of_new(tmp_path, machine, model)
    assert ("ep" in axes) is ("by estimate" in comment)


def axes_of_new(folder: Path, machine: str, model: str) -> dict[str, int]:
    """Return the axes of the first draft of `recipe new`."""
    probe = look("new", model, "lora", folder / "new.yaml")
    return dict(next(iter(drafts(probe, from_name(machine), "lora"))).axes)


def test_dense_model_stays_on_fsdp_and_few_rows_have_no_ep(tmp_path: Path) -> None:
    assert mesh(tmp_path, "v5e-8", base_model="Qwen/Qwen3-8B") == ({"fsdp": 8, "tp": 1}, "")
    axes, comment = mesh(tmp_path, "v6e-8", gradient_accumulation_steps=2)
    assert (axes, comment) == ({"fsdp": 2, "tp": 4}, "")


def test_mesh_of_a_tpu_tool_is_kept(tmp_path: Path) -> None:
    config = {
        "model_name": "qwen3-30b-a3b",
        "steps": 10,
        "hf_path": "HuggingFaceH4/ultrachat_200k",
        "use_sft": True,
        "per_device_batch_size": 4,
        "ici_fsdp_parallelism": 4,
        "ici_tensor_parallelism": 2,
        "base_output_directory": "gs://b",
        "run_name": "run",
    }
    (tmp_path / "sft.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    ported = port([tmp_path / "sft.yml"], Asked(from_name("v6e-8"), None, place=tmp_path / "recipe.yaml"))
    assert ported.ledger is not None
    assert ported.ledger.value("mesh.axes") == {"fsdp": 4, "tp": 2}
