"""transformers' model of a checkpoint with PEFT's adapters, which have the recipe's shapes and values.

All names and shapes follow Hugging Face: a projection has its name within the decoder
("layers.0.self_attn.q_proj"), A is [rank, in] and B is [out, rank].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..model.adapters import PARTS, LoraSettings, Matrices, build_adapters
from ..model.families.towers import VISION, holder, is_of_tower
from ..model.initial import initial_adapters
from ..model.selection import train_only
from ..peft.adapter import ROWS, open_adapter
from ..peft.exporting import adapter_config, module_prefix
from ..peft.fitting import fitting
from ..peft.peft_names import WRAPPER, whole_sources
from ..settings import ModelSettings
from ..training.first_values import sources
from ..weights.checkpoint import HFCheckpoint

Pairs = Mapping[str, Matrices]
"""A, B and, with DoRA, the magnitude vector of each trained projection; and the embedding's trained rows, by
their tensor's name in the checkpoint."""

ADAPTER = "default"
"""PEFT's name for a model's only adapter."""


def load_model(
    base: HFCheckpoint,
    settings: ModelSettings,
    *,
    dtype: str | None = None,
    meta: bool = False,
    attention: str | None = None,
    **options: Any,
) -> Any:
    """Load transformers' model of a checkpoint: a multimodal one as AutoModelForImageTextToText does, with
    its tower, others as AutoModelForCausalLM does.

    Args:
        base: the checkpoint, on this machine; from `seeing` if pictures are read.
        dtype: of the weights; None for the recipe's model.dtype.
        meta: build the model without values, on the device `meta`, including its computed buffers.
        attention: transformers' attn_implementation; None for the result of `attention_of`.
        options: further arguments of from_pretrained, such as quantization_config.

    Raises:
        UserError: transformers cannot load it.
    """
    import torch
    from transformers import AutoConfig

    if base.directory is None:
        raise UserError(f"{base.name}: is not a folder on this machine", "give a copy of it with --model DIR")
    how = {
        "dtype": getattr(torch, dtype or settings.dtype),
        "attn_implementation": attention or attention_of(base),
    }
    try:
        # Without this, transformers asks on the terminal whether the checkpoint's own code may run.
        config = AutoConfig.from_pretrained(base.directory, trust_remote_code=False)
        kind = _auto_class(base, config)
        if base.dequantized:
            del config.quantization_config
        if meta or base.dequantized:
            with torch.device("meta"):
                empty = kind.from_config(config, **how)
        if meta:
            return empty
        if base.dequantized:
            # transformers' own reading of FP8 assumes that a matrix has blocks of equal size.
            tensors = {name: _tensor(base, name) for name in base.tensors}
            return type(empty).from_pretrained(None, config=config, state_dict=tensors, **how, **options)
        loaded = kind.from_pretrained(
            base.directory, trust_remote_code=False, use_safetensors=True, **how, **options
        )
        if not hasattr(loaded, loaded.base_model_prefix):
            loaded.base_model_prefix = "model"  # Llama 4's class gives a name that it does not have
        return loaded
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{base.name}: transformers cannot load it: {reason}",
            "install the versions in the backend's requirements file, and check that the checkpoint is "
            "complete",
        ) from error


def _auto_class(base: HFCheckpoint, config: Any) -> Any:
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    sees = VISION in base.config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees and not _text_alone(base) else AutoModelForCausalLM


def _text_alone(base: HFCheckpoint) -> bool:
    """Return whether only the text model of a multimodal checkpoint is loaded: TRL's fused head does not find
    the decoder in transformers' whole Llama 4."""
    return base.config.get("model_type") == "llama4" and base.architecture.vision is None


def text_prefix(base: HFCheckpoint) -> str:
    """Return the prefix of a text module's name in the model from `load_model`."""
    return base.family.prefixes[-1] if _text_alone(base) else module_prefix(base)


def _tensor(base: HFCheckpoint, name: str) -> Any:
    """Return a tensor of a checkpoint as torch's."""
    import torch

    array = base.read(name).copy()
    bits = array.dtype.name == "bfloat16"
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if bits else torch.from_numpy(array)


def attention_of(base: HFCheckpoint) -> str:
    """Return transformers' attn_implementation: "eager" for Gemma 2 and gpt-oss, else "sdpa"."""
    return "eager" if base.family.eager else "sdpa"


def attach(model: Any, base: HFCheckpoint, settings: ModelSettings, lora: LoraSettings) -> Any:
    """Add the recipe's adapters to a model and freeze the rest; return a peft.PeftModelForCausalLM.

    Adapters have lora.dtype, whatever the base's. A and B have PEFT's initial values until `set_adapters`.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    modules = projections(base, lora)
    config = adapter_config(base, settings, lora, modules) | {"inference_mode": False}
    if lora.dropout != config["lora_dropout"]:
        raise UserError(
            f"PEFT has no dropout on {config['target_parameters'][0]}, because it treats a module of this "
            "name as experts",
            "build the recipe with lora.dropout: 0, or without the projections of feed-forward blocks",
        )
    if _text_alone(base):
        config = _renamed(config, module_prefix(base), text_prefix(base))
    peft_model = get_peft_model(model, LoraConfig(**config), autocast_adapter_dtype=False)
    head = peft_model.get_output_embeddings()
    if lora.trainable_tokens and hasattr(head, "token_adapter"):
        head.bias = head.token_adapter.base_layer.bias  # TRL 1.16 reads it, and PEFT's wrapper lacks it
    dtype = getattr(torch, lora.dtype)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    trained = adapter_parameters(peft_model, base)
    attached = {name.rpartition(".")[0] for name in trained if not name.endswith(ROWS)}
    if attached != set(modules):
        raise AssertionError(
            f"PEFT's adapters differ from the recipe's: {sorted(attached ^ set(modules))[:3]}"
        )
    return peft_model


def _renamed(config: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a LoraConfig's arguments with another prefix in its regular expressions of modules' names."""
    old, new = re.escape(old), re.escape(new)
    out = dict(config)
    if isinstance(out["target_modules"], str):
        out["target_modules"] = out["target_modules"].replace(old, new)
    for key in ("rank_pattern", "alpha_pattern"):
        out[key] = {name.replace(old, new): value for name, value in out[key].items()}
    return out


def projections(base: HFCheckpoint, lora: LoraSettings) -> list[str]:
    """Return the names, within the decoder, of the modules that carry adapters."""
    adapters = build_adapters(base.family, base.architecture, lora)
    return [adapter.name for adapter in adapters]


def start(base: HFCheckpoint, lora: LoraSettings, seed: int, adapter: Path | str | None = None) -> Pairs:
    """Return the adapters' initial values in float32: those of train.py, or those of a PEFT adapter.

    Args:
        adapter: the PEFT adapter's folder or address; None for the recipe's initial values.

    Raises:
        UserError: the adapter does not match the recipe's.
    """
    adapters = build_adapters(base.family, base.architecture, lora)
    if adapter is None:
        return initial_adapters(adapters, lora, seed)
    if lora.principal:
        raise UserError(
            f"--adapter {adapter}: with lora.init: {lora.init} the adapters start from the base's weights",
            "build the recipe with lora.init: peft",
        )
    opened = fitting(open_adapter(adapter), base, lora)
    out = {}
    for name, tensors in opened.tensors.items():
        parts = tuple(opened.read(tensor).astype(np.float32) for tensor in tensors)
        if not all(np.isfinite(part).all() for part in parts):
            raise UserError(
                f"{opened.path}: {name} holds values that are not finite",
                "use an earlier checkpoint of its training",
            )
        out[name] = parts
    for source in whole_sources(base, lora, rows=True):
        rows = opened.read(opened.whole[source.name]).astype(np.float32)
        order = [opened.config.tokens.index(int(token)) for token in lora.trainable_tokens]
        out[source.full_name(base.prefix)] = (rows[order],)
    return out


def set_adapters(model: Any, base: HFCheckpoint, values: Pairs) -> None:
    """Copy values into the adapters of a model from `attach`, in place; not on the device `meta`."""
    import torch

    with torch.no_grad():
        for name, parameter in adapter_parameters(model, base).items():
            if name.endswith(ROWS):
                if name in values:  # if absent, they keep the base's values
                    parameter.copy_(torch.from_numpy(values[name][0]))
                continue
            module, _, which = name.rpartition(".")
            parts = dict(zip(PARTS, values[module], strict=False))
            if which.removeprefix("lora_") in parts:  # if absent, DoRA's magnitudes keep PEFT's values
                parameter.copy_(torch.from_numpy(np.array(parts[which.removeprefix("lora_")], np.float32)))


def set_base(model: Any, base: HFCheckpoint, lora: LoraSettings, frozen: HFCheckpoint) -> None:
    """Replace the weights under the adapters of a model from `attach`, in place.

    Args:
        frozen: holds the new weights, under the base's names.
    """
    import torch

    with torch.no_grad():
        for name, source in sources(base, lora).items():
            prefix = holder(base.config) if is_of_tower(name) else text_prefix(base)
            parameter = model.get_parameter(f"{WRAPPER}{prefix}{name}.base_layer.weight")
            parameter.copy_(torch.from_numpy(frozen.read(source.full_name(base.prefix))))


def adapter_parameters(model: Any, base: HFCheckpoint) -> dict[str, Any]:
    """Return the adapters' parameters under a trace's names, such as "layers.0.self_attn.q_proj.lora_A", and
    the embedding's trained rows.

    Args:
        model: from `attach`, or an object with its parameters under the same names.
    """
    text, parts = f"{WRAPPER}{text_prefix(base)}", f"{WRAPPER}{holder(base.config)}"
    out = {}
    for name, parameter in model.named_parameters():
        for which, called in zip(PARTS, ("A", "B", "magnitude_vector"), strict=True):
            end = f".lora_{called}.{ADAPTER}.weight"
            if not name.endswith(end):
                continue
            module = name.removesuffix(end)
            of_tower = is_of_tower(module.removeprefix(parts))
            out[f"{module.removeprefix(parts if of_tower else text)}.lora_{which}"] = parameter
        plain_name = name.removesuffix(f".{ADAPTER}")
        if name.startswith(text) and plain_name.endswith(ROWS):
            out[base.prefix + plain_name.removeprefix(text)] = parameter
    return out


def full_parameters(model: Any, base: HFCheckpoint, only: Sequence[str] = ()) -> dict[str, Any]:
    """Return what full fine-tuning trains, as in train.py, under the tensors' names in the checkpoint.

    Freeze everything else: towers of other modalities, and what `only` of ModelSettings leaves out.
    """
    names = {}
    for parameter in train_only(base.family.parameters(base.architecture), only):
        for source in parameter.sources if parameter.trainable else ():
            name = source.full_name(base.prefix)
            module = source.name if source.whole else text_prefix(base) + source.name
            names[module] = name
    out = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
        if name in names:
            out[names[name]] = parameter
    return out


def trained_parameters(
    model: Any, base: HFCheckpoint, lora: LoraSettings | None, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the parameters that a run trains, under a trace's names."""
    return full_parameters(model, base, only) if lora is None else adapter_parameters(model, base)


def labels(tokens: np.ndarray, segment_ids: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """Return the labels: the token id of each target predicted within its own segment, elsewhere -100.

    As in transformers, the label at t is the token that the model predicts at t - 1.

    Args:
        tokens, segment_ids, loss_mask: [B, T] of a micro-batch.

    Returns:
        int64[B, T].
    """
    inside = np.zeros(loss_mask.shape, bool)
    inside[:, 1:] = segment_ids[:, 1:] == segment_ids[:, :-1]
    return np.where(loss_mask & inside, tokens, -100).astype(np.int64)
