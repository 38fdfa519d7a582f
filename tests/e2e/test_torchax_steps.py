"""Tests of an artifact's train_torchax.py against train.py: stopped, resumed and exported runs.

PEFT, merge.py and transformers read its results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from recipec.runtime.data.prepare import prepare
from recipec.runtime.data.tokenizer import load_tokenizer
from recipec.runtime.settings import DataSettings, ModelSettings, TrainSettings
from tests import tiny
from tests.backends import torchax_models
from tests.backends.torchax_models import torch_loss
from tests.runtime import artifacts

pytestmark = pytest.mark.nightly

RECIPE = """\
recipe: 1
name: tiny
model: {{id: {place}/model, dtype: float32}}
mesh: {{accelerator: cpu-4, axes: {{fsdp: 2, tp: 2}}}}
{lora}
data: {{train: [train.jsonl], eval: [eval.jsonl], max_length: 64, packing: true}}
train:
  steps: 8
  global_batch_size: 8
  micro_batch_size: 2
  eval_every: 4
  optimizer: {{learning_rate: 1e-3, max_grad_norm: 1.0}}
  schedule: {{name: cosine, warmup_steps: 2}}
checkpoint: {{directory: checkpoints, every_steps: 2, keep: 4}}
"""
LORA = "lora: {{rank: 4, alpha: 8, dropout: {dropout}, targets: [q_proj, v_proj, o_proj, down_proj]}}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small Gemma 4, its data, and the artifacts of three recipes."""
    place = tmp_path_factory.mktemp("torchax")
    artifacts.write_place(place)
    for name, lora in (
        ("plain", LORA.format(dropout=0.0)),
        ("dropout", LORA.format(dropout=0.1)),
        ("full", "lora: null"),
    ):
        recipe = place / f"{name}.yaml"
        recipe.write_text(RECIPE.format(place=place, lora=lora).replace("tiny", name), encoding="utf-8")
        run(
            place,
            "-m",
            "recipec.compiler.cli.main",
            "build",
            recipe,
            "--backend",
            "torchax",
            "-o",
            place / "generated",
        )
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """Run a training with dropout without interruption, and return its output."""
    train(place, "dropout", "whole")
    return place / "whole"


def run(place: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a Python command, which must succeed."""
    root = Path(__file__).resolve().parents[2]
    environment = {**artifacts.environment(place), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def train(place: Path, recipe: str, output: str, *options: object, script: str = "train_torchax.py") -> str:
    """Run an artifact's script and return its last line."""
    folders = ("--model", place / "model", "--data-dir", place, "--output", place / output)
    done = run(place, place / "generated" / recipe / script, *folders, *options)
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()[-1]


def test_resumed_run_ends_like_an_uninterrupted_run(place: Path, whole: Path) -> None:
    train(place, "dropout", "parts", "--steps", 3)
    train(place, "dropout", "parts", "--resume")
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (place / name / "checkpoints-torchax" for name in ("whole", "parts"))
    ]
    losses = [[line["loss"] for line in run if "loss" in line] for run in lines]
    assert len(losses[0]) == 8 and losses[0] == losses[1]
    weights = [
        (place / name / "adapter/adapter_model.safetensors").read_bytes() for name in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


def test_peft_and_merge_py_load_the_torchax_adapter(place: Path, whole: Path) -> None:
    """Check that PEFT on transformers' model has the run's last evaluation loss."""
    import peft

    adapter = whole / "adapter"
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(model, adapter).eval()
    lines = (whole / "checkpoints-torchax/metrics.jsonl").read_text().splitlines()
    expected = [json.loads(line)["eval_loss"] for line in lines if "eval_loss" in line][-1]
    assert evaluation_loss(place, loaded) == pytest.approx(expected, abs=1e-4)
    merge = place / "generated" / "dropout" / "merge.py"
    run(
        place,
        merge,
        "--model",
        place / "model",
        "--import-adapter",
        adapter,
        "--checkpoint",
        place / "imported",
    )
    assert (place / "imported" / "0" / "model_params").is_dir()


def test_run_started_from_an_adapter_has_its_eval_loss(place: Path, whole: Path) -> None:
    """Start from --adapter: the first loss is that of the model with the adapter."""
    train(place, "plain", "on", "--adapter", whole / "adapter", "--steps", 1)
    lines = (place / "on/checkpoints-torchax/metrics.jsonl").read_text().splitlines()
    begun = json.loads((whole / "checkpoints-torchax/metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(lines[0])["eval_loss"] == pytest.approx(begun["eval_loss"], abs=1e-4)


def test_transformers_loads_the_full_fine_tuning_checkpoint(place: Path) -> None:
    last = train(place, "full", "full")
    expected = float(last.split(" eval_loss=")[1].split()[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "full/model", dtype=torch.float32)
    assert evaluation_loss(place, model.eval()) == pytest.approx(expected, abs=1e-4)


def test_splash_attention_gives_the_gradients_of_dot_attention(tmp_path: Path) -> None:
    """Compare gradients with the interpreted kernel, which gets its segments in the same argument."""
    tiny.make_llama(tmp_path, num_hidden_layers=1, head_dim=128)
    one, axes = torchax_models.packed_batch(padding=0), {"fsdp": 4, "tp": 2}
    dot, splash = (
        torchax_models.build(tmp_path, axes, attention=how, targets=("q_proj",)).gradients(one)[1]
        for how in ("dot", "splash")
    )
    assert torchax_models.largest_difference(dot, splash) < 1e-5


def evaluation_loss(place: Path, model: object) -> float:
    """Compute the mean loss of the evaluation data's targets with torch."""
    data = DataSettings(train=("train.jsonl",), eval=("eval.jsonl",), max_length=64, packing=True)
    settings = ModelSettings(id=str(place / "model"), family="gemma4")
    tokenizer = load_tokenizer(place / "model", settings, data, place)
    prepared = prepare(
        data, TrainSettings(steps=8, global_batch_size=8, micro_batch_size=2), 4, tokenizer, place
    )
    with torch.no_grad():
        return float(np.mean([float(torch_loss(model, one)) for one in prepared.eval_batches]))
