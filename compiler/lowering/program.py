"""The program: a recipe whose meaning is resolved. It is the only input of the emitters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.lowering.hardware import Accelerator
from recipec.runtime.model.adapters import TOKEN_ROWS, Adapter, LoraSettings
from recipec.runtime.model.families import Architecture, Family
from recipec.runtime.model.families.family import Parameter, Spec
from recipec.runtime.model.families.vision import PATH
from recipec.runtime.model.reach import Reach, reach
from recipec.runtime.model.selection import trained_whole
from recipec.runtime.training.objectives import Generated, generated

if TYPE_CHECKING:
    from recipec.compiler.catalog import Model
    from recipec.spec.diagnostics import Diagnostic
    from recipec.spec.language import Recipe


@dataclass(frozen=True)
class Program:
    """The meaning of a recipe, after every check has passed.

    Attributes:
        recipe: the resolved recipe: `extends`, `--set` and defaults applied.
        source: the recipe's file.
        family, architecture: of the model.
        config: its config.json, as `catalog.Model` has it.
        model_origin: "catalog", or the config.json that was read.
        accelerator: the hardware that it trains on.
        serve_accelerator: the hardware that serves it, None without a `serve` section.
        data_parallel: devices that see different samples: the product of the axes fsdp, dcn and ep.
        accumulation_steps: micro-batches of one optimizer step.
        parameters: every array of the model with its final sharding.
        lora, adapters: None and () for full fine-tuning.
        rules: the recipe's sharding rules, first match wins.
        text: recipe.yaml of the artifact: the recipe as it was written.
        notes: warnings and notes of those checks that depend only on the recipe, not on files next to it.
        notebook: whether its artifact has a notebook.
        automatic: the keys that the recipe leaves to the compiler (`auto`), with the reasons for their
            values.
        teacher: the model that the objective distill learns from, None with others.
        multimodal: keys that `config` lacks, and that describe the vision tower of a recipe with pictures.
    """

    recipe: Recipe
    source: Path
    family: Family
    architecture: Architecture
    config: Mapping[str, Any]
    model_origin: str
    accelerator: Accelerator
    serve_accelerator: Accelerator | None
    data_parallel: int
    accumulation_steps: int
    parameters: tuple[Parameter, ...]
    lora: LoraSettings | None
    adapters: tuple[Adapter, ...]
    rules: tuple[tuple[str, Spec], ...]
    text: str
    notes: tuple[Diagnostic, ...] = ()
    notebook: bool = False
    automatic: Mapping[str, str] = field(default_factory=dict)
    teacher: Model | None = None
    multimodal: Mapping[str, Any] = field(default_factory=dict)

    def serving(self, **changes: object) -> Program:
        """Return the program with other settings of the server."""
        serve = self.recipe.server
        changed = self.recipe.model_copy(update={"serve": serve.model_copy(update=changes)})
        return replace(self, recipe=changed)

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def generated(self) -> Generated | None:
        """The completions that a run of it generates: grpo's, or a student's own answers; or None."""
        return generated(self.recipe.train, self.recipe.data.max_length)

    @property
    def micro_batch_rows(self) -> int:
        """Rows of one micro-batch over all devices."""
        return self.recipe.train.micro_batch_size * self.data_parallel

    @property
    def base_parameters(self) -> int:
        """The number of values in the model that the checkpoint provides."""
        return sum(math.prod(p.shape) for p in self.parameters if p.sources)

    @property
    def whole(self) -> tuple[Parameter, ...]:
        """The parameters that are trained in addition to adapters: whole ones, and rows of the embedding."""
        return trained_whole(self.parameters, self.lora)

    @property
    def token_rows(self) -> tuple[Parameter, ...]:
        """The trained rows of the embedding, as an array of their own; () for none."""
        return tuple(parameter for parameter in self.whole if parameter.path == TOKEN_ROWS)

    @property
    def trainable_parameters(self) -> int:
        """The number of values that the optimizer changes: all, those of train.trainable_modules, or those of
        adapters and `whole` (as in PEFT)."""
        if self.lora is None:
            return sum(math.prod(p.shape) for p in self.parameters if p.sources and not p.frozen)
        whole = sum(math.prod(parameter.shape) for parameter in self.whole)
        return whole + sum(map(trained_size, self.adapters))

    @property
    def used_adapter_parameters(self) -> float:
        """The number of values of A and B that one token uses; of experts, only those of the chosen ones."""
        experts, used = self.architecture.routing
        return sum(
            trained_size(adapter) * (used / experts if adapter.target.experts else 1)
            for adapter in self.adapters
            if not adapter.target.of_tower
        )

    @property
    def tower_adapters(self) -> tuple[Adapter, ...]:
        """The adapters of the vision tower and its projector, () if they are frozen."""
        return tuple(adapter for adapter in self.adapters if adapter.target.of_tower)

    @property
    def trains_projector(self) -> bool:
        """Whether anything of the vision tower or its projector is trained."""
        return bool(self.tower_adapters) or any(p.path.startswith(f"{PATH}.") for p in self.whole)

    @property
    def trains_tower(self) -> bool:
        """Whether layers of the vision tower have adapters, so that a backward pass goes through them."""
        start = f"{PATH}.layers."
        return any(adapter.target.weight.startswith(start) for adapter in self.tower_adapters)

    @property
    def usd_per_hour(self) -> float | None:
        """US$ per hour of the whole training machine: the recipe's price, else the catalog's; None without
        either."""
        price = self.recipe.cost.train_usd_per_hour
        return self.accelerator.usd_per_hour if price is None else price

    @property
    def reach(self) -> Reach:
        """The share of the parameters that the adapters reach."""
        return reach(self.parameters, self.adapters)


def trained_size(adapter: Adapter) -> int:
    """Count the trained numbers of an adapter, without an A that it shares with another."""
    arrays = adapter.arrays if adapter.lender is None else adapter.arrays[1:]
    return sum(math.prod(shape) for _, shape, _ in arrays)
