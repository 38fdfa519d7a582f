"""Build the runtime's settings of a recipe. Scripts print them; plans and previews run with them.

No other module builds these settings. A setting that the run does not use keeps the runtime's default.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from recipec.compiler.lowering.libtpu import flags
from recipec.compiler.lowering.references import is_inline
from recipec.runtime import sections
from recipec.runtime.settings import (
    OF_A_SOURCE,
    CheckpointSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
    Reward,
    RunSettings,
    Source,
    TrainSettings,
)
from recipec.runtime.training.objectives import NLL, OBJECTIVES
from recipec.spec.language.section import Section

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.runtime.model.families import Family
    from recipec.spec import language
    from recipec.spec.language import Data, Recipe


SETTINGS = tuple(
    dict.fromkeys(
        key
        for objective in OBJECTIVES.values()
        for keys in (objective.settings, *objective.losses.values())
        for key in keys
    )
)
"""All keys of `train` that only some objectives read."""


def run_settings(program: Program) -> RunSettings:
    """Return the settings of a program's run."""
    recipe, accelerator = program.recipe, program.accelerator
    return RunSettings(
        model=model_settings(recipe, program.family, attention_block(program)),
        mesh=MeshSettings(
            platform=accelerator.platform,
            devices=accelerator.devices,
            axes=dict(recipe.mesh.axes),
            hosts=accelerator.hosts,
            flags=flags(program) if accelerator.platform == "tpu" else (),
        ),
        lora=program.lora,
        data=data_settings(recipe, program.source.parent),
        train=train_settings(recipe),
        checkpoint=checkpoint_settings(recipe),
        rules=program.rules,
        teacher=teacher_settings(program),
    )


def attention_block(program: Program) -> int | None:
    """Return the tokens of splash attention's largest block: the recipe's, or the accelerator's own for the
    model. None without splash attention, and on a CPU if the recipe sets none."""
    model, architecture = program.recipe.model, program.architecture
    if model.attention != "splash":
        return None
    windowed = any(architecture.window(layer) is not None for layer in range(architecture.num_layers))
    chips = program.accelerator
    return model.attention_block or (chips.windowed_attention_block if windowed else chips.attention_block)


def model_settings(recipe: Recipe, family: Family, attention_block: int | None = None) -> ModelSettings:
    """Return the settings from the `model` and `remat` sections, and of what `train` changes in the model."""
    model = recipe.model
    return stated(
        ModelSettings,
        model,
        add_tokens=tuple(model.add_tokens.items()),
        family=family.name,
        attention_block=attention_block,
        remat=recipe.remat.policy,
        trainable_modules=plain(recipe.train.trainable_modules),
        qat=plain(recipe.train.qat),
    )


def teacher_settings(program: Program) -> ModelSettings | None:
    """Return the settings of the teacher; None without one. It computes in the student's dtype, with the same
    attention where its family has that."""
    recipe, teacher = program.recipe, program.teacher
    if recipe.train.distill is None or teacher is None:
        return None
    splash = recipe.model.attention == "splash" and teacher.family.flash_attention
    return stated(
        ModelSettings,
        recipe.train.distill.teacher,
        family=teacher.family.name,
        dtype=recipe.model.dtype,
        attention="splash" if splash else "dot",
        attention_block=recipe.model.attention_block or program.accelerator.attention_block
        if splash
        else None,
    )


def data_settings(recipe: Recipe, folder: Path) -> DataSettings:
    """Return the settings from the `data` section.

    Args:
        folder: the recipe's folder. The paths of its template and its transform are resolved against it, so
            that they work from any working folder.
    """
    data = recipe.data
    return stated(
        DataSettings,
        data,
        train=tuple(_source(source, data, folder) for source in data.train),
        eval=tuple(_source(source, data, folder) for source in data.eval),
        transform=_transform(data.transform, folder),
        chat_template=_template(data.chat_template, folder),
    )


def _source(source: language.Source, data: Data, folder: Path) -> Source:
    """Return a source with the settings in which it differs from the section."""
    whole = data.of(source)
    differing: dict[str, Any] = {
        key: plain(value) if (value := getattr(whole, key)) != getattr(data, key) else None
        for key in OF_A_SOURCE
    }
    differing["transform"] = _transform(differing["transform"], folder)
    differing["chat_template"] = _template(differing["chat_template"], folder)
    return stated(Source, source, **differing)


def _template(template: str | None, folder: Path) -> str | None:
    """Return a template; a file's path is resolved so that it works from any working folder."""
    return template if template is None or is_inline(template) else str((folder / template).resolve())


def _transform(transform: str | None, folder: Path) -> str | None:
    """Return the function that transforms rows; its file's path works from any working folder."""
    if transform is None:
        return None
    path, _, function = transform.partition(":")
    return f"{(folder / path).resolve()}:{function}"


def choosing(recipe: Recipe) -> list[str]:
    """Return the keys that choose a step by the evaluation loss."""
    keys = {
        "train.early_stopping": recipe.train.early_stopping is not None,
        "checkpoint.keep_best": recipe.checkpoint.keep_best,
    }
    return [key for key, on in keys.items() if on]


def train_settings(recipe: Recipe) -> TrainSettings:
    """Return the settings from the `train` section, except its optimizer and its schedule."""
    train = recipe.train
    read = OBJECTIVES[train.objective].reads(train.loss_type)
    unread = {key for key in SETTINGS if key not in read}
    if train.loss_type == NLL:
        unread.add("loss_type")
    if not recipe.data.evaluates and train.generations is None:
        unread.add("eval_every")
    return stated(TrainSettings, train, unread=unread)


def rewards_of(recipe: Recipe, folder: Path) -> tuple[Reward, ...]:
    """Return the rewards of a recipe, as its script states them.

    Args:
        folder: the recipe's folder.
    """
    return tuple(_reward(reward, folder) for reward in recipe.rewards)


def _reward(reward: language.Reward, folder: Path) -> Reward:
    if reward.function is not None:
        path, _, name = reward.function.partition(":")
        return Reward(name, file=str((folder / path).resolve()), weight=reward.weight)
    section = getattr(reward, reward.kind)
    options = {key: value for key, value in section if key not in ("column", "file")}
    if (file := getattr(section, "file", None)) is not None:
        options["schema"] = (folder / file).read_text(encoding="utf-8")
    column = getattr(section, "column", None)
    return Reward(reward.kind, column=column, options=options, weight=reward.weight)


def checkpoint_settings(recipe: Recipe) -> CheckpointSettings:
    """Return the settings from the `checkpoint` section."""
    return stated(CheckpointSettings, recipe.checkpoint)


Settings = TypeVar("Settings")


def stated(
    kind: type[Settings], section: Section, *, unread: Collection[str] = (), **values: Any
) -> Settings:
    """Return the settings of a section: each field of `kind` has the value of the key of its name.

    Args:
        unread: keys that the run does not read, which keep their defaults.
        values: of the fields that are not a key's value.
    """
    keys = type(section).model_fields
    for name in (item.name for item in fields(kind)):  # type: ignore[arg-type]
        if name in keys and name not in values and name not in unread:
            values[name] = plain(getattr(section, name))
    return kind(**values)


def plain(value: Any) -> Any:
    """Return a value of the language as the runtime's settings have it."""
    if isinstance(value, Section):
        return stated(getattr(sections, type(value).__name__), value)
    if isinstance(value, list):
        return tuple(plain(item) for item in value)
    return dict(value) if isinstance(value, dict) else value
