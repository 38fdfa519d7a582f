"""Build the runtime's settings of a recipe. Scripts print them; plans and previews run with them.

No other module builds these settings. A setting that the run does not use keeps the runtime's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.lowering.libtpu import flags
from recipec.compiler.lowering.sources import is_inline
from recipec.runtime.options import EarlyStopping, FakeQuantization, LocalCheckpointSettings, SampleSettings
from recipec.runtime.settings import (
    OF_A_SOURCE,
    CheckpointSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
    RunSettings,
    Source,
    TrainSettings,
)
from recipec.runtime.training.objectives import NLL, OBJECTIVES

if TYPE_CHECKING:
    from recipec.compiler.lowering.hardware import Accelerator
    from recipec.compiler.lowering.program import Program
    from recipec.runtime.model.families import Family
    from recipec.spec.language import Data, DataSource, Recipe


SETTINGS = tuple(
    dict.fromkeys(
        key for one in OBJECTIVES.values() for keys in (one.settings, *one.losses.values()) for key in keys
    )
)
"""All keys of `train` that only some objectives read."""


def run_settings(program: Program) -> RunSettings:
    """Return the settings of a program's run."""
    recipe, accelerator = program.recipe, program.accelerator
    return RunSettings(
        model=model_settings(recipe, program.family, accelerator),
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
    )


def model_settings(recipe: Recipe, family: Family, accelerator: Accelerator | None = None) -> ModelSettings:
    """Return the settings from the `model` and `remat` sections."""
    model = recipe.model
    chips = accelerator.attention_block if accelerator is not None else None
    return ModelSettings(
        id=model.id,
        revision=model.revision,
        tokenizer=model.tokenizer,
        add_tokens=tuple(model.add_tokens.items()),
        vocab_size=model.vocab_size,
        family=family.name,
        dtype=model.dtype,
        attention=model.attention,
        attention_block=(model.attention_block or chips) if model.attention == "splash" else None,
        remat=recipe.remat.policy,
        only=tuple(recipe.train.only),
        qat=None if (qat := recipe.train.qat) is None else FakeQuantization(**qat.model_dump()),
    )


def data_settings(recipe: Recipe, folder: Path) -> DataSettings:
    """Return the settings from the `data` section.

    Args:
        folder: the recipe's folder. The paths of its template and its transform are resolved against it, so
            that they work from any working folder.
    """
    data = recipe.data
    seed: Mapping[str, int] = {} if data.eval_fraction is None else {"eval_seed": data.eval_seed}
    return DataSettings(
        train=tuple(_source(source, data, folder) for source in data.train),
        eval=tuple(_source(source, data, folder) for source in data.eval),
        eval_fraction=data.eval_fraction,
        **seed,
        format=data.format,
        fields=dict(data.fields),
        transform=_found(data.transform, folder),
        chat_template=_template(data.chat_template, folder),
        loss_on=_plain(data.loss_on),
        reasoning=data.reasoning,
        special_tokens=data.special_tokens,
        max_length=data.max_length,
        overlong=data.overlong,
        max_invalid_ratio=data.max_invalid_ratio,
        packing=data.packing,
        shuffle_seed=data.shuffle_seed,
        temperature=data.temperature,
        curriculum=data.curriculum,
        stream_window=data.stream_window,
    )


def _source(source: DataSource, data: Data, folder: Path) -> Source:
    whole = data.of(source)
    own = {name: _plain(getattr(whole, name)) for name in OF_A_SOURCE}
    own = {name: value for name, value in own.items() if value != _plain(getattr(data, name))}
    if "transform" in own:
        own["transform"] = _found(own["transform"], folder)
    if "chat_template" in own:
        own["chat_template"] = _template(own["chat_template"], folder)
    return Source(source.path, source.weight, source.split, source.config, source.limit, **own)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _template(template: str | None, folder: Path) -> str | None:
    """Return a template; a file's path is resolved so that it works from any working folder."""
    return template if template is None or is_inline(template) else str((folder / template).resolve())


def _found(transform: str | None, folder: Path) -> str | None:
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
    keys = OBJECTIVES[train.objective].reads(train.loss_type)
    used: dict[str, Any] = {name: getattr(train, name) for name in keys}
    if used.get("loss_type") == NLL:
        del used["loss_type"]
    if recipe.data.evaluates:
        used["eval_every"] = train.eval_every
    if (stopping := train.early_stopping) is not None:
        used["early_stopping"] = EarlyStopping(stopping.patience, stopping.min_delta)
    if (samples := train.samples) is not None:
        used["samples"] = SampleSettings(samples.prompts, samples.max_tokens)
    return TrainSettings(
        objective=train.objective,
        **used,
        epochs=train.epochs,
        steps=train.steps,
        continue_from=train.continue_from,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        loss_normalization=train.loss_normalization,
        router_aux_loss_coef=train.router_aux_loss_coef,
        seed=train.seed,
        log_every=train.log.every,
        tensorboard=train.log.tensorboard,
        wandb_project=train.log.wandb_project,
        mlflow_experiment=train.log.mlflow_experiment,
    )


def checkpoint_settings(recipe: Recipe) -> CheckpointSettings:
    """Return the settings from the `checkpoint` section."""
    given, local = recipe.checkpoint, recipe.checkpoint.local
    own = None if local is None else LocalCheckpointSettings(local.directory, local.every_steps)
    return CheckpointSettings(given.directory, given.every_steps, given.keep, given.keep_best, own)
