"""Tests of the shared decoder in the runtime: the traced program, and output heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.model.decoder import DecoderLayer
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.loading import abstract_model
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.settings import MeshSettings, ModelSettings
from recipec.runtime.training.losses import batch_loss
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import training

MESH = {"fsdp": 4, "tp": 2}
SIZES = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def abstract(remat: str = "none", dtype: str = "float32") -> Any:
    """Return a Qwen 3 with LoRA and abstract arrays."""
    settings = ModelSettings(id="", family="qwen3", dtype=dtype, remat=remat)
    lora = LoraSettings(rank=4, alpha=8.0, targets=training.TARGETS, dropout=0.0)
    family = FAMILIES["qwen3"]
    return abstract_model(family, family.architecture(SIZES), settings, lora, MESH)


def traced(built: Any) -> str:
    """Trace the trainer's loss and adapter gradients, and return the program's text."""
    graph, adapters, rest = nnx.split(built.model, nnx.LoRAParam, ...)
    one = training.batch(0)

    def loss(model: Any) -> Any:
        return batch_loss(built.forward, model, one)

    def gradients(adapters: Any, rest: Any) -> Any:
        model = nnx.merge(graph, adapters, rest)
        return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)

    with start_mesh(MeshSettings("cpu", 8, MESH)):
        return str(jax.make_jaxpr(gradients)(adapters, rest))


def test_activations_have_sharding_constraints_and_the_residual_stream_stays_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use float32 adapters, whose deltas could widen the stream, and bfloat16 weights."""
    built = abstract(dtype="bfloat16")
    layer = DecoderLayer
    block, seen = layer.block, []

    def spy(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        out = block(self, x, *args, **kwargs)
        seen.append((x.dtype.name, out[0].dtype.name))
        return out

    monkeypatch.setattr(layer, "block", spy)
    text = traced(built)
    assert seen[:2] == [("bfloat16", "bfloat16")] * 2
    # The embedding; in each layer q, k, v, the attention's output and the feed-forward block.
    assert text.count("sharding_constraint") >= 1 + 2 * 5
    assert "P('fsdp', None, 'tp'" in text


def rewrite(folder: Path, change: dict[str, Any], drop: tuple[str, ...] = ()) -> None:
    """Change a checkpoint's config.json, and drop tensors."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if name not in drop}, folder / "model.safetensors")


def test_missing_output_head_is_named_in_the_error(tmp_path: Path) -> None:
    tiny.make_llama(tmp_path / "base")
    HFCheckpoint.open(tmp_path / "base").verify()
    rewrite(tmp_path / "base", {}, drop=("lm_head.weight",))
    with pytest.raises(UserError, match=r"lm_head\.weight is missing; config\.json promises it"):
        HFCheckpoint.open(tmp_path / "base").verify()
