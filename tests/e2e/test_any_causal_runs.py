"""End-to-end tests of models that no family describes, against PEFT on torch.

The artifact trains, merges, verifies, and starts again from its adapter. Each model is also rehearsed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from tests.backends.test_torchax_any_causal import MODELS
from tests.e2e.test_torchax_steps import run
from tests.runtime import artifacts

pytestmark = pytest.mark.nightly

RECIPE = """\
recipe: 1
name: any
model: {{id: ./model, dtype: float32}}
mesh: {{accelerator: cpu-4, axes: {{fsdp: 2, tp: 2}}}}
lora: {{rank: 3, alpha: 6, dropout: 0.1, targets: [{targets}]}}
data: {{train: [train.jsonl], eval: [eval.jsonl], max_length: 64, packing: {packing}}}
train: {{steps: 20, global_batch_size: 8, micro_batch_size: 2, optimizer: {{learning_rate: 1e-2}}}}
checkpoint: {{directory: checkpoints, every_steps: 10}}
merge: {{dtype: float32}}
"""


@pytest.fixture(scope="module", params=MODELS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a checkpoint, data, a recipe and its artifact, trained and merged."""
    name = str(request.param)
    place = tmp_path_factory.mktemp(name)
    artifacts.write_place(place)
    make, targets = MODELS[name]
    make(place / "model", vocab_size=520)
    (place / "model" / "model.safetensors.index.json").unlink()
    write_tokenizer(place / "model", "qwen3")
    packing = json.dumps(name == "helium")
    text = RECIPE.format(targets=", ".join(targets), packing=packing)
    (place / "recipe.yaml").write_text(text, encoding="utf-8")
    options = ("--backend", "torchax", "-o", place / "generated")
    run(place, "-m", "recipec.compiler.cli.main", "build", place / "recipe.yaml", *options)
    train(place, "out")
    merge(place, "--verify")
    return place


def train(place: Path, output: str, *options: object) -> str:
    """Run train.py and return its last line."""
    folders = ("--model", place / "model", "--data-dir", place, "--output", place / output)
    return run(place, place / "generated/any/train.py", *folders, *options).stdout.splitlines()[-1]


def merge(place: Path, *options: object, output: str = "out") -> str:
    folders = ("--model", place / "model", "--output", place / output)
    return run(place, place / "generated/any/merge.py", *folders, *options).stdout


def logits(model: Any) -> np.ndarray:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 500, (2, 23)))
    with torch.no_grad():
        out: np.ndarray = model.eval()(input_ids=tokens, use_cache=False).logits.numpy()
    return out


def test_merged_model_gives_the_logits_of_the_peft_merge(place: Path) -> None:
    """Compare logits within 1e-5; the adapters change them by far more."""
    import peft

    base = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    before = logits(base)
    merged = AutoModelForCausalLM.from_pretrained(place / "out/merged", dtype=torch.float32)
    ours = logits(merged)
    theirs = logits(peft.PeftModel.from_pretrained(base, place / "out/merged-adapter").merge_and_unload())
    assert np.abs(ours - theirs).max() < 1e-5
    assert np.abs(ours - before).max() > 0.1


def test_run_from_an_imported_adapter_starts_at_its_eval_loss(place: Path) -> None:
    adapter = place / "out/merged-adapter"
    assert "imported:" in merge(place, "--import-adapter", adapter, output="again")
    assert train(place, "again", "--resume", "--steps", 2).startswith("done: steps=2 ")
    loss = [
        next(json.loads(line)["eval_loss"] for line in order if "eval_loss" in line)
        for order in (
            reversed((place / "out/checkpoints/metrics.jsonl").read_text().splitlines()),
            (place / "again/checkpoints/metrics.jsonl").read_text().splitlines(),
        )
    ]
    assert loss[0] == pytest.approx(loss[1], abs=1e-4)


def test_resumed_run_gives_the_adapter_of_an_uninterrupted_run(place: Path) -> None:
    train(place, "parts", "--steps", 10)
    train(place, "parts", "--resume")
    weights = [(place / name / "adapter/adapter_model.safetensors").read_bytes() for name in ("out", "parts")]
    assert weights[0] == weights[1]


def test_rehearsal_of_an_undescribed_model_passes(place: Path) -> None:
    done = CliRunner().invoke(cli.app, ["rehearse", str(place / "recipe.yaml"), "--steps", "4"])
    assert done.exit_code == 0, done.output
