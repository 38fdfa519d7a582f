"""The sections of a model card about its run: how it was trained, by what it was made, files, recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.data.huggingface import HUB, address_of
from runtime.export.card_base import SITE, Base, place
from runtime.export.card_markdown import code, table
from runtime.objectives import OBJECTIVES
from runtime.reach import Reach

SECTIONS = (
    *("recipe", "name", "model", "mesh", "lora", "sharding", "remat", "data", "train", "checkpoint", "cache"),
    *("merge", "serve", "benchmark", "evaluate", "launch", "cost"),
)
"""Of a recipe, in the order in which they are written."""
PACKAGES = ("jax", "google-tunix", "qwix", "optax", "orbax-checkpoint", "transformers")
"""Those whose versions a card tells; recipe.lock.json has all."""


def title(record: Mapping[str, Any], lock: Mapping[str, Any]) -> str:
    """The name of the recipe."""
    return str(lock.get("name") or (record.get("recipe") or {}).get("name") or "model")


def training(
    record: Mapping[str, Any],
    lock: Mapping[str, Any],
    base: Base,
    losses: Mapping[str, float] | None,
    reach: Reach | None,
) -> Iterator[str]:
    """What was trained, on what, and how."""
    train, data = section(lock, "train"), section(lock, "data")
    lora = record.get("lora")
    rows = {
        "Base": base.link,
        "Trained": _trained(lora, section(lock, "lora")) if lora else "all weights of the text model",
        "LoRA reaches": str(reach or ""),
        "Objective": training_objective(train),
        "Data": ", ".join(map(_source, sources(lock, "train"))),
        "Evaluated on": ", ".join(map(_source, sources(lock, "eval"))),
        "Length": _length(train),
        "Batch": _batch(train, data),
        "Optimizer": _optimizer(train),
        "Step": str((record.get("checkpoint") or {}).get("step", "")),
        "Loss": _losses(losses or {}),
    }
    yield "## Training"
    yield table(("", ""), [(key, value) for key, value in rows.items() if value])
    for kind in ("rank", "alpha"):
        pattern = (lora or {}).get(f"{kind}_pattern") or {}
        if pattern:
            yield f"Modules of another {kind}, by the end of their names (the first that matches holds):"
            yield table(("Module", kind), [(code(key), f"{value:g}") for key, value in pattern.items()])


def _trained(lora: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    text = f"{'rsLoRA' if lora.get('rslora') else 'LoRA'}, rank {lora['rank']}, alpha {lora['alpha']:g}"
    if section.get("dropout"):
        text += f", dropout {section['dropout']:g}"
    if section.get("layers") not in (None, "all"):
        layers = section["layers"]
        text += f", layers {layers if isinstance(layers, str) else ', '.join(map(str, layers))}"
    if lora.get("quantize"):
        text += f", over weights in {lora['quantize']} (QLoRA)"
    return text


def training_objective(train: Mapping[str, Any]) -> str:
    """The objective of a recipe's `train` in words; "" where there is none."""
    objective = OBJECTIVES.get(name := str(train.get("objective") or ""))
    if objective is None:
        return name
    told = "beta" in objective.settings and train.get("beta") is not None
    return objective.title + (f", beta {train['beta']:g}" if told else "")


def _length(train: Mapping[str, Any]) -> str:
    if train.get("steps"):
        return f"{train['steps']:,} steps"
    epochs = train.get("epochs")
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}" if epochs else ""


def _batch(train: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if not train.get("global_batch_size"):
        return ""
    text = f"{train['global_batch_size']} {'rows' if data.get('packing') else 'samples'} a step"
    return text + (f", of at most {data['max_length']:,} tokens" if data.get("max_length") else "")


def _optimizer(train: Mapping[str, Any]) -> str:
    optimizer, schedule = train.get("optimizer") or {}, train.get("schedule") or {}
    if not optimizer.get("name"):
        return ""
    text = f"{optimizer['name']}, learning rate {optimizer.get('learning_rate'):g}"
    return text + (f", {schedule['name']} schedule" if schedule.get("name") else "")


def _losses(losses: Mapping[str, float]) -> str:
    names = {"loss": "{:.4f} in training", "eval_loss": "{:.4f} in evaluation"}
    return ", ".join(text.format(losses[key]) for key, text in names.items() if losses.get(key) is not None)


def origin(record: Mapping[str, Any], lock: Mapping[str, Any]) -> Iterator[str]:
    """The recipe, its hashes, and the packages that it ran on."""
    yield "## Origin"
    recipe, checkpoint = record.get("recipe") or {}, record.get("checkpoint") or {}
    made = f"Made by the recipe {code(title(record, lock))}"
    yield made + (f" and {lock['compiler']}." if lock.get("compiler") else ".")
    hashes = {
        "recipe.lock.json": recipe.get("sha256"),
        "the checkpoint": checkpoint.get("sha256"),
        "the runtime": lock.get("runtime"),
    }
    packages = (lock.get("packages") or {}).get("train") or {}
    plain = {str(name).partition("[")[0]: version for name, version in packages.items()}
    rows = [(f"sha256 of {key}", code(value)) for key, value in hashes.items() if value]
    rows += [(name, str(plain[name])) for name in PACKAGES if name in plain]
    if rows:
        yield table(("", ""), rows)


def files_of(files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The files of weights, with their hashes."""
    weights = {name: entry for name, entry in sorted(files.items()) if name.endswith(".safetensors")}
    if weights:
        yield "## Files"
        yield table(
            ("File", "Bytes", "sha256"),
            [(code(name), f"{entry['size']:,}", code(entry["sha256"])) for name, entry in weights.items()],
        )
        yield "`merge.json` has those of the other files, and of the base's."


def recipe_of(lock: Mapping[str, Any]) -> Iterator[str]:
    """The recipe with its defaults, without what is null or empty."""
    from huggingface_hub.utils import yaml_dump

    recipe = lock.get("recipe") or {}
    order = {key: number for number, key in enumerate(SECTIONS)}
    shown = {}
    for key in sorted(recipe, key=lambda key: (order.get(key, len(order)), key)):
        value = _shown(recipe[key])
        if value is not None:
            shown[key] = value
    if not shown:
        return
    text = yaml_dump(shown, sort_keys=False, default_flow_style=None, width=100).strip()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    yield "## Recipe"
    yield f"{fence}yaml\n{text}\n{fence}"


def _shown(value: Any, key: str | None = None) -> Any:
    """A value of the recipe as the card has it, None for what is left out."""
    if key in ("rank_pattern", "alpha_pattern") and isinstance(value, list):
        value = dict(value)  # recorded as pairs, for their order
    if isinstance(value, Mapping):
        mapping = {name: _shown(item, name) for name, item in value.items()}
        return {name: item for name, item in mapping.items() if item is not None} or None
    if isinstance(value, list):
        return [item for item in map(_shown, value) if item is not None] or None
    if isinstance(value, str):
        return place(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def sources(lock: Mapping[str, Any], split: str) -> list[Mapping[str, Any]]:
    found = section(lock, "data").get(split) or []
    return [source if isinstance(source, Mapping) else {"path": str(source)} for source in found]


def _source(source: Mapping[str, Any]) -> str:
    path = str(source.get("path"))
    text = code(place(path))
    if path.startswith(HUB):
        text = f"[{path.removeprefix(HUB)}]({SITE}/datasets/{dataset(path)})"
    details = [code(str(source[key])) for key in ("config", "split") if source.get(key)]
    if source.get("weight") not in (None, 1, 1.0):
        details.append(f"weight {source['weight']:g}")
    return text + (f" ({', '.join(details)})" if details else "")


def dataset(path: str) -> str:
    """OWNER/NAME of hf://OWNER/NAME@REVISION, or of one of its files."""
    return "/".join(address_of(path)[0].split("/")[:2])


def section(lock: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return (lock.get("recipe") or {}).get(name) or {}
