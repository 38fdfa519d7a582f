"""What several scripts state: where they come from, and the runtime's settings."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.data_files import template_file, template_files
from recipec.compiler.emitters.python_text import WIDTH, Call, Name, Value, assignment, string
from recipec.runtime.settings import ModelSettings, RunSettings, Source
from recipec.runtime.training.objectives import OBJECTIVES, SETTINGS
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import DataSource

LONG_RANGE = 8
"""Consecutive layers from which on they are written as a range."""


def about(program: Program) -> str:
    """The lines of a script's docstring that say where it comes from."""
    text = f"Made by recipec from the recipe {program.name}: edit recipe.yaml and build again."
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def kind(program: Program) -> str:
    """What the run is called: "LoRA fine-tuning", "QLoRA DPO training"."""
    lora, objective = program.recipe.lora, program.recipe.train.objective
    name = "DoRA" if lora is not None and lora.kind == "dora" else "LoRA"
    size = "Full" if lora is None else f"Q{name}" if lora.quantize else name
    return f"{size} fine-tuning" if objective == "sft" else f"{size} {objective.upper()} training"


def devices(program: Program) -> str:
    """What the run is on: "v5p-8", "2 slices of v5p-16"."""
    accelerator = program.accelerator
    name, slices = accelerator.name, accelerator.slices
    return name if slices == 1 else f"{slices} slices of {name}"


def chat_template(program: Program) -> str | None:
    """The constant that says where the artifact's chat template lies; None without one."""
    template = template_file(program)
    return template and assignment("CHAT_TEMPLATE", Name(f"ARTIFACT / {string(template)}"))


def base_settings(model: ModelSettings) -> Call:
    """`ModelSettings(...)` that says which checkpoint it is, for a script that does not train."""
    identity = ModelSettings(
        id=model.id, revision=model.revision, vocab_size=model.vocab_size, family=model.family
    )
    return constructor(identity, quiet=("dtype", "attention", "remat"))


def check_whole(program: Program, backend: str) -> Iterator[Diagnostic]:
    """That a backend trains nothing whole beside adapters."""
    if program.lora is not None and program.lora.train_also:
        yield Diagnostic(
            "E0943",
            f"--backend {backend} trains only adapters, and no other modules",
            "lora.train_also",
            f"train_also: [], or build without --backend {backend}",
        )


def constants(settings: RunSettings, program: Program) -> dict[str, Value]:
    """The constants of a training script, by their names."""
    made: dict[str, Value] = {
        "MODEL": constructor(settings.model),
        "MESH": constructor(settings.mesh, quiet=("hosts", "flags")),
    }
    if settings.rules:
        made["SHARDING_RULES"] = settings.rules
    if settings.lora is not None:
        layers = settings.lora.layers
        written = {} if layers is None else {"layers": layer_numbers(layers)}
        made["LORA"] = constructor(settings.lora, written=written)
    made["DATA"] = _data(settings, program)
    made["TRAIN"] = _train(settings)
    made["CHECKPOINT"] = constructor(settings.checkpoint)
    return made


def _data(settings: RunSettings, program: Program) -> Call:
    """`DataSettings(...)`, whose files are the artifact's own."""
    written: dict[str, Value] = {}
    if program.recipe.data.transform is not None:
        written["transform"] = _transform(program.recipe.data.transform)
    for part in ("train", "eval"):
        own = [_own_files(program, source) for source in getattr(program.recipe.data, part)]
        if any(own):
            sources = zip(getattr(settings.data, part), own, strict=True)
            written[part] = tuple(_source(source, names) for source, names in sources)
    if settings.data.chat_template is not None:
        written["chat_template"] = Name('CHAT_TEMPLATE.read_text(encoding="utf-8")')
    quiet = ("eval_seed",) if settings.data.eval_fraction is None else ()
    return constructor(settings.data, quiet=quiet, written=written)


def _transform(transform: str) -> Name:
    """The function's place, in the artifact."""
    path, _, function = transform.partition(":")
    file = string(path, quote="'")
    return Name(f'f"{{ARTIFACT / {file}}}:{function}"')


def _own_files(program: Program, source: DataSource) -> dict[str, Value]:
    """What stands for a source's own files, in the artifact."""
    names: dict[str, Value] = {}
    if source.transform is not None:
        names["transform"] = _transform(source.transform)
    if source.chat_template is not None:
        file = string(template_files(program)[source.chat_template])
        names["chat_template"] = Name(f'(ARTIFACT / {file}).read_text(encoding="utf-8")')
    return names


def _train(settings: RunSettings) -> Call:
    """`TrainSettings(...)`, without what another objective reads."""
    train = settings.train
    objective = OBJECTIVES[train.objective]
    quiet = {"objective", "router_aux_loss_coef", *SETTINGS}
    quiet -= {*objective.reads(train.loss_type)} - {"loss_type"} if objective.losses else set()
    if not settings.data.eval and settings.data.eval_fraction is None:
        quiet.add("eval_every")
    return constructor(train, quiet=quiet)


def constructor(
    settings: Any, *, quiet: Collection[str] = (), written: Mapping[str, Value] | None = None
) -> Call:
    """The call that makes a settings object, with its fields in their order.

    A field is left out at its default where that is None, False or empty.

    Args:
        quiet: others that are left out at their default.
        written: what stands for a field's value.
    """
    arguments: dict[str, Value] = {}
    for field in fields(settings):
        value, default = getattr(settings, field.name), _default(field)
        if written and field.name in written:
            arguments[field.name] = written[field.name]
        elif value != default or not (field.name in quiet or _says_nothing(default)):
            arguments[field.name] = _printed(value)
    return Call(type(settings).__name__, arguments)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _says_nothing(default: Any) -> bool:
    return default is None or default is False or default in ((), {})


def _printed(value: Any) -> Value:
    if isinstance(value, Source):
        return _source(value)
    if is_dataclass(value):
        return constructor(value)
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(_printed(item) for item in value) if isinstance(value, tuple) else value


def _source(source: Source, own: Mapping[str, Value] = MappingProxyType({})) -> Value:
    """A source of samples; its path alone where it has no more.

    Args:
        own: what stands for its own files.
    """
    written = {name: value for name, value in own.items() if getattr(source, name) is not None}
    rest = {**constructor(source, quiet=("weight",), written=written).arguments}
    path = rest.pop("path")
    return Call("Source", {"*0": path, **rest}) if rest else path


def classes(values: Mapping[str, Value]) -> list[str]:
    """The classes of runtime.settings that constants call, sorted."""
    return sorted({name for value in values.values() for name in _called(value)} - {"LoraSettings"})


def _called(value: Value) -> Iterator[str]:
    if isinstance(value, Call):
        yield value.function
        for item in value.arguments.values():
            yield from _called(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _called(item)


def layer_numbers(layers: Sequence[int]) -> Value:
    """A tuple of layers, or a range where that is shorter."""
    first, last = layers[0], layers[-1]
    if len(layers) >= LONG_RANGE and tuple(layers) == tuple(range(first, last + 1)):
        return Name(f"tuple(range({first}, {last + 1}))")
    return tuple(layers)
