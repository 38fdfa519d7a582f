"""Tests of models that no family describes in the compiler: from config.json and safetensors headers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.catalog import listing
from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import Lowered
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.backend import Backend

Lower = Callable[..., Lowered]
HELIUM: dict[str, Any] = {
    "architectures": ["HeliumForCausalLM"],
    "model_type": "helium",
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
SHAPES = {
    "self_attn.q_proj": (48, 48),
    "self_attn.k_proj": (16, 48),
    "self_attn.v_proj": (16, 48),
    "self_attn.o_proj": (48, 48),
    "mlp.up_proj": (90, 48),
    "mlp.down_proj": (48, 90),
}
TENSORS = {
    "model.embed_tokens.weight": (509, 48),
    "lm_head.weight": (509, 48),
    "model.norm.weight": (48,),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()},
}
MAMBA = {f"model.layers.{i}.mamba.A_log": (7,) for i in range(2)}
SETS = (
    "model.id=./checkpoint",
    "mesh={accelerator: cpu-4, axes: {fsdp: 2, tp: 2}}",
    "lora={rank: 4, targets: [q_proj, down_proj]}",
)


def write(place: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None) -> None:
    """Write a checkpoint's config.json, and a safetensors file that ends after its header."""
    folder = place / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        header = json.dumps({name: {"dtype": "BF16", "shape": shape} for name, shape in tensors.items()})
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())


def found(lowered: Lowered) -> dict[str, str]:
    """Return messages by their codes, without the warning about missing data."""
    return {d.code: d.message for d in lowered.diagnostics if d.code != "W0401"}


def test_model_without_a_family_trains_only_on_torchax(lowered: Lower, tmp_path: Path) -> None:
    write(tmp_path, HELIUM | {"attention_dropout": 0.1}, TENSORS)
    made = lowered(*SETS)
    assert found(made).keys() == {"N0946", "W0204", "W0805"}
    assert "attention_dropout 0.1" in found(made)["W0805"] and "vocabulary of 509" in found(made)["W0204"]
    program = made.program
    assert program is not None
    assert [adapter.module for adapter in program.adapters] == [
        f"layers.{i}.{name}" for i in range(2) for name in ("mlp.down_proj", "self_attn.q_proj")
    ]
    for backends in ((), (Backend.TRL,), (Backend.TORCHAX, Backend.TRL)):
        assert [d.code for d in diagnosed(program, backends)] == ["E0945"]
    assert diagnosed(program, [Backend.TORCHAX]) == []
    files = emit(program, [Backend.TORCHAX])
    assert not {"train_torchax.py", "requirements-torchax.txt"} & files.keys()
    assert b"runtime.backends.torchax.torchax_run" in files["train.py"]
    assert b"torchax==" in files["requirements-train.txt"]


def test_sharding_rule_overrides_the_spec_derived_from_names(lowered: Lower, tmp_path: Path) -> None:
    write(tmp_path, HELIUM, TENSORS)
    rule = "sharding.rules=[{match: '.*mlp.up_proj.weight', spec: [null, fsdp]}]"
    made = lowered(*SETS, rule)
    assert made.program is not None and "N0935" not in found(made)
    specs = {p.path: p.spec for p in made.program.parameters}
    assert specs["layers.0.mlp.up_proj.weight"] == (None, "fsdp")
    assert specs["layers.0.mlp.down_proj.weight"] == ("fsdp", "tp")
    other = "sharding.rules=[{match: 'lm_head.weight', spec: [tp, fsdp]}]"
    assert "N0213" in found(lowered(*SETS, other))
    uneven = "sharding.rules=[{match: 'lm_head.weight', spec: [fsdp, null]}]"
    assert "E0204" in found(lowered(*SETS, uneven))


@pytest.mark.parametrize(
    ("setting", "code", "where"),
    [
        ("lora=null", "E0948", "model.id"),
        ("model.quantization=nf4", "E0948", "model.quantization"),
        ("lora.trainable_tokens=[3]", "E0326", "lora.trainable_tokens"),
        ("model.attention=splash", "E0948", "model.attention"),
        ("mesh={accelerator: v5p-32, axes: {fsdp: 16}}", "E0948", "mesh.accelerator"),
        ("lora.targets=[lm_head]", "E0302", "lora.targets[0]"),
    ],
)
def test_settings_unsupported_without_a_family_are_refused(
    setting: str, code: str, where: str, lowered: Lower, tmp_path: Path
) -> None:
    write(tmp_path, HELIUM, TENSORS)
    said = {(d.code, d.path) for d in lowered(*SETS, setting).diagnostics}
    assert (code, where) in said


@pytest.mark.parametrize(
    ("kind", "tensors", "why"),
    [
        ("bamba", TENSORS | MAMBA, "carry a state from token to token"),
        ("gemma3n_text", TENSORS, "not known to separate"),
    ],
)
def test_packing_is_refused_if_samples_cannot_be_separated(
    kind: str, tensors: Mapping[str, tuple[int, ...]], why: str, lowered: Lower, tmp_path: Path
) -> None:
    write(tmp_path, HELIUM | {"model_type": kind}, tensors)
    made = lowered(*SETS)
    assert made.program is None and why in found(made)["E0947"]
    assert lowered(*SETS, "data.packing=false").program is not None


@pytest.mark.parametrize(
    ("changes", "tensors", "code", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, TENSORS, "E0803", "it is an encoder-decoder"),
        (
            {"architectures": ["XForSequenceClassification"]},
            TENSORS,
            "E0803",
            "is not a causal language model",
        ),
        ({"model_type": "mine"}, TENSORS, "E0803", "neither a family nor transformers itself has"),
        ({"quantization_config": {}}, TENSORS, "E0803", "stored quantized"),
        ({}, {**TENSORS, "vision.weight": (3, 3)}, "E0803", "vision.weight is a tensor neither"),
        ({}, {"transformer.wte.weight": (509, 48)}, "E0803", "its tensors are not named"),
        (
            {"num_hidden_layers": 3},
            TENSORS,
            "E0803",
            "num_hidden_layers is 3, and there are tensors of layers 0-1",
        ),
        ({"hidden_size": 64}, TENSORS, "E0803", "hidden_size is 64"),
        ({"head_dim": -1}, TENSORS, "E0803", "head_dim is -1"),
        (
            {"model_type": "bamba"},
            {key: shape for key, shape in (TENSORS | MAMBA).items() if "self_attn" not in key},
            "E0803",
            "it has no attention",
        ),
        ({}, None, "E0818", "has no safetensors"),
    ],
)
def test_unsuitable_checkpoints_are_refused_with_the_reason(
    changes: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]] | None,
    code: str,
    words: str,
    lowered: Lower,
    tmp_path: Path,
) -> None:
    write(tmp_path, HELIUM | changes, tensors)
    made = lowered(*SETS)
    assert made.program is None and words in found(made)[code]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"\xff" * 40, "model.safetensors is not a safetensors file"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "b.safetensors"}}',
            "b.safetensors is missing",
        ),
    ],
)
def test_damaged_safetensors_or_index_file_is_an_error(
    name: str, content: bytes, words: str, lowered: Lower, tmp_path: Path
) -> None:
    write(tmp_path, HELIUM, None)
    (tmp_path / "checkpoint" / name).write_bytes(content)
    assert words in found(lowered(*SETS))["E0818"]


def test_added_model_without_a_family_is_read_from_tensors_json(lowered: Lower, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "maker--any"
    folder.mkdir(parents=True)
    listed = {"model.safetensors": {name: ["BF16", list(shape)] for name, shape in TENSORS.items()}}
    contents = {"config.json": json.dumps(HELIUM), "tensors.json": json.dumps(listed)}
    for name, text in contents.items():
        (folder / name).write_text(text)
    files = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in contents.items()}
    lock = {"lock": 1, "id": "maker/any", "revision": None, "commit": "0" * 40, "files": files}
    (folder / "model.lock.json").write_text(json.dumps(lock))
    made = lowered(*SETS, "model.id=maker/any", "data.format=text")
    assert made.program is not None and "N0946" in found(made)
    assert made.program.base_parameters == sum(math.prod(shape) for shape in TENSORS.values())


def test_causal_model_table_has_the_pinned_transformers_version() -> None:
    table = json.loads(listing.CAUSAL.read_text(encoding="utf-8"))
    assert table["transformers"] == pins.sets()["train-cpu"]["direct"]["transformers"]
    assert table["packed"]["helium"] and not table["packed"]["bamba"] and "t5" not in table["packed"]
