"""Tests of DPO of all weights: its reference is stored next to them, through steps and a resumption."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.runtime import training
from tests.runtime.preferred import collated, fit_dpo, trainer_of
from tests.runtime.references import losses, split

MESH = {"fsdp": 2, "tp": 2}
STEPS, RATE = 4, 1e-4


def run(
    base: Path, folder: Path, batch: dict[str, np.ndarray], until: int, **model: Any
) -> dict[str, np.ndarray]:
    """Train to a step, or continue to it from the folder's checkpoint, and return the model's arrays."""
    import jax

    with jax.default_matmul_precision("highest"):
        mesh, built = training.build(base, MESH, **model)
        fit_dpo(built, mesh, folder, batch, RATE, until)
    return training.arrays(built.model)


def with_adapters(model: Any, base: Path, whole: tuple[str, ...]) -> Any:
    """Return PEFT's model with our initial adapters, and with fully trained modules."""
    import peft
    import torch

    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(training.TARGETS),
        modules_to_save=[*whole],
        task_type="CAUSAL_LM",
    )
    made = peft.get_peft_model(model, config)
    ours = split(training.build(base, MESH)[1])
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_A" in name:
                module = name[name.index("layers.") :].partition(".lora_")[0]
                parameter.copy_(torch.tensor(ours[module][0]))
    return made


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    "whole",
    [
        pytest.param((), id="all", marks=pytest.mark.nightly),
        pytest.param(("embed_tokens", "lm_head", "input_layernorm"), id="some"),
    ],
)
def test_full_dpo_losses_match_trl_and_resume_is_exact(whole: tuple[str, ...], tmp_path: Path) -> None:
    """Compare losses to 1e-5. From the second step on, they depend on the reference.

    PEFT's reference is the original modules, which it keeps.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipec.compiler.rehearse.miniature import write_tokenizer

    base = tmp_path / "base"
    tiny.make_llama(base, vocab_size=512, num_hidden_layers=2)
    write_tokenizer(base, "llama")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    how: dict[str, Any] = {"train_also": whole} if whole else {"full": True}
    model = with_adapters(model, base, whole) if whole else model
    trainer = trainer_of("dpo", model, AutoTokenizer.from_pretrained(base), tmp_path / "trl")
    inputs, batch = collated(trainer)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=RATE)
    expected = []
    for _ in range(STEPS):
        loss = trainer.compute_loss(trainer.model, inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))

    trained = run(base, tmp_path / "run", batch, STEPS, **how)
    found = losses(tmp_path / "run")["loss"]
    print(f"\nlosses {found} differ by {np.abs(np.array(found) - expected).max():.1e}")
    assert found[0] == pytest.approx(np.log(2), abs=1e-6) and found[-1] < found[0] - 0.03
    assert found == pytest.approx(expected, abs=1e-5)

    shutil.rmtree(tmp_path / "run" / str(STEPS))
    resumed = run(base, tmp_path / "run", batch, STEPS, **how)
    assert losses(tmp_path / "run")["loss"] == found
    assert all(np.array_equal(resumed[path], array) for path, array in trained.items())
