"""The miniature of a model that belongs to no family: a small version of its config.json, and random weights.

Torch is imported only where it is used, because only installations that train such models have it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.fewer_layers import period
from recipec.compiler.miniature.small_checkpoint import Sizes, resized, write_tokenizer
from recipec.compiler.rehearse.pipeline import StepFailed
from recipec.runtime.backends.torchax.configs import floats
from recipec.runtime.errors import first_line
from recipec.runtime.model.families.transformers import TransformersArchitecture

MAMBA_HEAD = 8
"""Features of one Mamba head."""
PERIODS = ("full_attention_interval", "attn_layer_period", "sliding_window_pattern")
"""Keys whose value is the number of layers after which the layer kinds repeat."""
CHATML = "qwen3"
"""The family whose tokenizer the miniature uses."""


def write_any(
    directory: Path, program: Program, axes: Mapping[str, int], texts: Sequence[str], dtype: str
) -> str:
    """Write the miniature's checkpoint and tokenizer, and return a text that says how large the model is.

    Args:
        directory: where to write; existing content is replaced.
        axes: axes of the mesh that the miniature is trained on.
        texts: texts from which the tokenizer is made.
        dtype: type of the weights, "bfloat16" or "float32".

    Raises:
        StepFailed: when transformers cannot build a model from the smaller config.
    """
    assert isinstance(program.architecture, TransformersArchitecture)
    original = program.architecture.values
    config = shrink_any(program.architecture, axes)
    shutil.rmtree(directory, ignore_errors=True)
    try:
        _initialize(directory, config, dtype)
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise StepFailed(
            f"transformers makes no {original['model_type']} of this size, which a rehearsal takes: "
            f"{first_line(error)}"
        ) from error
    write_tokenizer(directory, CHATML, texts, program.recipe.model.add_tokens)
    heads = ":".join(
        str(config[key]) for key in ("num_attention_heads", "num_key_value_heads") if key in config
    )
    return (
        f"{config['num_hidden_layers']} of {original['num_hidden_layers']} layers, hidden size "
        f"{config['hidden_size']}, heads {heads}"
    )


def shrink_any(original: TransformersArchitecture, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return a config.json of the same model with few layers and small sizes, by the usual names of its keys.

    Args:
        axes: axes of the mesh that the miniature is trained on.
    """
    config = original.values
    sizes = Sizes.of(original, config, axes)
    kept = _layers(config)
    shortened = _shortened(config | {"num_hidden_layers": kept}, original.num_layers, kept)
    out = resized(shortened, config, sizes)
    inner = sizes.hidden if config.get("mamba_d_ssm") else config.get("mamba_expand", 2) * sizes.hidden
    # Mamba's keys, as Falcon-H1, Bamba and related models name them.
    states = {
        "mamba_d_ssm": sizes.hidden,
        "mamba_d_state": 16,
        "mamba_d_head": MAMBA_HEAD,
        "mamba_n_heads": inner // MAMBA_HEAD,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
        "mamba_dt_rank": MAMBA_HEAD,
    }
    return out | {key: value for key, value in states.items() if isinstance(config.get(key), int)}


def _layers(config: Mapping[str, Any]) -> int:
    """Return how many layers include one of each kind, at least two."""
    count: int = config["num_hidden_layers"]
    wanted = [2, *(config[key] for key in PERIODS if isinstance(config.get(key), int))]
    for value in config.values():
        if isinstance(value, list) and len(value) == count and all(isinstance(item, str) for item in value):
            wanted.append(period(value))
    return min(count, max(wanted))


def _shortened(config: Mapping[str, Any], count: int, kept: int) -> dict[str, Any]:
    """Shorten a config's per-layer lists, and lists of layer indices, to the layers that are kept."""
    out = dict(config)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == count and count > kept:
            out[key] = value[:kept]
        elif isinstance(value, list) and key.endswith("layer_indices"):
            out[key] = [item for item in value if item < kept]
    return out


def _initialize(directory: Path, config: Mapping[str, Any], dtype: str) -> None:
    """Save a model with random matrices, wide enough that logits are far from flat, and default vectors."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers_config = transformers.AutoConfig.for_model(**floats(dict(config)))
    model = transformers.AutoModelForCausalLM.from_config(transformers_config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                wide = 0.5 if parameter is embedding or parameter is head else parameter.shape[-1] ** -0.5
                parameter.copy_(wide * torch.randn(parameter.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="100KB")
    written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(written | {"dtype": dtype}, indent=2) + "\n")
