"""Tests of adapters that a run cannot start from: the error names a way out, which works."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.checkpoints.trained_weights import TrainedAdapters, load_trained
from recipec.runtime.errors import UserError
from recipec.runtime.peft.adapter import PASSIVE, REFUSED
from recipec.runtime.peft.importing import import_adapter
from tests.runtime.peft_import.adapters import (
    BUILD,
    CONFIG,
    WEIGHTS,
    Small,
    arrays_of,
    rename,
    set_config,
    write_tensors,
)
from tests.runtime.runs import save_run, write_lock

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def label(value: object) -> str:
    """Name a case by its messages."""
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("change", "message", "help"),
    [
        (set_config(use_dora=True), "has no magnitude_vector", "download or save"),
        (set_config(layer_replication=[[0, 2]]), "layer_replication is set: it means", "merge_and_unload"),
        (set_config(trainable_token_indices=[1, 2]), "has no rows of the embedding", "download or save"),
        (set_config(trainable_token_indices=[1, 1]), "is [1, 1], not a list of", "download or save"),
        (set_config(trainable_token_indices={"lm_head": [1]}), "names lm_head", "merge_and_unload"),
        (set_config(bias="all"), 'bias is "all": the base\'s biases', "merge_and_unload"),
        (set_config(peft_type="VERA"), 'peft_type is "VERA", not LORA', "merge_and_unload"),
        (set_config(use_newlora=True), "use_newlora is set, and is not among", "remove use_newlora from"),
        (set_config(init_lora_weights="pissa"), 'is "pissa": it may have changed', "path_initial_model"),
        (set_config(r="8"), 'r is "8", not a rank', "again"),
        (lambda folder: (folder / CONFIG).unlink(), f"no {CONFIG}", "one of its checkpoint-N"),
        (set_config(r=6), "has shape [3, 64]; adapter_config.json gives it rank 6", "one adapter"),
    ],
    ids=label,
)
def test_import_refuses_unsupported_or_broken_adapter(
    small: Small, copy: Path, tmp_path: Path, change: Callable[[Path], Any], message: str, help: str
) -> None:
    change(copy)
    first, second = small.fail(copy, tmp_path).split("\n")
    assert first.startswith("ADAPTER") and message in first and help in second


def put(name: str, *shape: int, dtype: Any = np.float32) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda arrays: arrays.update({name.replace("BASE", WRAPPED): np.ones(shape, dtype)})


def both(module: str, outputs: int) -> Callable[[dict[str, np.ndarray]], Any]:
    """Put A and B of a module."""
    pair = put(f"BASE.{module}.lora_A.weight", 3, 64), put(f"BASE.{module}.lora_B.weight", outputs, 3)
    return lambda arrays: [one(arrays) for one in pair]


def poison(arrays: dict[str, np.ndarray]) -> None:
    arrays[f"{FIRST}.lora_A.weight"] = np.full((3, 64), np.nan, np.float32)


WRAPPED = "base_model.model.model"
VISION = "vision_tower.encoder.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message", "help"),
    [
        (put("BASE.embed_tokens.lora_embedding_A", 3, 509), "an adapter on an embedding", "merge_and_unload"),
        (put("BASE.embed_tokens.weight", 509, 64), "the base's own embedding", "save_embedding_layers=False"),
        (put("BASE.modules_to_save.weight", 2, 64), "a module that was trained whole", "merge_and_unload"),
        (both(VISION, 64), f"model.{VISION} carries an adapter", "lora.vision: true"),
        (both("layers.0.input_layernorm", 64), "is not a projection that", "merge_and_unload"),
        (both("layers.2.self_attn.q_proj", 128), "the base has 2 layers", "base with --model (some/gemma)"),
        (put(f"{FIRST}.lora_A.other.weight", 3, 64), "has more than one A", "a single adapter"),
        (lambda arrays: arrays.pop(f"{FIRST}.lora_B.weight"), "q_proj has no B", "again"),
        (lambda arrays: arrays.clear(), "holds no adapter", "again"),
        (put(f"{FIRST}.lora_B.weight", 96, 3), "[96, 3]; the base's weight needs [128, 3]", "with --model"),
        (put(f"{FIRST}.lora_A.weight", 3, 64, dtype=np.float64), "has type F64", "bfloat16 or float16"),
        (poison, "q_proj holds values that are not finite", "earlier checkpoint"),
    ],
    ids=label,
)
def test_import_refuses_unsupported_or_mismatched_adapter_tensors(
    small: Small,
    copy: Path,
    tmp_path: Path,
    change: Callable[[dict[str, np.ndarray]], Any],
    message: str,
    help: str,
) -> None:
    arrays = arrays_of(copy)
    change(arrays)
    write_tensors(copy, arrays)
    first, second = small.fail(copy, tmp_path).split("\n")
    assert first.startswith(f"ADAPTER/{WEIGHTS}: ") and message in first and help in second


RECIPES: dict[str, tuple[dict[str, Any], str, str]] = {
    "all that differs at once": (
        {"rank": 4, "targets": ["q_proj"], "modules_to_save": ["norm"], "kind": "dora"},
        "which the recipe does not train; the recipe trains norm.weight whole, which the adapter does not "
        "have; "
        "use_dora is false, and lora.kind dora; layers.0.self_attn.q_proj (and 7 more) has rank 3",
        "lora.targets: [down_proj, k_proj, q_proj, v_proj], lora.layers: all, lora.modules_to_save: [], "
        "lora.kind: lora, lora.rank: 3, lora.rank_pattern: {}",
    ),
    "rows of the embedding": (
        {"trainable_tokens": [3, 7]},
        "does not fit the recipe: the adapter has the embedding's rows [], and the recipe trains [3, 7]",
        "lora.trainable_tokens: []",
    ),
    "scaling": ({"rslora": True}, "use_rslora is false, and lora.rslora true", "lora.rslora: false"),
    "rank and alpha": (
        {"rank": 6, "alpha": 12.0},
        "has rank 3, in the recipe 6; layers.0.self_attn.q_proj (and 7 more) has alpha 6, in the recipe 12",
        "lora.rank: 3, lora.rank_pattern: {}, lora.alpha: 6, lora.alpha_pattern: {}",
    ),
    "targets": (
        {"targets": ["q_proj", "k_proj", "o_proj", "down_proj"]},
        "the recipe trains layers.0.self_attn.o_proj, layers.1.self_attn.o_proj, which the adapter does not "
        "have; "
        "the adapter has layers.0.self_attn.v_proj, layers.1.self_attn.v_proj, which "
        "the recipe does not train",
        "lora.targets: [down_proj, k_proj, q_proj, v_proj], lora.layers: all",
    ),
    "shared A": (
        {"kv": "shared"},
        "layers.0.self_attn.k_proj and layers.0.self_attn.v_proj have different A, and lora.kv: shared has "
        "one for both",
        "lora.kv: independent",
    ),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_import_refuses_mismatched_recipe_and_suggests_matching_settings(
    small: Small, tmp_path: Path, kind: str
) -> None:
    changes, message, lines = RECIPES[kind]
    first, second = small.fail(small.adapter, tmp_path, {**small.section, **changes}).split("\n")
    assert message in first
    assert second == BUILD.format(lines)


def test_every_peft_lora_config_key_is_accepted_or_refused() -> None:
    """Require a decision on each new key of PEFT: it is harmless, or it is refused."""
    import peft

    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == PASSIVE | REFUSED
    assert not PASSIVE & REFUSED


def test_import_suggests_individual_targets_that_fit_the_adapter(
    small: Small, copy: Path, tmp_path: Path
) -> None:
    """Name targets one by one if no list of names and layers describes the adapter."""
    arrays = arrays_of(copy)
    write_tensors(copy, {name: array for name, array in arrays.items() if "layers.1.mlp" not in name})
    _, lines = small.fail(copy, tmp_path).split("\n")
    targets = lines[lines.index("[") + 1 : lines.index("]")].split(", ")
    section = {**small.section, "targets": targets}
    write_lock(tmp_path / "fits", small.base, section)
    import_adapter(copy, small.base, tmp_path / "fits", tmp_path / "imported")


def test_suggested_rank_patterns_fit_the_adapter(small: Small, tmp_path: Path) -> None:
    """Use a layout's full names, which a recipe's patterns may contain too."""
    key = r"^language_model\.model\.layers\.\d\.self_attn\.q_proj"
    section = {**small.section, "rank_pattern": {"q_proj": 5}}
    save_run(tmp_path / "run", small.base, section)
    trained = load_trained(tmp_path / "run", "latest", small.base)
    assert isinstance(trained, TrainedAdapters)
    adapter = tmp_path / "adapter"
    small.export(trained, adapter)
    rename(".model.model.layers", ".model.language_model.model.layers")(adapter)
    set_config(rank_pattern={key: 5})(adapter)
    first, second = small.fail(adapter, tmp_path).split("\n")
    assert "layers.0.self_attn.q_proj (and 1 more) has rank 5, in the recipe 3" in first
    assert second == BUILD.format(f"lora.rank: 3, lora.rank_pattern: {json.dumps({key: 5})}")
    write_lock(tmp_path / "fits", small.base, {**small.section, "rank_pattern": {key: 5}})
    import_adapter(adapter, small.base, tmp_path / "fits", tmp_path / "imported")


def test_a_recipe_without_lora_is_refused(small: Small, tmp_path: Path) -> None:
    write_lock(tmp_path / "artifact", small.base, None)
    with pytest.raises(UserError, match="trains all weights") as caught:
        import_adapter(small.adapter, small.base, tmp_path / "artifact", tmp_path / "imported")
    assert caught.value.help == BUILD.format("lora: {rank: 3, alpha: 6}")
