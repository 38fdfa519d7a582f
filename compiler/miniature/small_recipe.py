"""A recipe in miniature: the same run, with only the model's size, the data and the mesh replaced.

The data are short chats, all different, in the format that the recipe reads.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from recipec.compiler.lowering.program import Program
from recipec.compiler.wording import split_layer
from recipec.runtime.data.tokenizer import padded
from recipec.runtime.model.adapters import build_adapters, by_pattern, meant, principal
from recipec.runtime.model.families import family_of
from recipec.runtime.model.families.family import Architecture, Family
from recipec.runtime.model.partition_rules import data_parallel

DEVICES = 8
"""Most virtual CPU devices."""
LENGTH = 128
"""Longest sequence, in tokens."""
MODEL = "./model"
"""The miniature's checkpoint, relative to its recipe."""
TEACHER = "-teacher"
"""What is added to the name of a miniature's folder for that of its teacher."""
ACCUMULATION = 2
"""Most micro-batches of one optimizer step."""
PROMPT_LENGTH, COMPLETION_LENGTH = 96, 16
"""Lengths of reinforcement learning, in tokens: enough for the prompts, and the longest completion."""
ITERATIONS = 2
"""Most optimizer steps on the same completions."""
REWARD = {"format_match": {"pattern": r"(?s)\W*[a-mA-M].*"}}
"""A reward that completions of a random model have about half of the time: the recipe's rewards read columns
that the miniature's data lack."""
LEARNING_RATE = 0.01
"""Large enough that a few steps change the adapters by more than bfloat16's rounding."""

NO_PART = {"extends", "serve", "benchmark", "evaluate", "launch", "cost"}
"""Sections that do not affect training and merging, and are left out."""


@dataclass(frozen=True)
class MiniatureChange:
    """A value of the recipe that the miniature replaces."""

    path: str
    before: str
    after: str


def scale_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """Reduce mesh axes to at most DEVICES in all: halve the largest axis until they fit."""
    small = dict(axes)
    while math.prod(small.values()) > DEVICES:
        largest = max(small, key=lambda name: small[name])
        small[largest] //= 2
    return small


def processes(program: Program) -> int:
    """Return the number of processes in the miniature's run: two represent several hosts."""
    devices = math.prod(scale_axes(program.recipe.mesh.axes).values())
    return 2 if program.accelerator.hosts > 1 and devices % 2 == 0 else 1


def derive(
    program: Program,
    config: Mapping[str, Any],
    train: str,
    evaluate: str,
    steps: int,
    small: Architecture | None = None,
    template: int = 0,
) -> tuple[dict[str, Any], list[MiniatureChange]]:
    """Return the miniature's recipe as plain data, with all defaults, and its differences from the original.

    Args:
        program: the original.
        config: the miniature's config.json.
        train, evaluate: data files, relative to the miniature's recipe.
        steps: optimizer steps.
        small: the miniature's sizes, in the original's family; None to read them from its config.json.
        template: tokens that the recipe's chat template adds to a chat, by which the lengths grow.
    """
    if small is None:
        family = family_of(config)
        small = family.architecture(config)
    else:
        family = program.family
    original = program.recipe.model_dump(mode="json", exclude=NO_PART)
    recipe = program.recipe.model_dump(mode="json", exclude=NO_PART)
    axes = scale_axes(program.recipe.mesh.axes)
    micro = min(program.recipe.train.micro_batch_size, 2)
    recipe["model"] |= {"id": MODEL, "revision": None, "tokenizer": None, "attention": "dot"}
    if program.recipe.model.vocab_size is not None:
        recipe["model"]["vocab_size"] = padded(small.vocab_size + 1)
    recipe["mesh"] |= {
        "accelerator": f"cpu-{math.prod(axes.values())}",
        "topology": None,
        "hosts": processes(program),
        "axes": axes,
    }
    recipe["data"] |= {
        "train": [{"path": train}],
        "eval": [{"path": evaluate}] if recipe["data"]["eval"] else [],
        "max_length": min(recipe["data"]["max_length"], LENGTH) + template,
        "transform": None,
        "reasoning": None,
        "temperature": None,
    }
    if recipe["data"]["images"] is not None:
        # A miniature's pictures are small, and its processor decides their tokens: 64 in Gemma 4.
        recipe["data"]["images"] |= {"folder": None, "longest_side": None, "tokens": None}
        recipe["data"]["max_length"] = min(original["data"]["max_length"], 2 * LENGTH) + template
    recipe["train"] |= {
        "steps": steps,
        "epochs": None,
        "micro_batch_size": micro,
        "global_batch_size": micro * data_parallel(axes) * min(program.accumulation_steps, ACCUMULATION),
        "eval_every": max(1, steps // 2),
    }
    if program.teacher is not None:
        distill = recipe["train"]["distill"]
        distill["teacher"] |= {"id": f"{MODEL}{TEACHER}", "revision": None}
        distill["stored"] = None  # a rehearsal computes the teacher
        distill["max_completion_length"] = min(distill["max_completion_length"], COMPLETION_LENGTH)
        recipe["rollout"] = {}
    if recipe["train"]["grpo"] is not None:
        reinforce_less(recipe, template)
    recipe["train"]["optimizer"]["learning_rate"] = LEARNING_RATE
    # A rehearsal logs to this machine only, and runs all its steps.
    recipe["train"]["log"] |= {"every": 1, "wandb_project": None, "mlflow_experiment": None}
    recipe["train"] |= {"early_stopping": None, "generations": None, "continue_from": None}
    if recipe["train"]["schedule"]["warmup_steps"]:
        recipe["train"]["schedule"]["warmup_steps"] = 1
    recipe["checkpoint"] = {"directory": "checkpoints", "every_steps": max(1, steps // 4), "keep": 3}
    recipe["merge"]["output"] = "merged"
    shrink_lora(recipe, program, family, small)
    if (qat := recipe["train"]["qat"]) is not None:
        size = _group(qat["group_size"], family, small)
        if qat["weights"] == "mxfp4" and size != qat["group_size"]:
            qat |= {"weights": "int4", "activations": "int8"}
        qat |= {"group_size": size, "start_step": min(qat["start_step"], 1)}
    recipe["train"]["trainable_modules"] = _fewer_modules(program, family, small)
    paths = [parameter.path for parameter in family.parameters(small)]
    recipe["sharding"]["rules"] = [
        rule
        for rule in recipe["sharding"]["rules"]
        if any(re.fullmatch(rule["match"], path) for path in paths)
    ]
    return recipe, list(replacements(original, recipe))


def reinforce_less(recipe: dict[str, Any], template: int) -> None:
    """Adapt a recipe of reinforcement learning, as plain data, to the miniature's data and mesh.

    Args:
        template: as for `derive`.
    """
    grpo, rows = recipe["train"]["grpo"], recipe["train"]["global_batch_size"]
    completion = min(grpo["max_completion_length"], COMPLETION_LENGTH)
    groups = [size for size in range(2, grpo["num_generations"] + 1) if rows % size == 0]
    grpo |= {
        "num_generations": max(groups, default=rows),
        "iterations": min(grpo["iterations"], ITERATIONS),
        "max_prompt_length": PROMPT_LENGTH + template,
        "max_completion_length": completion,
        "stop": [],  # texts of another tokenizer
    }
    if grpo["overlong_penalty"] is not None:
        grpo["overlong_penalty"] = min(grpo["overlong_penalty"], completion)
    recipe["data"]["max_length"] = grpo["max_prompt_length"] + completion
    recipe["rewards"] = [REWARD]
    recipe["rollout"] = {}  # a miniature has no server


def as_written(recipe: Mapping[str, Any], section: BaseModel) -> dict[str, Any]:
    """Leave out the defaults of a miniature's recipe that the original leaves out: to write one asks for it.

    A recipe without `lora`, for example, may not ask for an adapter, but the default of `merge.adapter` is
    true.

    Args:
        recipe: the miniature's recipe, or a section of it, as plain data.
        section: the same part of the original.
    """
    out = {}
    for key, value in recipe.items():
        original, declared = getattr(section, key), type(section).model_fields[key]
        default = declared.get_default(call_default_factory=True, validated_data=dict(recipe))
        if isinstance(original, BaseModel) and isinstance(value, Mapping):
            value, default = as_written(value, original), {}
        if key in section.model_fields_set or value != default:
            out[key] = value
    return out


def shrink_lora(recipe: dict[str, Any], program: Program, family: Family, small: Architecture) -> None:
    """Adapt the `lora` section of a recipe's plain data to a miniature: layers, ranks and projections.

    Args:
        recipe: the recipe of the program, changed in place.
        family, small: of the miniature.
    """
    lora = recipe["lora"]
    if lora is None or program.lora is None:
        return
    if program.lora.layers is not None:
        lora["layers"] = _fewer_layers(program.lora.layers, program.architecture, small)
    lora["start_from"] = None  # an adapter of the original
    # The miniature has few of the original's tokens, and fewer rows. The probe's has no tokenizer.
    added = recipe.get("model", {}).get("add_tokens", ())
    lora["trainable_tokens"] = [
        token if token in added else small.vocab_size - 1 - number
        for number, token in enumerate(lora["trainable_tokens"][: small.vocab_size // 2])
    ]
    most = small.hidden_size
    if principal(lora["init"]):  # no rank may exceed the rank of the weight itself
        adapters = build_adapters(family, small, replace(program.lora, layers=None))
        shapes = (adapter.peft_shapes for adapter in adapters)
        most = min(min(low[1], high[0]) for low, high, *_ in shapes)
    lora["rank"] = min(lora["rank"], most)
    lora["alpha"] = program.lora.alpha * lora["rank"] / program.lora.rank
    sites = family.all_targets(small)
    for key in ("rank_pattern", "alpha_pattern"):
        # Drop entries for layers that the miniature does not have.
        lora[key] = {
            pattern: min(value, most) if key == "rank_pattern" else value
            for pattern, value in lora[key].items()
            if any(by_pattern({pattern: 1}, site.name, 0) for site in sites)
        }
    targets: list[str] = []
    for target in lora["targets"]:
        if any(meant(target, site) for site in sites):
            targets.append(target)
            continue
        # The pattern names layers that the miniature does not have: use its projections, on all layers.
        wanted = {
            site.words[0] if site.words else site.name.rpartition(".")[2]
            for site in program.family.all_targets(program.architecture)
            if meant(target, site)
        }
        targets += sorted(wanted)
    lora["targets"] = list(dict.fromkeys(targets))


def _group(size: int, family: Family, small: Architecture) -> int:
    """Return the largest group of train.qat that divides all inputs of a miniature's projections."""
    shapes = {parameter.path: parameter.shape for parameter in family.parameters(small)}
    sites = family.lora_targets(small)
    inputs = [math.prod(shapes[site.weight][axis] for axis in site.contract) for site in sites]
    common = math.gcd(*inputs, small.hidden_size)
    return max(n for n in range(1, size + 1) if common % n == 0)


def _fewer_modules(program: Program, family: Family, small: Architecture) -> list[str]:
    """Return the miniature's modules that represent those of train.trainable_modules, in fewer layers."""
    if not program.recipe.train.trainable_modules:
        return []
    chosen: dict[str, set[int]] = {}
    for parameter in program.parameters:
        name, layer = split_layer(parameter.path)
        if parameter.trainable:
            chosen.setdefault(name, set()).update(() if layer is None else (layer,))
    layers = {
        name: _fewer_layers(sorted(every), program.architecture, small) for name, every in chosen.items()
    }
    modules = []
    for parameter in family.parameters(small):
        name, layer = split_layer(parameter.path)
        if name in chosen and (layer is None or layer in layers[name]):
            modules += [source.module for source in parameter.sources]
    return list(dict.fromkeys(modules))


def _fewer_layers(layers: Sequence[int], original: Architecture, small: Architecture) -> list[int]:
    """Return the miniature's layers that represent the chosen ones: same kind, about the same depth."""

    def stand_in(layer: int) -> int:
        depth = layer * small.num_layers // original.num_layers
        alike = [i for i in range(small.num_layers) if small.layer_types[i] == original.layer_types[layer]]
        return min(alike, key=lambda i: abs(i - depth))

    return sorted({stand_in(layer) for layer in layers})


def replacements(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> list[MiniatureChange]:
    """Return the differences between two recipes as plain data."""
    changes = []
    for key in before:
        path, old, new = f"{prefix}{key}", before[key], after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and key != "axes":
            changes += replacements(old, new, f"{path}.")
        elif old != new:
            changes.append(MiniatureChange(path, _short(old), _short(new)))
    return changes


def _short(value: Any) -> str:
    if isinstance(value, list):
        value = [_name(item) if isinstance(item, dict) else item for item in value]
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _name(item: Mapping[str, Any]) -> str:
    """Name a data source by its path, a rule by what it matches, a reward by its function or kind."""
    kinds = (key for key, value in item.items() if value is not None and key != "weight")
    return str(item.get("path") or item.get("match") or item.get("function") or next(kinds))


SUBJECTS = ("the river", "a baker", "her brother", "the old bridge", "a small boat", "the night train")
DEEDS = ("crosses", "carries", "repairs", "remembers", "counts")
OBJECTS = ("the valley", "seven loaves", "a red lantern", "the market", "every stone")


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Return different chats of one or two turns, about 20 to 80 tokens long in a miniature's tokenizer."""
    rows = []
    for i in range(count):
        number = i * 37 % 101
        who = SUBJECTS[i % len(SUBJECTS)]
        deed = DEEDS[i // len(SUBJECTS) % len(DEEDS)]
        what = OBJECTS[number % len(OBJECTS)]
        row = [
            {"role": "user", "content": f"Say in one line what {who} does on day {number}."},
            {"role": "assistant", "content": f"On day {number} {who} {deed} {what}."},
        ]
        if i % 3 == 0:
            row += [
                {"role": "user", "content": "And the day after?"},
                {"role": "assistant", "content": f"On day {number + 1} {who} rests."},
            ]
        rows.append(row)
    return rows


def _png(number: int, side: int = 32) -> bytes:
    """Return a PNG file of one color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    color = bytes(number * factor % 256 for factor in (37, 91, 151))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + color * side) * side)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def pictured_row(messages: Sequence[dict[str, Any]], format: str, number: int) -> dict[str, Any]:
    """Convert a chat to a row with a picture of one color in the column images; every third row has none."""
    row = row_of(messages, format)
    if format == "prompt_completion":  # only messages have pictures
        row = {"prompt": list(messages[:1]), "completion": list(messages[1:2])}
    picture = f"data:image/png;base64,{b64encode(_png(number)).decode()}"
    return {**row, "images": [picture] if number % 3 else []}


def row_of(messages: Sequence[dict[str, Any]], format: str) -> dict[str, Any]:
    """Convert a chat to a row of a format of `data.format`. If the format has no place for further turns,
    only the first one is kept."""
    prompt, answer = messages[0]["content"], messages[1]["content"]
    if format == "chat":
        return {"messages": list(messages)}
    if format == "prompt":
        return {"prompt": list(messages[:1])}
    if format == "instruction":
        return {"instruction": prompt, "input": "", "output": answer}
    if format == "unpaired_preference":
        liked = sum(map(ord, prompt)) % 2 == 0
        answer_of_row = answer if liked else " ".join(reversed(answer.split()))
        return {"prompt": prompt, "completion": f" {answer_of_row}", "label": liked}
    if format == "prompt_completion":
        return {"prompt": prompt, "completion": f" {answer}"}
    if format == "preference":
        worse = " ".join(reversed(answer.split()))
        return {"prompt": prompt, "chosen": f" {answer}", "rejected": f" {worse}"}
    return {"text": f"{prompt} {answer}"}
