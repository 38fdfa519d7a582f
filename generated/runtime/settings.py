"""The values of a recipe that a generated script hands to the runtime.

Generated scripts state these as constants, so they hold plain values alone and importing them needs
neither jax nor numpy. `LoraSettings` is in runtime.adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelSettings:
    """The `model` section of a recipe, and what training does with the model.

    Attributes:
        id: Hugging Face id, or a directory.
        family: name of one of runtime.families.FAMILIES.
        dtype: "bfloat16" or "float32", of the base weights and of the computation.
        attention: "dot" or "splash".
        remat: what is recomputed in the backward pass: "none", "block" (attention) or "decoder"
            (whole layers).
        revision: git revision of the Hugging Face repository, None for its default.
        tokenizer: Hugging Face id or directory of another tokenizer, None for the model's.
    """

    id: str
    family: str
    dtype: str = "bfloat16"
    attention: str = "dot"
    remat: str = "decoder"
    revision: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class MeshSettings:
    """The devices, and how they are laid out.

    Attributes:
        platform: "tpu", or "cpu" for virtual devices.
        devices: how many there must be.
        axes: size of each mesh axis in order; data is split over "fsdp", heads and features over "tp".
    """

    platform: str
    devices: int
    axes: Mapping[str, int]

    @property
    def data_parallel(self) -> int:
        """Devices among which the rows of a micro-batch are split."""
        return self.axes.get("fsdp", 1)


@dataclass(frozen=True)
class DataSettings:
    """The `data` section of a recipe.

    Attributes:
        train, eval: JSON-lines files; relative ones are relative to --data-dir.
        fields: name that the project uses -> name in the files.
        chat_template: a Jinja template's path or its text, None for the tokenizer's.
        loss_on: "assistant", "last_assistant" or "all".
        max_length: tokens of a row; rows are padded to it.
        overlong: "drop", "truncate" or "error".
        packing: whether several samples share a row.
        shuffle_seed: of the samples' order, which differs from epoch to epoch; None keeps the files' order.
    """

    train: tuple[str, ...]
    max_length: int
    eval: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    loss_on: str = "assistant"
    overlong: str = "drop"
    packing: bool = False
    shuffle_seed: int | None = 0


@dataclass(frozen=True)
class TrainSettings:
    """The `train` section of a recipe, without its optimizer, which the generated script builds.

    Attributes:
        epochs: passes over the data; None when `steps` is given.
        steps: optimizer steps; None when `epochs` is given.
        global_batch_size: rows of an optimizer step.
        micro_batch_size: rows of one device's forward pass.
        loss_normalization: "tokens" (of the whole step) or "micro_batches" (a mean of means).
        eval_every: optimizer steps between evaluations.
        seed: of the adapters' initialisation and of dropout.
        log_every: optimizer steps between printed lines.
        tensorboard: whether metrics go to TensorBoard files as well.
    """

    epochs: int | None
    steps: int | None
    global_batch_size: int
    micro_batch_size: int
    loss_normalization: str = "tokens"
    eval_every: int = 100
    seed: int = 0
    log_every: int = 10
    tensorboard: bool = True

    def accumulation_steps(self, data_parallel: int) -> int:
        """Micro-batches of an optimizer step on `data_parallel` devices."""
        return self.global_batch_size // (self.micro_batch_size * data_parallel)


@dataclass(frozen=True)
class CheckpointSettings:
    """The `checkpoint` section of a recipe.

    Attributes:
        directory: gs:// address, or a directory; a relative one is relative to --output.
        every_steps: optimizer steps between checkpoints.
        keep: newest checkpoints that are kept.
    """

    directory: str
    every_steps: int = 100
    keep: int = 3
