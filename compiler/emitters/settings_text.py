"""Text that several scripts contain: their origin, and the runtime's settings."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.data_files import template_files
from recipec.compiler.lowering.runtime_settings import SETTINGS, plain
from recipec.compiler.python_text import WIDTH, Call, Name, Value, assignment, string
from recipec.runtime import sections
from recipec.runtime import settings as runtime_settings
from recipec.runtime.settings import ModelSettings, RunSettings, Source
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.spec.language.reinforcement import OF_SERVER

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec import language

LONG_RANGE = 8
"""From this number of consecutive layers on, they are written as a range."""


def about(program: Program) -> str:
    """Return the lines of a script's docstring that say where it comes from."""
    text = f"Made by recipec from the recipe {program.name}: edit recipe.yaml and build again."
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def kind(program: Program) -> str:
    """Name the kind of run: "LoRA fine-tuning", "QLoRA DPO training"."""
    lora, objective = program.recipe.lora, program.recipe.train.objective
    name = "DoRA" if lora is not None and lora.kind == "dora" else "LoRA"
    size = "Full" if lora is None else f"Q{name}" if program.recipe.model.quantization else name
    if program.recipe.train.qat is not None:
        size = f"Quantization-aware {size if lora is not None else 'full'}"
    if program.teacher is not None:
        return f"{size} distillation"
    return f"{size} fine-tuning" if objective == "sft" else f"{size} {objective.upper()} training"


def devices(program: Program) -> str:
    """Name the devices of the run: "v5p-8", "2 slices of v5p-16"."""
    accelerator = program.accelerator
    name, slices = accelerator.name, accelerator.slices
    return name if slices == 1 else f"{slices} slices of {name}"


def chat_template(program: Program) -> str | None:
    """Return the constant with the path of the artifact's chat template; None without one."""
    template = program.recipe.data.chat_template
    if template is None:
        return None
    return assignment("CHAT_TEMPLATE", Name(f"ARTIFACT / {string(template_files(program)[template])}"))


def base_settings(model: ModelSettings) -> Call:
    """Return `ModelSettings(...)` that only identifies the checkpoint, for a script that does not train."""
    identity = ModelSettings(
        id=model.id, revision=model.revision, vocab_size=model.vocab_size, family=model.family
    )
    return constructor(identity, quiet=("dtype", "attention", "remat"))


def constants(settings: RunSettings, program: Program) -> dict[str, Value]:
    """Return the constants of a training script, by their names."""
    values: dict[str, Value] = {
        "MODEL": constructor(settings.model),
        **({"TEACHER": constructor(settings.teacher, quiet=("remat",))} if settings.teacher else {}),
        "MESH": constructor(settings.mesh, quiet=("hosts", "flags")),
    }
    if settings.rules:
        values["SHARDING_RULES"] = settings.rules
    if settings.lora is not None:
        layers = settings.lora.layers
        written = {} if layers is None else {"layers": layer_numbers(layers)}
        values["LORA"] = constructor(settings.lora, written=written)
    values["DATA"] = _data(settings, program)
    values["TRAIN"] = _train(settings)
    values["CHECKPOINT"] = constructor(settings.checkpoint)
    recipe = program.recipe
    if recipe.train.objective == "grpo":
        values["REWARDS"] = tuple(map(_reward, recipe.rewards))
        values["REWARD_LIMITS"] = constructor(plain(recipe.reward_limits))
    if program.generated is not None:
        quiet = () if recipe.rollout.engine == "vllm" else OF_SERVER
        values["ROLLOUT"] = constructor(plain(recipe.rollout), quiet=quiet)
    return values


def _reward(reward: language.Reward) -> Call:
    """Return `Reward(...)`: a function of the artifact, or a ready reward with its options."""
    arguments: dict[str, Value] = {"*0": reward.kind}
    if reward.function is not None:
        path, _, arguments["*0"] = reward.function.partition(":")
        arguments["file"] = Name(f"str(ARTIFACT / {string(path)})")
    else:
        section = getattr(reward, reward.kind)
        options: dict[str, Value] = {key: value for key, value in section if key not in ("column", "file")}
        if getattr(section, "file", None) is not None:
            options["schema"] = Name(f'(ARTIFACT / {string(section.file)}).read_text(encoding="utf-8")')
        if getattr(section, "column", None) is not None:
            arguments["column"] = section.column
        if options:
            arguments["options"] = options
    if reward.weight != 1.0:
        arguments["weight"] = reward.weight
    return Call("Reward", arguments)


def _data(settings: RunSettings, program: Program) -> Call:
    """Return `DataSettings(...)` with the artifact's own files."""
    written: dict[str, Value] = {}
    if program.recipe.data.transform is not None:
        written["transform"] = _transform(program.recipe.data.transform)
    for part in ("train", "eval"):
        of_artifact = [_own_files(program, source) for source in getattr(program.recipe.data, part)]
        if any(of_artifact):
            sources = zip(getattr(settings.data, part), of_artifact, strict=True)
            written[part] = tuple(_source(source, names) for source, names in sources)
    if settings.data.chat_template is not None:
        written["chat_template"] = Name('CHAT_TEMPLATE.read_text(encoding="utf-8")')
    quiet = ("eval_seed",) if settings.data.eval_fraction is None else ()
    return constructor(settings.data, quiet=quiet, written=written)


def _transform(transform: str) -> Name:
    """Return the path of the transform's function in the artifact."""
    path, _, function = transform.partition(":")
    file = string(path, quote="'")
    return Name(f'f"{{ARTIFACT / {file}}}:{function}"')


def _own_files(program: Program, source: language.Source) -> dict[str, Value]:
    """Return the artifact's paths of the files that belong to one source."""
    names: dict[str, Value] = {}
    if source.transform is not None:
        names["transform"] = _transform(source.transform)
    if source.chat_template is not None:
        file = string(template_files(program)[source.chat_template])
        names["chat_template"] = Name(f'(ARTIFACT / {file}).read_text(encoding="utf-8")')
    return names


def _train(settings: RunSettings) -> Call:
    """Return `TrainSettings(...)`, without the settings that only other objectives read."""
    train = settings.train
    objective = OBJECTIVES[train.objective]
    quiet = {"objective", "router_aux_loss_coef", *SETTINGS}
    if objective.loss(train.loss_type):
        quiet -= {*objective.reads(train.loss_type)} - {"loss_type"}
    evaluates = settings.data.eval or settings.data.eval_fraction is not None
    if not evaluates and train.generations is None:
        quiet.add("eval_every")
    return constructor(train, quiet=quiet)


def constructor(
    settings: Any, *, quiet: Collection[str] = (), written: Mapping[str, Value] | None = None
) -> Call:
    """Return the call that creates a settings object, with its fields in their order.

    A field whose default is None, False or empty is left out if it has this default.

    Args:
        quiet: further fields that are left out at their default.
        written: values to write instead of the fields' own.
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


def _source(source: Source, of_artifact: Mapping[str, Value] = MappingProxyType({})) -> Value:
    """Return a source of samples; only its path if nothing else is set.

    Args:
        of_artifact: values to write for the files that belong to it.
    """
    written = {name: value for name, value in of_artifact.items() if getattr(source, name) is not None}
    rest = {**constructor(source, quiet=("weight",), written=written).arguments}
    path = rest.pop("path")
    return Call("Source", {"*0": path, **rest}) if rest else path


def imports(values: Mapping[str, Value]) -> list[str]:
    """Return the statements that import the classes of settings that constants call."""
    modules: dict[str, list[str]] = {}
    for name in sorted({name for value in values.values() for name in _called(value)}):
        places = (runtime_settings, sections)
        kind = next((value for place in places if (value := getattr(place, name, None))), None)
        if kind is not None:  # LoraSettings stands in a module of its own
            modules.setdefault(kind.__module__.removeprefix("recipec."), []).append(name)
    return [_import(module, names) for module, names in sorted(modules.items())]


def _import(module: str, names: Sequence[str]) -> str:
    """Return a statement that imports names, on one line if it fits."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH - 4:  # it may stand within `try`
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _called(value: Value) -> Iterator[str]:
    if isinstance(value, Call):
        yield value.function
        for item in value.arguments.values():
            yield from _called(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _called(item)


def layer_numbers(layers: Sequence[int]) -> Value:
    """Return a tuple of layers, or a range if they are many and consecutive."""
    first, last = layers[0], layers[-1]
    if len(layers) >= LONG_RANGE and tuple(layers) == tuple(range(first, last + 1)):
        return Name(f"tuple(range({first}, {last + 1}))")
    return tuple(layers)
