"""What can stand as a value at a path: words of the language, machines, models, projections, files."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler import catalog, hardware
from compiler.lsp.files import beside, functions
from compiler.sources import ENDINGS
from compiler.wording import divisors, flow, plural
from runtime.data.formats import FIELDS
from runtime.families import UnsupportedCheckpoint
from runtime.families.base import FULL
from spec.language.mesh import AXES
from spec.structure import field_at


@dataclass(frozen=True)
class Choice:
    """A value that can be given.

    Attributes:
        value: plain.
        detail: a few words beside it.
        about: a sentence or two.
        goes_on: whether it is a folder, in which more can be named.
    """

    value: Any
    detail: str = ""
    about: str = ""
    goes_on: bool = False


@dataclass(frozen=True)
class Around:
    """What the choice of a value depends on.

    Attributes:
        folder: of the recipe.
        typed: the part of the value that stands before the cursor.
        get: gives the recipe's value at a path as far as it is known, by the path's parts; None for none.
    """

    folder: Path
    typed: str
    get: Callable[..., Any]

    def model(self) -> catalog.Model | None:
        """The recipe's model; None where it is not known."""
        name = self.get("model", "id")
        try:
            return catalog.find(name, self.folder) if isinstance(name, str) and name else None
        except (catalog.UnknownModel, UnsupportedCheckpoint, OSError):
            return None

    def machine(self) -> hardware.Accelerator | None:
        """The machine that trains; None where it is not known."""
        name, topology = self.get("mesh", "accelerator"), self.get("mesh", "topology")
        try:
            if isinstance(topology, str):
                return hardware.from_topology(topology)
            return hardware.from_name(name) if isinstance(name, str) else None
        except hardware.UnknownAccelerator:
            return None


def choices(path: tuple[str, ...], around: Around) -> list[Choice]:
    """What can stand at a path, in the order in which it is shown.

    Args:
        path: of the value, without the numbers of list items.
    """
    special = SOURCES.get(path)
    out = list(special(around)) if special else []
    if not special or path == ("lora", "layers"):
        out += _of_the_language(path)
    once: dict[str, Choice] = {}
    for choice in out:
        once.setdefault(flow(choice.value), choice)
    return list(once.values())


def _of_the_language(path: tuple[str, ...]) -> Iterator[Choice]:
    """The words that a key takes, with what they mean; else true and false, its default, and its example."""
    info = field_at(path)
    if info is None:
        return
    extra = info.json_schema_extra
    words = extra.get("x-choices") if isinstance(extra, dict) else None
    default = None if info.is_required() or info.default_factory else info.default
    nullable = "None" in str(info.annotation)
    if isinstance(words, dict):
        for word, meaning in words.items():
            yield Choice(word, "default" if word == default else "", str(meaning))
    elif "bool" in str(info.annotation):
        for value in (True, False):
            yield Choice(value, "default" if value is default else "")
    else:
        if isinstance(default, str | int | float) or (isinstance(default, list) and default):
            yield Choice(default, "default")
        for value in info.examples or ():
            if not isinstance(value, dict) or path in (("mesh", "axes"),):
                yield Choice(value, "example")
    if nullable:
        yield Choice(None, "default" if default is None and not info.default_factory else "")


def _accelerators(around: Around) -> Iterator[Choice]:
    for name in hardware.known_names():
        yield _machine(name, hardware.from_name(name))


def _servers(around: Around) -> Iterator[Choice]:
    return (choice for choice in _accelerators(around) if not str(choice.value).startswith("cpu"))


def _topologies(around: Around) -> Iterator[Choice]:
    for generation, data in hardware.generations().items():
        for shape in data["topologies"]:
            name = f"{generation}:{shape}"
            yield _machine(name, hardware.from_topology(name))


def _machine(name: str, machine: hardware.Accelerator) -> Choice:
    if machine.hbm_gib is None:
        return Choice(name, plural(machine.devices, "virtual device"), machine.describe())
    hosts = f", {plural(machine.hosts, 'host')}" if machine.hosts > 1 else ""
    total = machine.hbm_gib * machine.chips
    price = machine.usd_per_hour
    cost = f" List price US$ {price:,.2f} an hour, as of {machine.price_date}." if price is not None else ""
    detail = f"{plural(machine.chips, 'chip')}, {total:,.0f} GiB{hosts}"
    return Choice(name, detail, f"{machine.describe()}.{cost}")


def _models(around: Around) -> Iterator[Choice]:
    if catalog.is_directory(around.typed):
        yield from _files(around, (), checkpoints=True)
        return
    for name, entry in catalog.entries().items():
        if "unsupported" in entry:
            continue
        kind = "tuned for chat" if entry.get("chat") else "base"
        yield Choice(name, f"{catalog.title(name)}, {kind}", _size(name))


def _size(name: str) -> str:
    a = catalog.find(name, Path()).architecture
    return f"{a.num_layers} layers, hidden size {a.hidden_size:,}, {a.num_heads} attention heads."


def _axes(around: Around) -> Iterator[Choice]:
    machine = around.machine()
    if machine is None:
        yield from _of_the_language(("mesh", "axes"))
        return
    for tp in divisors(machine.devices):
        if tp <= 64:
            axes = {"fsdp": machine.devices // tp, "tp": tp}
            yield Choice(axes, plural(machine.devices, "device"), "")


def _projections(around: Around) -> Iterator[Choice]:
    model = around.model()
    if model is None:
        yield from (Choice(name) for name in _projection_names(None))
        return
    layers = projection_layers(model)
    for name, count in layers.items():
        every = "every layer" if count == model.architecture.num_layers else plural(count, "layer")
        yield Choice(name, every, f"{model.title} has it in {every}.")


def projection_layers(model: catalog.Model) -> dict[str, int]:
    """How many layers have each projection that can carry adapters, by their Hugging Face names."""
    found: dict[str, set[int]] = {}
    for target in model.family.lora_targets(model.architecture):
        for slot in target.projections:
            found.setdefault(slot.rpartition(".")[2], set()).add(target.layer)
    return {name: len(layers) for name, layers in found.items()}


def _projection_names(model: catalog.Model | None) -> list[str]:
    from spec.language.lora import PROJECTIONS

    return list(projection_layers(model)) if model else list(PROJECTIONS)


def _layers(around: Around) -> Iterator[Choice]:
    model = around.model()
    if model is None:
        return
    a = model.architecture
    yield Choice("all", plural(a.num_layers, "layer"))
    yield Choice(f"{a.num_layers // 2}-{a.num_layers - 1}", "the upper half")
    kinds = [i for i, kind in enumerate(a.layer_types) if kind == FULL]
    if 0 < len(kinds) < a.num_layers:
        yield Choice(kinds, "the global layers")


def _patterns(around: Around) -> Iterator[Choice]:
    """A regular expression for each kind of parameter of the model."""
    model = around.model()
    seen = set()
    for parameter in model.family.parameters(model.architecture) if model else ():
        pattern = re.sub(r"(?<=\\\.)\d+(?=\\\.)", "[0-9]+", re.escape(parameter.path))
        if pattern not in seen:
            seen.add(pattern)
            sizes = ", ".join(str(n) for n in parameter.shape)
            spec = ", ".join(axis or "null" for axis in parameter.spec)
            yield Choice(pattern, f"[{sizes}]", f"By default it is split as [{spec}].")


def _axis_names(around: Around) -> Iterator[Choice]:
    yield from (Choice(name, "mesh axis") for name in AXES)
    yield Choice(None, "whole")


DATA = (*ENDINGS, ".gz", ".zst")
"""Endings of the files that rows are read from."""


def _data(around: Around) -> Iterator[Choice]:
    yield from _files(around, DATA)


def _files(around: Around, endings: Iterable[str], checkpoints: bool = False) -> Iterator[Choice]:
    for name, goes_on in beside(around.folder, around.typed, endings, checkpoints):
        yield Choice(name, "folder" if goes_on else "file", goes_on=goes_on)


def _transforms(around: Around) -> Iterator[Choice]:
    """The functions of the Python file that is named, or such files."""
    name, colon, _ = around.typed.partition(":")
    if not colon:
        for choice in _files(around, (".py",)):
            yield choice if choice.goes_on else Choice(f"{choice.value}:", "file", goes_on=True)
        return
    for function in functions(around.folder / name):
        yield Choice(f"{name}:{function.name}", "function", ast.get_docstring(function) or "")


def keys(path: tuple[str, ...], around: Around) -> list[Choice]:
    """The keys of a mapping that is no section, without the numbers of list items in its path."""
    if path == ("mesh", "axes"):
        return [Choice(name, "mesh axis") for name in AXES]
    if path in (("lora", "rank_pattern"), ("lora", "alpha_pattern")):
        return [Choice(name) for name in _projection_names(around.model())]
    if path == ("data", "fields"):
        kind = around.get("data", "format")
        return [Choice(name) for name in FIELDS.get(kind if isinstance(kind, str) else "chat", ())]
    if path == ("serve", "extra_args"):
        from compiler.serving.flags import flags

        return [Choice(flag.name, flag.type) for flag in flags().values()]
    return []


SOURCES: Mapping[tuple[str, ...], Callable[[Around], Iterator[Choice]]] = {
    ("extends",): lambda around: _files(around, (".yaml", ".yml")),
    ("model", "id"): _models,
    ("model", "tokenizer"): _models,
    ("mesh", "accelerator"): _accelerators,
    ("mesh", "topology"): _topologies,
    ("mesh", "axes"): _axes,
    ("lora", "targets"): _projections,
    ("lora", "layers"): _layers,
    ("sharding", "rules", "match"): _patterns,
    ("sharding", "rules", "spec"): _axis_names,
    ("data", "train"): _data,
    ("data", "eval"): _data,
    ("data", "train", "path"): _data,
    ("data", "eval", "path"): _data,
    ("data", "transform"): _transforms,
    ("data", "chat_template"): lambda around: _files(around, (".jinja", ".j2", ".txt")),
    ("serve", "accelerator"): _servers,
    ("evaluate", "prompts"): lambda around: _files(around, (".jsonl",)),
}
"""Paths whose values are not the language's alone."""
