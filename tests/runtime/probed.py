"""Builds the artifact that the probe's tests run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipec.compiler.artifacts.artifact import write
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.compiler.rehearse.artifact_run import script_environment
from recipec.spec.load import load
from tests.conftest import IN_ONE_PIECE

RECIPE = """\
recipe: 1
name: confidential
model: {id: ./secret-model, dtype: float32}
mesh: {accelerator: cpu-4, axes: {fsdp: 2, tp: 2}}
lora: {rank: 4, targets: [q_proj, v_proj, down_proj], trainable_tokens: ["<|im_end|>", 9]}
data: {train: [train.jsonl], max_length: 64}
train: {steps: 10, global_batch_size: 8, micro_batch_size: 2}
"""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def build(place: Path, *sets: str) -> Path:
    """Build the artifact in an empty folder, and return the artifact's folder."""
    (place / "secret-model").mkdir()
    (place / "secret-model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (place / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    program = lower(load(place / "recipe.yaml", sets)).program
    assert program is not None
    write(place / "generated", {program.name: emit(program)})
    return place / "generated" / program.name


def environment_of(artifact: Path) -> Mapping[str, str]:
    """Return the environment of the artifact's scripts, with the devices of its mesh."""
    made = script_environment(artifact.parent)
    return {**made, "XLA_FLAGS": f"{made['XLA_FLAGS']} {IN_ONE_PIECE}"}


def run(artifact: Path, environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the artifact's probe.py."""
    return subprocess.run(
        [sys.executable, str(artifact / "probe.py"), *arguments],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
