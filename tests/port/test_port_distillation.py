"""Test what TRL's GKD becomes, and that a recipe's loss is then GKDTrainer's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipec.port import dialects
from recipec.port.ledger import Ledger
from recipec.port.python_source import read_script
from recipec.port.source import Sources
from recipec.runtime.sections import Distill
from recipec.runtime.training.divergence import divergence
from tests.port.dialects import codes, finding, ported

SCRIPT = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl.experimental.gkd import GKDConfig, GKDTrainer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
teacher = {teacher}
args = GKDConfig(output_dir="out", {arguments})
trainer = GKDTrainer(
    "Qwen/Qwen3-0.6B",
    teacher,
    args,
    train_dataset=load_dataset("our/talks", split="train"),
    processing_class=tokenizer,
)
"""


def script(folder: Path, teacher: str, arguments: str = "") -> Ledger:
    (folder / "train.py").write_text(SCRIPT.format(teacher=teacher, arguments=arguments), encoding="utf-8")
    source, problems = read_script(folder / "train.py")
    assert source is not None, problems
    ledger = Ledger(Sources(source))
    dialects.apply(dialects.load("trl"), ledger)
    return ledger


def test_a_script_loads_its_teacher_or_names_it(tmp_path: Path) -> None:
    loaded = script(
        tmp_path,
        'AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", dtype="float32", revision="v2", '
        "quantization_config=BitsAndBytesConfig(load_in_8bit=True))",
        "bf16=True",
    )
    assert codes(loaded) == []
    wanted = {"id": "Qwen/Qwen3-4B", "revision": "v2", "quantization": "int8"}
    assert loaded.value("train.distill.teacher") == wanted
    assert finding(loaded, "teacher_model_init_kwargs.dtype").verdict.value == "approximated"
    named = script(tmp_path, '"Qwen/Qwen3-4B"', 'teacher_model_init_kwargs={"revision": "v3"}')
    assert codes(named) == []
    assert named.value("train.distill.teacher") == {"id": "Qwen/Qwen3-4B", "revision": "v3"}
    assert named.value("lora") is None


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_of_a_port_is_that_of_gkd_trainer(tmp_path: Path, beta: float) -> None:
    """GKDTrainer itself computes the loss of random logits, in float32, with another temperature than 1.

    The tolerance is 1e-6 relative.
    """
    from trl.experimental.gkd import GKDTrainer

    content = {
        "model_name_or_path": "Qwen/Qwen3-0.6B",
        "dataset_name": "our/talks",
        "teacher_model_name_or_path": "Qwen/Qwen3-4B",
        "beta": beta,
        "temperature": 0.6,
    }
    recipe = ported("trl", tmp_path, content, script="gkd")
    section = {name: recipe.value(f"train.distill.{name}") for name in ("beta", "temperature", "lmbda")}
    distill = Distill(**{name: value for name, value in section.items() if value is not None})
    random = np.random.default_rng(7)
    student, teacher = random.normal(0, 3, (2, 2, 9, 31)).astype(np.float32)
    labels = np.where(random.random((2, 9)) < 0.6, 1, -100)
    trainer: Any = SimpleNamespace(
        beta=beta,
        temperature=0.6,
        teacher_model=_model(teacher),
        generalized_jsd_loss=GKDTrainer.generalized_jsd_loss,
    )
    inputs = {name: torch.tensor(labels) for name in ("input_ids", "attention_mask", "labels")}
    expected = float(GKDTrainer.compute_loss(trainer, _model(student), inputs))
    each = np.asarray(divergence(student, teacher, distill.beta, distill.temperature))[:, :-1]
    counted = labels[:, 1:] != -100
    assert expected > 0.1
    assert float(each[counted].mean()) == pytest.approx(expected, rel=1e-6)


def _model(logits: np.ndarray) -> Any:
    """A model of torch with these logits."""

    class Fixed(torch.nn.Module):
        def forward(self, **inputs: torch.Tensor) -> Any:
            return SimpleNamespace(logits=torch.tensor(logits))

    return Fixed()
