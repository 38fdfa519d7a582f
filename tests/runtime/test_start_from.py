"""Tests of DPO that starts from a PEFT adapter, against TRL. test_methods has other training."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from recipec.runtime.errors import UserError
from tests import tiny
from tests.runtime import training
from tests.runtime.preferred import collated, fit_dpo, trainer_of
from tests.runtime.references import losses, save_adapter

MESH = {"fsdp": 2, "tp": 2}
TARGETS = ("q_proj", "v_proj", "down_proj")


STEPS, RATE = 4, 1e-2


def run(base: Path, folder: Path, batch: dict[str, np.ndarray], **found: int) -> dict[str, np.ndarray]:
    """Run DPO from the adapter next to the base to the last step, and return the trained arrays."""
    import jax

    with jax.default_matmul_precision("highest"):
        mesh, built = training.build(base, MESH, targets=TARGETS, start_from="adapter")
        training.start_from(mesh, built, base, folder, objective="dpo", **found)
        fit_dpo(built, mesh, folder, batch, RATE, STEPS)
    return training.adapters(built)


@pytest.mark.usefixtures("compiled_once")
def test_dpo_from_adapter_uses_adapter_as_reference_like_trl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare to 1e-5 of the loss. A resumed run is exact, and a run from another adapter is refused."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipec.compiler.rehearse.miniature import write_tokenizer

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny.make_llama(base, vocab_size=512, num_hidden_layers=2)
    write_tokenizer(base, "llama")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    save_adapter(model, adapter, TARGETS)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter, is_trainable=True
    )
    trainer = trainer_of("dpo", model, AutoTokenizer.from_pretrained(base), tmp_path / "trl")
    inputs, batch = collated(trainer)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    expected = []
    for _ in range(STEPS):
        loss = trainer.compute_loss(trainer.model, inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    whole = run(base, tmp_path / "run", batch)
    found = losses(tmp_path / "run")["loss"]
    print(f"\nlosses {found} differ by {np.abs(np.array(found) - expected).max():.1e}")
    assert found == pytest.approx(expected, abs=1e-5)

    shutil.rmtree(tmp_path / "run" / str(STEPS))
    resumed = run(base, tmp_path / "run", batch, step=2)
    assert losses(tmp_path / "run")["loss"] == found
    assert all(np.array_equal(resumed[path], array) for path, array in whole.items())

    (adapter / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text() + "\n")
    with pytest.raises(UserError, match="is not the adapter that the run began with"):
        run(base, tmp_path / "run", batch, step=2)
    mesh, built = training.build(base, MESH, targets=TARGETS, start_from="adapter")
    fresh = training.adapters(built)
    training.start_from(mesh, built, base, tmp_path / "run", step=2)
    assert "adapter has changed since the run began" in capsys.readouterr().err
    shutil.rmtree(adapter)
    training.start_from(mesh, built, base, tmp_path / "run", step=2)  # a continuation needs no adapter
    assert all(np.array_equal(fresh[path], array) for path, array in training.adapters(built).items())
