"""Tests of a merged checkpoint in the real tpu-inference, loaded at tensor parallelism 8.

Its own weight mapper loads the checkpoint on 8 virtual CPU devices, with tpu_load.py's three patches. Every
loaded array must equal the merged files bit for bit. Nothing is generated, because attention is a TPU kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from recipec.compiler.plan.server_step import environment as serve_environment
from recipec.runtime.merging import merge
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime.runs import ALL, lora_section, save_run

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("tpu_load.py")

SHARDS = 8
HEADS, LOCAL_KV, GLOBAL_KV = 16, 8, 4
"""Gemma 4 31B's proportions: the global layers have fewer key heads than there are devices."""
LOCAL, GLOBAL = 128, 256
LAYERS = 6
"""Five local layers and a global one, whose keys are also its values."""
VISION_HEADS, VISION = 8, 16


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in tpu-inference.

    Attributes:
        base, merged: Hugging Face folders.
        arrays: tpu-inference's arrays, by its own names.
        shards: the shapes of one device's part of each array.
    """

    base: Path
    merged: Path
    arrays: Mapping[str, np.ndarray]
    shards: Mapping[str, list[int]]


def merged_checkpoint(folder: Path) -> tuple[Path, Path]:
    """Make a bfloat16 base, and merge adapters of all projections into it."""
    model = tiny.make_gemma4(
        folder / "float32",
        vocab_size=512,
        vocab_size_per_layer_input=512,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=LOCAL_KV,
        num_global_key_value_heads=GLOBAL_KV,
        head_dim=LOCAL,
        global_head_dim=GLOBAL,
        vision={"num_attention_heads": VISION_HEADS, "num_key_value_heads": VISION_HEADS},
    )
    model.config.vision_config.default_output_length = 280
    base = folder / "base"
    model.to(torch.bfloat16).save_pretrained(base, max_shard_size="5MB")
    write_tokenizer(base, "gemma4")
    save_run(folder / "run", HFCheckpoint.open(base), lora_section(), scale=0.1)
    status = merge.main(
        folder,
        ModelSettings(id=str(base), family="gemma4"),
        checkpoint=str(folder / "run"),
        output="merged",
        dtype="bfloat16",
        adapter=False,
        argv=["--model", str(base), "--output", str(folder)],
    )
    assert status == 0
    return base, folder / "merged"


@pytest.fixture(scope="module")
def loaded(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Load the checkpoint in a process of the serving environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(serve_environment.VARIABLE, str(root / "build" / "serve-0.32.0"))
        python = serve_environment.make(print)
    folder = tmp_path_factory.mktemp("tpu-inference")
    base, merged = merged_checkpoint(folder)
    jobs = [[str(merged), str(folder / "merged.safetensors")]]
    done = subprocess.run(
        [python, SCRIPT], input=json.dumps(jobs), text=True, capture_output=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (whole,) = map(json.loads, done.stdout.splitlines())
    assert "shards" in whole, f"{whole}\n{done.stderr[-6000:]}"
    arrays = tensors(folder / "merged.safetensors")
    return Loaded(base, merged, arrays, whole["shards"])


def tensors(*files: Path) -> dict[str, np.ndarray]:
    np.dtype(ml_dtypes.bfloat16)  # numpy knows the name only after ml_dtypes is imported
    return {name: array for file in files for name, array in load_file(file).items()}


def checkpoint(folder: Path) -> dict[str, np.ndarray]:
    return tensors(*sorted(folder.glob("*.safetensors")))


def as_in_the_checkpoint(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tpu-inference's arrays by the checkpoint's names and in the checkpoint's layout.

    tpu-inference's kernels have the inputs first, and attention's kernels have an axis of heads. Gate and up
    are one kernel, in which each device's part is a slice of gate and the same slice of up.
    """
    out = {}
    for name, array in arrays.items():
        tower = "vision_tower" in name
        place, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in ("q_proj", "k_proj", "v_proj"):  # inputs, heads, size of a head
            inputs, heads, size = array.shape
            array = array.transpose(1, 2, 0).reshape(heads * size, inputs)
        elif kind == "o_proj":  # heads, size of a head, outputs
            heads, size, outputs = array.shape
            array = array.transpose(2, 0, 1).reshape(outputs, heads * size)
        elif kind == "gate_up_proj":
            inputs, both = array.shape
            parts = array.reshape(inputs, SHARDS, 2, both // SHARDS // 2)
            for number, half in enumerate(("gate_proj", "up_proj")):
                out[f"{place}.{half}.weight"] = parts[:, :, number].reshape(inputs, both // 2).T
            continue
        elif kind == "position_embedding_table":  # positions, axes, outputs
            array = array.transpose(1, 0, 2)
        elif array.ndim == 2 and kind != "embed_tokens":
            array = array.T
        if tower:
            name = name.replace("vision_tower.layers.", "vision_tower.encoder.layers.")
            if ".layers." in name and kind.endswith("_proj"):
                name = name.replace(f"{kind}.weight", f"{kind}.linear.weight")
        out[name] = array
    return out


def differing(arrays: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> set[str]:
    """Return the names of tensors whose bits differ, or that one side lacks."""
    held = as_in_the_checkpoint(arrays)
    alike = {
        name
        for name in held.keys() & wanted.keys()
        if held[name].dtype == wanted[name].dtype == ml_dtypes.bfloat16
        and held[name].shape == wanted[name].shape
        and np.array_equal(held[name].view(np.uint16), wanted[name].view(np.uint16))
    }
    return (held.keys() | wanted.keys()) - alike


def test_loaded_tensors_equal_the_merged_files_bit_for_bit(loaded: Loaded) -> None:
    wanted = checkpoint(loaded.merged)
    assert not differing(loaded.arrays, wanted)
    # The comparison covered all tensors of such a checkpoint.
    text = [name for name in wanted if ".language_model.layers." in name]
    assert len(text) == LAYERS * (7 + 7) - 1  # seven projections, four norms, two of heads, one scalar; no V
    assert sum("vision" in name for name in wanted) == 16
    assert "model.language_model.embed_tokens.weight" in wanted


def test_only_the_global_layer_shares_keys_and_values(loaded: Loaded) -> None:
    attention = "model.language_model.layers.{}.self_attn.{}.weight"
    assert loaded.arrays[attention.format(LAYERS - 1, "k_proj")].shape == (192, GLOBAL_KV, GLOBAL)
    assert attention.format(LAYERS - 1, "v_proj") not in loaded.arrays
    for layer in range(LAYERS - 1):
        keys, values = (loaded.arrays[attention.format(layer, kind)] for kind in ("k_proj", "v_proj"))
        assert keys.shape == values.shape == (192, LOCAL_KV, LOCAL)
        assert not np.array_equal(keys, values)


def test_weights_are_sharded_over_eight_devices(loaded: Loaded) -> None:
    local, whole = (f"model.language_model.layers.{layer}." for layer in (0, LAYERS - 1))
    assert loaded.shards[f"{local}self_attn.q_proj.weight"] == [192, HEADS // SHARDS, LOCAL]
    assert loaded.shards[f"{local}self_attn.k_proj.weight"] == [192, LOCAL_KV // SHARDS, LOCAL]
    # There are fewer heads than devices, so that the head size is sharded.
    assert loaded.shards[f"{whole}self_attn.k_proj.weight"] == [192, GLOBAL_KV, GLOBAL // SHARDS]
    assert loaded.shards[f"{whole}self_attn.o_proj.weight"] == [HEADS // SHARDS, GLOBAL, 192]
    assert loaded.shards[f"{local}mlp.gate_up_proj.weight"] == [192, 2 * 320 // SHARDS]
    assert loaded.shards["model.language_model.embed_tokens.weight"] == [512 // SHARDS, 192]


def test_comparison_detects_every_unmerged_weight(loaded: Loaded) -> None:
    """Compare with the base: every adapted projection differs, and nothing else."""
    base = checkpoint(loaded.base)
    adapted = {name for name in base if re.search(rf"language_model\..*\.({'|'.join(ALL)})\.weight$", name)}
    assert len(adapted) == 7 * LAYERS - 1
    assert differing(loaded.arrays, base) == adapted
