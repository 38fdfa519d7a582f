"""Tests of DPO against TRL whose reference is not the base without adapters, and of its resumption.

The reference of trained weights is stored next to them. A run that starts from an adapter has that as its
reference.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from recipec.runtime.errors import UserError
from tests import tiny
from tests.runtime import training
from tests.runtime.preferred import collated, fit_dpo, trainer_of
from tests.runtime.references import losses, save_adapter, split

pytestmark = pytest.mark.usefixtures("compiled_once")

MESH = {"fsdp": 2, "tp": 2}
TARGETS = ("q_proj", "v_proj", "down_proj")
STEPS = 4


def write_base(base: Path) -> Any:
    """Write a checkpoint with a tokenizer, and return transformers' model."""
    tiny.make_llama(base, vocab_size=512, num_hidden_layers=2)
    write_tokenizer(base, "llama")
    return loaded(base)


def loaded(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def by_trl(model: Any, base: Path, folder: Path, rate: float) -> tuple[dict[str, np.ndarray], list[float]]:
    """Train transformers' model by TRL's loss, and return the batch as our rows, and the losses."""
    trainer = trainer_of("dpo", model, AutoTokenizer.from_pretrained(base), folder)
    inputs, batch = collated(trainer)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate)
    found = []
    for _ in range(STEPS):
        loss = trainer.compute_loss(trainer.model, inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return batch, found


def with_adapters(model: Any, base: Path, whole: tuple[str, ...]) -> Any:
    """Return PEFT's model with our initial adapters, and with fully trained modules."""
    import peft

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


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param((), id="all", marks=pytest.mark.nightly),
        pytest.param(("embed_tokens", "lm_head", "input_layernorm"), id="some", marks=pytest.mark.e2e),
    ],
)
def test_full_dpo_losses_match_trl_and_resume_is_exact(whole: tuple[str, ...], tmp_path: Path) -> None:
    """Compare losses to 1e-5. From the second step on, they depend on the reference.

    PEFT's reference is the original modules, which it keeps.
    """
    base, folder, rate = tmp_path / "base", tmp_path / "run", 1e-4
    model = write_base(base)
    how: dict[str, Any] = {"modules_to_save": whole} if whole else {"full": True}
    model = with_adapters(model, base, whole) if whole else model
    batch, expected = by_trl(model, base, tmp_path / "trl", rate)

    def run() -> dict[str, np.ndarray]:
        with jax.default_matmul_precision("highest"):
            mesh, built = training.build(base, MESH, **how)
            fit_dpo(built, mesh, folder, batch, rate, STEPS)
        return training.arrays(built.model)

    trained = run()
    found = losses(folder)["loss"]
    print(f"\nlosses {found} differ by {np.abs(np.array(found) - expected).max():.1e}")
    assert found[0] == pytest.approx(np.log(2), abs=1e-6) and found[-1] < found[0] - 0.03
    assert found == pytest.approx(expected, abs=1e-5)

    shutil.rmtree(folder / str(STEPS))
    resumed = run()
    assert losses(folder)["loss"] == found
    assert all(np.array_equal(resumed[path], array) for path, array in trained.items())


@pytest.mark.e2e
def test_dpo_from_adapter_uses_adapter_as_reference_like_trl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare to 1e-5 of the loss. A resumed run is exact, and a run from another adapter is refused."""
    from peft import PeftModel

    base, adapter, folder, rate = tmp_path / "base", tmp_path / "adapter", tmp_path / "run", 1e-2
    save_adapter(write_base(base), adapter, TARGETS)
    model = PeftModel.from_pretrained(loaded(base), adapter, is_trainable=True)
    batch, expected = by_trl(model, base, tmp_path / "trl", rate)

    def run(**found: int) -> dict[str, np.ndarray]:
        with jax.default_matmul_precision("highest"):
            mesh, built = training.build(base, MESH, targets=TARGETS, start_from="adapter")
            training.start_from(mesh, built, base, folder, objective="dpo", **found)
            fit_dpo(built, mesh, folder, batch, rate, STEPS)
        return training.adapters(built)

    whole = run()
    found = losses(folder)["loss"]
    print(f"\nlosses {found} differ by {np.abs(np.array(found) - expected).max():.1e}")
    assert found == pytest.approx(expected, abs=1e-5)

    shutil.rmtree(folder / str(STEPS))
    resumed = run(step=2)
    assert losses(folder)["loss"] == found
    assert all(np.array_equal(resumed[path], array) for path, array in whole.items())

    (adapter / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text() + "\n")
    with pytest.raises(UserError, match="is not the adapter that the run began with"):
        run(step=2)
    mesh, built = training.build(base, MESH, targets=TARGETS, start_from="adapter")
    fresh = training.adapters(built)
    training.start_from(mesh, built, base, folder, step=2)
    assert "adapter has changed since the run began" in capsys.readouterr().err
    shutil.rmtree(adapter)
    training.start_from(mesh, built, base, folder, step=2)  # a continuation needs no adapter
    assert all(np.array_equal(fresh[path], array) for path, array in training.adapters(built).items())
