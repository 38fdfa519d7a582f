"""The values of a recipe that a generated script hands to the runtime.

Generated scripts write these as constants, with the fields in this order. So they hold only plain values, and
importing them needs neither jax nor numpy. The fields of sections.py are the recipe language's own;
`LoraSettings` is in runtime.model.adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .model.partition_rules import data_parallel
from .sections import Checkpoint, Data, FakeQuantization, Source, Train

if TYPE_CHECKING:
    from .model.adapters import LoraSettings
    from .model.partition_rules import Placement, Rule


REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of every reward function besides the columns of the data."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The `model` section of a recipe, and the model's settings for training.

    Attributes:
        id: Hugging Face id, or a directory.
        revision: git revision of the Hugging Face repository, None for its default.
        tokenizer: Hugging Face id or directory of another tokenizer, None for the model's.
        add_tokens: special tokens to add to the tokenizer, each with the token it replaces, or None.
        vocab_size: rows of the embedding and the head, None for the checkpoint's number.
        family: name of one of runtime.model.families.FAMILIES.
        dtype: "bfloat16" or "float32", of the base weights and of the computation.
        quantization: "nf4", "int8" or "fp8", in which the frozen weights of linear layers and experts are
            stored; None for dtype.
        quantized_matmul: "forward" or "both": the passes that multiply the stored codes by activations in
            eight bits; None computes in dtype.
        attention: "dot" or "splash".
        attention_block: tokens of splash's largest block, None for attention.MOST.
        remat: what the backward pass recomputes: the name of one of runtime.model.remat.POLICIES.
        trainable_modules: the modules that training without LoRA changes, () for all.
        qat: how a training step rounds weights and activations, None for not at all.
        began: the mesh that the run began on, whose blocks of nf4 it keeps on any mesh; None for this mesh.
            The recipe does not have it: `runtime.training.session` reads it from the run's record.
    """

    id: str
    revision: str | None = None
    tokenizer: str | None = None
    add_tokens: tuple[tuple[str, str | None], ...] = ()
    vocab_size: int | None = None
    family: str
    dtype: str = "bfloat16"
    quantization: str | None = None
    quantized_matmul: str | None = None
    attention: str = "dot"
    attention_block: int | None = None
    remat: str = "decoder"
    trainable_modules: tuple[str, ...] = ()
    qat: FakeQuantization | None = None
    began: Placement | None = None

    @property
    def unquantized(self) -> ModelSettings:
        """Return these settings with all weights in `dtype`."""
        return replace(self, quantization=None, quantized_matmul=None, began=None)


@dataclass(frozen=True)
class MeshSettings:
    """The devices and their layout.

    Attributes:
        platform: "tpu", or "cpu" for virtual devices.
        devices: the required number, on all hosts together.
        axes: size of each mesh axis in order: rows are split over "dcn" and "fsdp", tokens over "cp", weights
            over "fsdp" and "cp", heads and features over "tp".
        hosts: number of machines; each runs one process of the script.
        flags: flags of libtpu, "--name=value".
    """

    platform: str
    devices: int
    axes: Mapping[str, int]
    hosts: int = 1
    flags: Sequence[str] = ()

    @property
    def data_parallel(self) -> int:
        """Return the number of devices among which the rows of a micro-batch are split."""
        return data_parallel(self.axes)


OF_A_SOURCE = tuple(key.name for key in fields(Source) if key.name in {key.name for key in fields(Data)})
"""Settings that a source may have of its own, instead of the section's."""


@dataclass(frozen=True)
class DataSettings(Data):
    """The `data` section of a recipe. Relative paths of sources are relative to --data-dir."""

    def of(self, source: str | Source) -> DataSettings:
        """Return the section as it applies to one of its sources."""
        if isinstance(source, str):
            return self
        values = {name: getattr(source, name) for name in OF_A_SOURCE}
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    @property
    def kinds(self) -> tuple[DataSettings, ...]:
        """Return the section as it applies to each of its sources; itself if it has no sources."""
        return tuple(self.of(source) for source in (*self.train, *self.eval)) or (self,)

    @property
    def formats(self) -> set[str]:
        """Return the formats of all its sources."""
        return {kind.format for kind in self.kinds}


@dataclass(frozen=True)
class TrainSettings(Train):
    """The `train` section of a recipe, without its optimizer, which the generated script builds."""

    def accumulation_steps(self, data_parallel: int) -> int:
        """Return the micro-batches of an optimizer step on `data_parallel` devices."""
        return self.global_batch_size // (self.micro_batch_size * data_parallel)


@dataclass(frozen=True)
class CheckpointSettings(Checkpoint):
    """The `checkpoint` section of a recipe. A relative directory is relative to --output."""


@dataclass(frozen=True)
class Reward:
    """A reward function of the recipe.

    Attributes:
        function: the function's name in `file`, or the name of a ready reward.
        file: a Python file; None for a ready reward.
        column: the column that a ready reward compares with, or None.
        options: of a ready reward.
        weight: the factor of its scores in a completion's reward.
    """

    function: str
    file: str | None = None
    column: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Return "file.py:function", or the name of a ready reward."""
        return f"{Path(self.file).name}:{self.function}" if self.file else self.function


@dataclass(frozen=True)
class RunSettings:
    """The part of a recipe that a training script states.

    Attributes:
        lora: None for full fine-tuning.
        rules: the recipe's sharding rules.
        teacher: the model that the objective distill learns from, None for others.
    """

    model: ModelSettings
    mesh: MeshSettings
    lora: LoraSettings | None
    data: DataSettings
    train: TrainSettings
    checkpoint: CheckpointSettings
    rules: tuple[Rule, ...] = ()
    teacher: ModelSettings | None = None
