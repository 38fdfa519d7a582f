"""The input of the checks: the recipe, with what the catalogs know about its model and hardware.

Gathering does not stop at an error. A fact that cannot be determined is None, a diagnostic says why, and the
checks that need it are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler import catalog
from recipec.compiler.catalog import E0803
from recipec.compiler.catalog.added import add_command
from recipec.compiler.lowering import hardware
from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.run_length import Length, run_length
from recipec.compiler.wording import listing
from recipec.runtime.data.tokenizer import TOKENIZER, padded, token_ids
from recipec.runtime.model.adapters import (
    Adapter,
    LoraSettings,
    build_adapters,
    lora_settings,
    meant,
    parse_layers,
)
from recipec.runtime.model.families import UnsupportedCheckpoint
from recipec.runtime.model.families.family import LoraTarget, Parameter, Spec, arrays, sites
from recipec.runtime.model.families.vision import PATH
from recipec.runtime.model.partition_rules import apply_rules, data_parallel, divisible
from recipec.runtime.weights.added_rows import with_vocabulary
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.spec.language import Recipe


TOWER = f"{PATH}."
"""What the paths of a vision tower's arrays begin with."""


@dataclass(frozen=True)
class Facts:
    """A recipe and what is known about it.

    Attributes:
        recipe: validated against the language; for an added model, model.revision is its commit.
        source: the recipe's file.
        model, accelerator, serve_accelerator: None where unknown (a diagnostic says why) or
            where the recipe has no such section.
        layers: the layers with adapters, None where they cannot be determined.
        automatic: the keys whose `auto` is resolved in `recipe`, each with the reason for its value.
        teacher: of the objective distill; None where unknown, or with another objective.
    """

    recipe: Recipe
    source: Path
    model: catalog.Model | None
    accelerator: Accelerator | None
    serve_accelerator: Accelerator | None
    layers: tuple[int, ...] | None
    automatic: Mapping[str, str] = field(default_factory=dict)
    teacher: catalog.Model | None = None

    @property
    def folder(self) -> Path:
        return self.source.parent

    @cached_property
    def axes(self) -> dict[str, int]:
        """Devices along each mesh axis."""
        return dict(self.recipe.mesh.axes)

    @property
    def data_parallel(self) -> int:
        """Devices that see different samples."""
        return data_parallel(self.axes)

    def first_given(self, *paths: str) -> str:
        """Return the first of these paths that the recipe sets itself; if it sets none, the first path."""
        for path in paths:
            node: object = self.recipe
            for name in path.split("."):
                if name not in getattr(node, "model_fields_set", ()):
                    break
                node = getattr(node, name)
            else:
                return path
        return paths[0]

    @cached_property
    def length(self) -> Length:
        """The length of the run, and what the local data shows about it."""
        return run_length(self.recipe, self.folder)

    @cached_property
    def positions(self) -> int | None:
        """The most tokens of a sequence that the model has positions for; None where it is not known."""
        return None if self.model is None else self.model.positions()

    @property
    def replicates(self) -> bool:
        """Whether a dimension that its axis does not divide is replicated.

        This holds for models that no family describes, unless the recipe has sharding rules of its own.
        """
        described = self.model is None or self.model.family.tunix
        return self.recipe.sharding.on_indivisible == "replicate" or not described

    @cached_property
    def rules(self) -> tuple[tuple[str, Spec], ...]:
        return tuple((rule.match, tuple(rule.spec)) for rule in self.recipe.sharding.rules)

    @cached_property
    def token_ids(self) -> Mapping[str, int] | None:
        """The ids of the tokens of the model's tokenizer; None if it is not next to the recipe."""
        return self.token_ids_of(self.recipe.model.id)

    def token_ids_of(self, model: str) -> Mapping[str, int] | None:
        """Return the ids of the tokens of a model's tokenizer; None if it is not next to the recipe."""
        if not catalog.is_directory(model):
            return None
        file = self.folder / Path(model).expanduser() / TOKENIZER
        try:
            return token_ids(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None  # train.py reports what is wrong with it

    @cached_property
    def lora(self) -> LoraSettings | None:
        """The `lora` section; None without one, or when its layers cannot be determined."""
        section = self.recipe.lora
        if section is None or self.layers is None or self.model is None:
            return None
        return lora_settings(section.model_dump(), self.model.architecture.num_layers)

    @cached_property
    def adapters(self) -> tuple[Adapter, ...] | None:
        """The adapters, with the family's shardings; None without any, or where projections that share A are
        given different ranks or alphas, which the checks of the lora section report."""
        if self.model is None or self.lora is None:
            return None
        try:
            return tuple(build_adapters(self.model.family, self.model.architecture, self.lora))
        except ValueError:
            return None

    @cached_property
    def hits(self) -> Mapping[str, Sequence[LoraTarget]]:
        """The weights that each of lora.targets matches."""
        targets = self.recipe.lora.targets if self.recipe.lora else ()
        return {target: [site for site in self.lora_targets if meant(target, site)] for target in targets}

    @cached_property
    def defaults(self) -> tuple[Parameter, ...]:
        """The model's arrays with the family's shardings; () without a model.

        The vision tower's are split only where they divide: no key of the recipe says how it is split.
        """
        if self.model is None:
            return ()
        return tuple(
            replace(array, spec=divisible(array.shape, array.spec, self.axes))
            if array.path.startswith(TOWER)
            else array
            for array in arrays(self.model.family, self.model.architecture)
        )

    @cached_property
    def lora_targets(self) -> tuple[LoraTarget, ...]:
        """The weights that can carry LoRA, with `lora.vision` those of the tower too; () without a model."""
        if self.model is None:
            return ()
        vision = self.recipe.lora is not None and self.recipe.lora.vision
        every = sites(self.model.family, self.model.architecture)
        return tuple(site for site in every if vision or not site.of_tower)

    def within(self, site: LoraTarget) -> bool:
        """Return whether a weight is in the layers that `lora.layers` names, or in the vision tower."""
        return site.of_tower or site.layer in (self.layers or ())

    @cached_property
    def ruled(self) -> tuple[Parameter, ...]:
        """The model's arrays after the recipe's sharding rules, as far as these fit the arrays they match."""
        fitting = []
        for match, spec in self.rules:
            pattern = re.compile(match)
            axes = [axis for axis in spec if axis is not None]
            ranks = {len(p.shape) for p in self.defaults if pattern.fullmatch(p.path)}
            if len(set(axes)) == len(axes) and ranks <= {len(spec)}:
                fitting.append((match, spec))
        return apply_rules(self.defaults, fitting, self.axes)


def gather(recipe: Recipe, source: Path) -> tuple[Facts, list[Diagnostic]]:
    """Look up a recipe's model and hardware.

    Args:
        recipe: validated against the language.
        source: the recipe's file; relative directories are relative to its folder.
    """
    diagnostics: list[Diagnostic] = []
    model = _grown(recipe, _model(recipe.model.id, "model", source, diagnostics), diagnostics)
    at = _commit(recipe.model.revision, "model", model, source, diagnostics)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"revision": at})})
    recipe, teacher = _teacher(recipe, source, diagnostics)
    accelerator = _accelerator(recipe, diagnostics)
    serve_accelerator = _serve_accelerator(recipe, diagnostics)
    layers = _layers(recipe, model, diagnostics)
    recipe = _within_positions(_targets(recipe, model), model)
    recipe, automatic = _attention(recipe, model, accelerator)
    if model is not None and recipe.data.images is not None and model.tower is not None:
        model = replace(model, architecture=replace(model.architecture, vision=model.tower))
    facts = Facts(recipe, source, model, accelerator, serve_accelerator, layers, automatic, teacher)
    return facts, diagnostics


def _targets(recipe: Recipe, model: catalog.Model | None) -> Recipe:
    """Fill in every projection of the model as `lora.targets` where the recipe names none; with `lora.vision`
    also those of its tower."""
    if recipe.lora is None or model is None or "targets" in recipe.lora.model_fields_set:
        return recipe
    sites = model.family.lora_targets(model.architecture)
    if recipe.lora.vision and recipe.data.images is not None and model.tower is not None:
        sites = [*sites, *model.tower.targets()]
    names = list(dict.fromkeys(map(short_name, sites)))
    usual = [name for name in recipe.lora.targets if name in names]
    targets = [*usual, *(name for name in names if name not in usual)]
    return recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"targets": targets})})


def short_name(site: LoraTarget) -> str:
    """Return the end of a projection's name, by which a recipe names it: "q_proj", or "mlp.0" in a list."""
    *_, holder, name = site.projection.removesuffix(site.inner).split(".")
    return f"{holder}.{name}" if name.isdigit() else name


AUTO = "auto"
"""The value of a key that leaves it to the compiler."""

LENGTHS = (("data", "max_length"), ("serve", "max_model_len"))
"""Lengths of the language whose defaults are longer than some models' positions."""


def _within_positions(recipe: Recipe, model: catalog.Model | None) -> Recipe:
    """Shorten the lengths that the recipe leaves to their defaults to the model's positions."""
    most = None if model is None else model.positions()
    for name, key in LENGTHS:
        section = getattr(recipe, name)
        is_set = section is not None and key in section.model_fields_set
        if most is None or section is None or is_set or (name == "data" and recipe.train.grpo is not None):
            continue
        if getattr(section, key) > most:
            shorter = section.model_copy(update={key: most})
            shorter.model_fields_set.discard(key)
            recipe = recipe.model_copy(update={name: shorter})
    return recipe


def _attention(
    recipe: Recipe, model: catalog.Model | None, accelerator: Accelerator | None
) -> tuple[Recipe, dict[str, str]]:
    """Resolve `model.attention: auto`, and return the reason; without model or machine it stays."""
    if recipe.model.attention != AUTO or model is None or accelerator is None:
        return recipe, {}
    attention, reason = "splash", "the TPU's fused kernel"
    if accelerator.platform != "tpu":
        attention, reason = "dot", "splash is a TPU kernel"
    elif not model.family.flash_attention:
        attention, reason = "dot", "the model uses transformers' own attention"
    elif recipe.data.images is not None and model.tower is not None and model.tower.both_ways:
        attention, reason = "dot", "the mask follows the pictures, whose tokens see both ways"
    elif recipe.model.dtype != "bfloat16":
        attention, reason = "dot", "splash was compiled for TPUs in bfloat16 alone"
    section = recipe.model.model_copy(update={"attention": attention})
    if "attention" not in recipe.model.model_fields_set:
        section.model_fields_set.discard("attention")
    return recipe.model_copy(update={"model": section}), {"model.attention": reason}


def _model(model_id: str, section: str, source: Path, diagnostics: list[Diagnostic]) -> catalog.Model | None:
    """Return the model that a section names by its `id`."""
    try:
        return catalog.find(model_id, source.parent)
    except catalog.UnknownModel as error:
        diagnostics.append(Diagnostic(error.code, str(error), f"{section}.id", error.help))
    except UnsupportedCheckpoint as error:
        known = f"known are checkpoints of {listing(catalog.family_titles())}"
        diagnostics.append(
            Diagnostic(
                E0803,
                f"`{model_id}` cannot be trained by this version: {error}",
                f"{section}.id",
                known if error.key == "model_type" else "choose another checkpoint",
            )
        )
    return None


E0140 = Code(
    "E0140",
    "fewer rows than the checkpoint has",
    cause="`model.vocab_size` adds rows to the embedding and the head. It cannot remove rows.",
    cure="Use the number in the help, or write `vocab_size: null`.",
)

E0142 = Code(
    "E0142",
    "model to which no rows are added",
    cause="Rows are added to the embedding and to the head. A model with another embedding for each "
    "layer has no row there for a new token. A model that no family describes is trained with "
    "transformers' code.",
    cure="Write `model.add_tokens` with the reserved tokens of the checkpoint that the new ones replace.",
)


def _grown(
    recipe: Recipe, model: catalog.Model | None, diagnostics: list[Diagnostic]
) -> catalog.Model | None:
    """Return the model with the rows that the recipe adds to its embedding and its head."""
    rows = recipe.model.vocab_size
    if model is None or rows is None or rows == model.architecture.vocab_size:
        return model
    rows_of_checkpoint, place = model.architecture.vocab_size, "model.vocab_size"
    if rows < rows_of_checkpoint:
        message = f"{model.title} has {rows_of_checkpoint:,} rows, and rows cannot be removed"
        diagnostics.append(
            Diagnostic(
                E0140,
                message,
                place,
                f"vocab_size: {padded(rows_of_checkpoint + 1)}, which adds rows; or null",
            )
        )
        return model
    if not model.family.tunix or getattr(model.architecture, "per_layer_input", None):
        message = f"no rows are added to {model.title}, which has an embedding for each layer"
        if not model.family.tunix:
            message = f"no rows are added to {model.title}, which is trained with transformers' own model"
        help = "vocab_size: null, and tokens that the checkpoint holds in reserve in model.add_tokens"
        diagnostics.append(Diagnostic(E0142, message, place, help))
        return model
    architecture = replace(model.architecture, vocab_size=rows)
    config = with_vocabulary(model.config, rows)
    return replace(model, architecture=architecture, config=config, published=model)


E0815 = Code(
    "E0815",
    "revision differs from the added one",
    cause="model.revision is neither the revision with which the model was added next to the recipe "
    "nor its commit. The checkpoint that was checked would not be the one that is trained.",
    cure="Remove it, or add the model at that revision.",
)


def _teacher(
    recipe: Recipe, source: Path, diagnostics: list[Diagnostic]
) -> tuple[Recipe, catalog.Model | None]:
    """Return the teacher of the objective distill, and the recipe with its commit."""
    train, section = recipe.train, "train.distill.teacher"
    if train.objective != "distill" or train.distill is None:
        return recipe, None
    teacher = train.distill.teacher
    model = _model(teacher.id, section, source, diagnostics)
    revision = _commit(teacher.revision, section, model, source, diagnostics)
    distill = train.distill.model_copy(update={"teacher": teacher.model_copy(update={"revision": revision})})
    train = train.model_copy(update={"distill": distill})
    return recipe.model_copy(update={"train": train}), model


def _commit(
    revision: str | None,
    section: str,
    model: catalog.Model | None,
    source: Path,
    diagnostics: list[Diagnostic],
) -> str | None:
    """Return the commit that a model was added at: the run loads what was checked. Of other models, return
    the recipe's revision."""
    if model is None or model.added is None:
        return revision
    added = model.added
    if revision not in (None, added.revision, added.commit):
        diagnostics.append(
            Diagnostic(
                E0815,
                f"{section}.revision is {revision}, and {added.name} was added at "
                f"{f'{added.revision}, ' if added.revision else ''}commit {added.commit}",
                f"{section}.revision",
                f"remove it, or {add_command(model.id, source.parent, revision)} adds the other",
            )
        )
        return revision
    return added.commit


E0201 = Code(
    "E0201",
    "unknown accelerator",
    cause="The hardware catalog has no machine with that name or topology, or no slice of that size.",
    cure="Use a name or topology that the message lists. The number in v4-N, v5p-N and tpu7x-N counts "
    "TensorCores, two to a chip. In v5e-N and v6e-N it counts chips.",
)


def _accelerator(recipe: Recipe, diagnostics: list[Diagnostic]) -> Accelerator | None:
    mesh = recipe.mesh
    path = "mesh.topology" if mesh.topology else "mesh.accelerator"
    try:
        return hardware.accelerator(mesh)
    except hardware.UnknownAccelerator as error:
        diagnostics.append(Diagnostic(E0201, str(error), path, error.help))
        return None


E0601 = Code(
    "E0601",
    "unknown serving accelerator",
    cause="The hardware catalog has no machine with that name, or it is not a TPU.",
    cure="Use a name that the message lists.",
)


def _serve_accelerator(recipe: Recipe, diagnostics: list[Diagnostic]) -> Accelerator | None:
    if recipe.serve is None:
        return None
    name = recipe.serve.accelerator
    try:
        accelerator = hardware.from_text(name)
    except hardware.UnknownAccelerator as error:
        diagnostics.append(Diagnostic(E0601, str(error), "serve.accelerator", error.help))
        return None
    if accelerator.platform != "tpu":
        diagnostics.append(
            Diagnostic(
                E0601,
                f"vllm-tpu does not serve on `{name}`",
                "serve.accelerator",
                "accelerator: v6e-8, or leave the serve section out",
            )
        )
        return None
    return accelerator


def _outside(layers: str | Sequence[int], count: int) -> str:
    """Return the position of the first listed layer that a model with `count` layers does not have."""
    index = next((i for i, layer in enumerate(layers) if isinstance(layer, int) and layer >= count), None)
    return "lora.layers" if index is None else f"lora.layers[{index}]"


E0304 = Code(
    "E0304",
    "no such layer",
    cause="`lora.layers` names a layer that the model does not have.",
    cure="Use layers of the model. Layers count from 0.",
)


def _layers(
    recipe: Recipe, model: catalog.Model | None, diagnostics: list[Diagnostic]
) -> tuple[int, ...] | None:
    if recipe.lora is None or model is None:
        return None
    try:
        return parse_layers(recipe.lora.layers, model.architecture.num_layers)
    except ValueError as error:
        diagnostics.append(
            Diagnostic(
                E0304,
                f"lora.layers: {error}",
                _outside(recipe.lora.layers, model.architecture.num_layers),
                f"layers: all, a range such as 0-{model.architecture.num_layers - 1}, or a list of numbers",
            )
        )
        return None
