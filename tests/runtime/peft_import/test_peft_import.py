"""Tests of adapters that the real PEFT saved, imported exactly as step 0 of a run."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import transformers

from recipec.runtime.checkpoints import resuming
from recipec.runtime.checkpoints.trained_weights import TrainedAdapters, load_trained
from recipec.runtime.data.prepare import prepare
from recipec.runtime.data.tokenizer import load_tokenizer
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.peft.exporting import same_scale
from recipec.runtime.peft.importing import import_adapter
from recipec.runtime.peft.peft_names import keys_as_values
from recipec.runtime.sections import Log
from recipec.runtime.settings import (
    CheckpointSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
    TrainSettings,
)
from recipec.runtime.training import train
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import decoders
from tests.runtime.peft_import.adapters import CONFIG, LIMIT, TEXT, arrays_of, assert_same, randomize
from tests.runtime.runs import lora_section, write_adapter, write_lock

TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}

CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # A vision tower whose projections have the same names; a global layer without v_proj.
    "gemma4": (
        tiny.make_gemma4,
        TWO,
        {
            "target_modules": TEXT
            + r"(mlp\.down_proj|self_attn\.k_proj|self_attn\.o_proj|self_attn\.v_proj)",
            "rank_pattern": {"k_proj": 5, r"layers\.1\.mlp\.down_proj": 2},
            "alpha_pattern": {"v_proj": 9},
        },
    ),
    # As many key heads as query heads, and no adapter on K.
    "gemma3": (
        tiny.make_gemma3,
        {"num_key_value_heads": 8, "num_hidden_layers": 2},
        {
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 3.5},
        },
    ),
    # Parameters: experts, which are separate tensors in the base, and the router.
    "qwen3_moe": (
        partial(decoders.make, "qwen3_moe"),
        {"num_hidden_layers": 2, "mlp_only_layers": [0]},
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.gate.weight"],
            "rank_pattern": {r"experts\.down_proj": 2},
        },
    ),
}


class Case:
    """A base, an adapter that PEFT saved, a matching artifact, and the imported run."""

    def __init__(self, folder: Path, make: Any, sizes: dict[str, Any], fields: dict[str, Any]) -> None:
        import peft

        made = make(folder / "base", **sizes)
        self.reference = lambda: type(made).from_pretrained(folder / "base", dtype="float32").eval()
        self.base = HFCheckpoint.open(folder / "base")
        self.model = ModelSettings(
            id=str(folder / "base"), family=self.base.family.name, dtype="float32", remat="none"
        )
        config = peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, task_type="CAUSAL_LM", **fields)
        self.wrapped = peft.get_peft_model(self.reference(), config)
        randomize(self.wrapped)
        self.adapter = folder / "adapter"
        self.wrapped.save_pretrained(self.adapter)
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        targets = fields["target_modules"]
        self.section = lora_section(
            rank=4,
            alpha=8.0,
            rslora=True,
            dropout=0.0,
            targets=[
                *(name for name in names if name in targets),
                *(("experts", "router") if "target_parameters" in fields else ()),
            ],
            rank_pattern=fields.get("rank_pattern", {}),
            alpha_pattern=fields.get("alpha_pattern", {}),
        )
        self.folder = folder
        write_lock(folder / "artifact", self.base, self.section)
        assert import_adapter(self.adapter, self.base, folder / "artifact", folder / "run") == 0
        trained = load_trained(folder / "run", "latest", self.base)
        assert isinstance(trained, TrainedAdapters) and trained.step == 0
        self.trained = trained


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), *CASES[request.param])


def test_imported_deltas_equal_peft_bit_for_bit(case: Case) -> None:
    deltas = case.trained.deltas()
    found = {}
    for name, module in case.wrapped.named_modules():
        if hasattr(module, "lora_A"):
            own = name[name.index("layers.") :].replace(".base_layer", "")
            if hasattr(module, "parameter_name"):
                own = f"{own}.{module.parameter_name}".removesuffix(".weight")
            delta = deltas.pop(own)
            assert delta.scale == module.scaling["default"], name
            found[f"{name}.lora_A.weight"], found[f"{name}.lora_B.weight"] = delta.a, delta.b
    assert not deltas, "nothing else is trained"
    assert_same(arrays_of(case.adapter), found)


def test_reexported_adapter_equals_the_adapter_saved_by_peft(case: Case, tmp_path: Path) -> None:
    import peft

    deltas = case.trained.deltas()
    write_adapter(tmp_path, case.base, case.model, case.trained)
    original, again = arrays_of(case.adapter), arrays_of(tmp_path)
    copies = {name: again.pop(name) for name in again.keys() - original.keys()}
    assert_same(original, again)
    pairs = keys_as_values(case.base, deltas)
    named = [values for keys, values in pairs if same_scale(case.trained.settings, keys, values)]
    assert len(copies) == 2 * len(named), "of keys that serve as values, for vLLM"
    for name, array in copies.items():
        np.testing.assert_array_equal(array, original[name.replace(".v_proj.", ".k_proj.")])
    expected, found = (peft.LoraConfig.from_pretrained(folder) for folder in (case.adapter, tmp_path))
    for config in (expected, found):
        config.target_parameters = sorted(config.target_parameters or ())
    assert dataclasses.asdict(found) == dataclasses.asdict(expected)
    for key, value in json.loads((tmp_path / CONFIG).read_text()).items():
        original = json.loads((case.adapter / CONFIG).read_text())[key]
        assert value == (
            sorted(original) if key.startswith("target_") and isinstance(value, list) else original
        )


def test_training_resumes_from_an_imported_adapter(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run train.py --resume: its first loss is PEFT's, and the saved step is an ordinary one."""

    import peft

    base = HFCheckpoint.open(place / "model")
    targets = ["q_proj", "v_proj", "down_proj"]
    reference = transformers.Gemma4ForConditionalGeneration.from_pretrained(place / "model", dtype="float32")
    modules = TEXT + r"(self_attn\.[qv]_proj|mlp\.down_proj)"
    wrapped = peft.get_peft_model(
        reference.eval(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=modules)
    )
    randomize(wrapped)
    wrapped.save_pretrained(tmp_path / "adapter")
    write_lock(tmp_path / "artifact", base, lora_section(rank=2, alpha=4.0, dropout=0.0, targets=targets))
    run = tmp_path / "work" / "checkpoints"
    import_adapter(tmp_path / "adapter", base, tmp_path / "artifact", run)

    model = ModelSettings(id="recipec/tiny-gemma4", family="gemma4", dtype="float32", remat="none")
    data = DataSettings(train=("train.jsonl",), max_length=48, packing=False)
    settings = TrainSettings(steps=2, global_batch_size=4, micro_batch_size=2, log=Log(1, tensorboard=False))
    paths = ("--model", str(place / "model"), "--data-dir", str(place), "--output", str(tmp_path / "work"))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with warnings.catch_warnings():
        status = train.run(
            tmp_path / "artifact",
            train.parse_arguments(tmp_path / "artifact", ["--resume", "--steps", "1", *paths]),
            model=model,
            mesh=MeshSettings(platform="cpu", devices=2, axes={"fsdp": 2, "tp": 1}),
            lora=LoraSettings(rank=2, alpha=4.0, targets=tuple(targets), dropout=0.0),
            data=data,
            train=settings,
            checkpoint=CheckpointSettings(directory="checkpoints", every_steps=1, keep=2),
            learning_rate=lambda steps: optax.linear_schedule(1e-2, 0.0, steps),
            optimizer=lambda schedule: optax.adamw(schedule, weight_decay=0.01),
        )
    jax.config.update("jax_default_matmul_precision", None)
    err = capsys.readouterr().err
    assert status == 0, err
    assert f"note: step 0 holds the adapter of {tmp_path / 'adapter'}: training begins with it" in err

    tokenizer = load_tokenizer(place / "model", model, data, place)
    batch = prepare(data, settings, 4, tokenizer, place, base.architecture.vocab_size).micro_batch(0)
    total = 0.0
    for tokens, segments, mask in zip(batch["tokens"], batch["segment_ids"], batch["loss_mask"], strict=True):
        for segment in range(1, segments.max() + 1):
            own = segments == segment
            ids = torch.tensor(tokens[own].astype(np.int64))
            with torch.no_grad():
                chosen = torch.log_softmax(wrapped(input_ids=ids[None]).logits[0, :-1], -1)
            total -= float((chosen.gather(-1, ids[1:, None])[:, 0] * torch.tensor(mask[own][1:])).sum())
    (first,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert first["step"] == 1 and first["learning_rate"] == pytest.approx(1e-2)
    assert first["loss"] == pytest.approx(total / float(batch["norm"]), abs=LIMIT)
    found = resuming.find(str(run))
    assert found.step == 1 and found.imported is None and found.data is not None
