"""The values of a recipe that a generated script hands to the runtime.

Generated scripts write these as constants, with the fields in this order. So they hold only plain values, and
importing them needs neither jax nor numpy. A default is the recipe language's own, if it has one.
`LoraSettings` is in runtime.model.adapters, and options.py has values that few recipes set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .model.partition_rules import data_parallel

if TYPE_CHECKING:
    from .model.adapters import LoraSettings
    from .model.partition_rules import Rule
    from .options import EarlyStopping, FakeQuantization, LocalCheckpointSettings, SampleSettings


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
        attention: "dot" or "splash".
        attention_block: tokens of splash's largest block, None for attention.MOST.
        remat: what the backward pass recomputes: the name of one of runtime.model.remat.POLICIES.
        only: the modules that training without LoRA changes, () for all.
        qat: how a training step rounds weights and activations, None for not at all.
    """

    id: str
    revision: str | None = None
    tokenizer: str | None = None
    add_tokens: tuple[tuple[str, str | None], ...] = ()
    vocab_size: int | None = None
    family: str
    dtype: str = "bfloat16"
    attention: str = "dot"
    attention_block: int | None = None
    remat: str = "decoder"
    only: tuple[str, ...] = ()
    qat: FakeQuantization | None = None


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


@dataclass(frozen=True)
class Source:
    """One source of samples.

    Attributes:
        path: a file or folder, relative to --data-dir; gs:// or another address that fsspec opens;
            hf://OWNER/NAME for a data set of the Hugging Face hub.
        weight: how often its samples are drawn, relative to the other sources.
        split: split of a Hugging Face data set, such as "train[:10%]"; None takes "train".
        config: configuration (subset) of a Hugging Face data set, None for its default.
        limit: takes only this many first rows, None for all.
        format, fields, transform, chat_template, loss_on, overlong: as in `DataSettings`, whose own hold if
            these are None.
    """

    path: str
    weight: float = 1.0
    split: str | None = None
    config: str | None = None
    limit: int | None = None
    format: str | None = None
    fields: Mapping[str, str] | None = None
    transform: str | None = None
    chat_template: str | None = None
    loss_on: str | Sequence[str] | None = None
    overlong: str | None = None


OF_A_SOURCE = ("format", "fields", "transform", "chat_template", "loss_on", "overlong")
"""Settings that a source may have of its own, instead of the section's."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The `data` section of a recipe.

    Attributes:
        train, eval: sources of the samples; a plain string means `Source(path)`.
        eval_fraction: share of the rows of `train` that is held out for evaluation instead of `eval`.
        eval_seed: seed for the choice of these rows.
        format: "chat", "instruction", "prompt_completion", "text", "preference" or "unpaired_preference".
        fields: name that the project uses -> name in the files.
        transform: "FILE.py:FUNCTION", a row -> row or None, relative to the artifact's folder.
        chat_template: a Jinja template's path or its text, None for the tokenizer's.
        loss_on: "assistant", "last_assistant", "completion" or "all"; or roles of messages.
        reasoning: "keep", "drop" or "empty" the assistant's reasoning; None leaves it to the template.
        special_tokens: whether control tokens in the data are "control" tokens, or ordinary "text".
        max_length: tokens of a row; rows are padded to it.
        overlong: "drop", "truncate", "error" or, for text, "split".
        max_invalid_ratio: share of unusable rows above which there is an error.
        packing: whether several samples share a row.
        shuffle_seed: seed of the samples' order, which differs between epochs; None keeps the files' order.
        temperature: T: an epoch draws from each source in proportion to its size ** (1 / T); None
            draws by the sources' weights.
        curriculum: "length" for the shortest rows first in each epoch; None for the seed's order.
        stream_window: rows of `train` that are read and shuffled at once; None reads all rows first.
    """

    train: tuple[str | Source, ...]
    eval: tuple[str | Source, ...] = ()
    eval_fraction: float | None = None
    eval_seed: int = 42
    format: str = "chat"
    fields: Mapping[str, str] = field(default_factory=dict)
    transform: str | None = None
    chat_template: str | None = None
    loss_on: str | Sequence[str] = "assistant"
    reasoning: str | None = None
    special_tokens: str = "control"
    max_length: int
    overlong: str = "drop"
    max_invalid_ratio: float = 0.1
    packing: bool
    shuffle_seed: int | None = 0
    temperature: float | None = None
    curriculum: str | None = None
    stream_window: int | None = None

    def of(self, source: str | Source) -> DataSettings:
        """Return the section as it applies to one of its sources."""
        if isinstance(source, str):
            return self
        own = {name: getattr(source, name) for name in OF_A_SOURCE}
        return replace(self, **{name: value for name, value in own.items() if value is not None})

    @property
    def kinds(self) -> tuple[DataSettings, ...]:
        """Return the section as it applies to each of its sources; itself if it has no sources."""
        return tuple(self.of(source) for source in (*self.train, *self.eval)) or (self,)

    @property
    def formats(self) -> set[str]:
        """Return the formats of all its sources."""
        return {own.format for own in self.kinds}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The `train` section of a recipe, without its optimizer, which the generated script builds.

    Attributes:
        objective: a key of `runtime.training.objectives.OBJECTIVES`.
        beta: beta of DPO's, CPO's and KTO's losses, or the weight of ORPO's odds ratio.
        loss_type: a key of the objective's `losses`; for sft without one, the negative log-likelihood.
        label_smoothing: the assumed share of wrong preferences; for sft the share of a target
            that is spread over the vocabulary.
        z_loss: sft: weight of the squared logsumexp of the logits.
        eaft_alpha, eaft_top_k, eaft_entropy: EAFT's exponent, number of tokens and entropy of weight 1.
        asft_alpha: ASFT's weight of the KL divergence.
        neftune_noise_alpha: sft: alpha of the noise on the embeddings, or None.
        simpo_gamma: SimPO's margin.
        cpo_alpha: weight of the chosen texts' likelihood in CPO.
        desirable_weight, undesirable_weight: KTO's weights of the two kinds of answers.
        epochs: passes over the data; None when `steps` is given.
        steps: optimizer steps; None when `epochs` is given.
        continue_from: the step after which the schedule begins, in a continued run; None for its beginning.
        global_batch_size: rows of an optimizer step.
        micro_batch_size: rows of one device's forward pass.
        loss_normalization: "tokens" (of the whole step) or "micro_batches" (a mean of means).
        router_aux_loss_coef: factor of the load-balancing loss of experts; 0 for none.
        eval_every: optimizer steps between evaluations.
        early_stopping: None runs to the last step.
        samples: prompts that are answered at each evaluation, None for none.
        seed: seed of the adapters' initialization and of dropout.
        log_every: optimizer steps between printed lines.
        tensorboard: whether metrics go to TensorBoard files as well.
        wandb_project: project of Weights & Biases that also gets the metrics, or None.
        mlflow_experiment: experiment of MLflow that also gets the metrics, or None.
    """

    objective: str = "sft"
    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    eaft_alpha: float = 1.0
    eaft_top_k: int = 20
    eaft_entropy: float = 3.0
    asft_alpha: float = 0.1
    neftune_noise_alpha: float | None = None
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    epochs: int | None = None
    steps: int | None = None
    continue_from: int | None = None
    global_batch_size: int
    micro_batch_size: int
    loss_normalization: str = "tokens"
    router_aux_loss_coef: float = 0.0
    eval_every: int = 100
    early_stopping: EarlyStopping | None = None
    samples: SampleSettings | None = None
    seed: int = 0
    log_every: int = 10
    tensorboard: bool = True
    wandb_project: str | None = None
    mlflow_experiment: str | None = None

    def accumulation_steps(self, data_parallel: int) -> int:
        """Return the micro-batches of an optimizer step on `data_parallel` devices."""
        return self.global_batch_size // (self.micro_batch_size * data_parallel)


@dataclass(frozen=True)
class CheckpointSettings:
    """The `checkpoint` section of a recipe.

    Attributes:
        directory: gs:// address, or a directory; a relative one is relative to --output.
        every_steps: optimizer steps between checkpoints.
        keep: number of newest checkpoints to keep.
        keep_best: whether to keep the one with the lowest evaluation loss as well.
        local: further checkpoints in between on each host's own disk, or None.
    """

    directory: str
    every_steps: int = 100
    keep: int = 3
    keep_best: bool = False
    local: LocalCheckpointSettings | None = None


@dataclass(frozen=True)
class RunSettings:
    """The part of a recipe that a training script states.

    Attributes:
        lora: None for full fine-tuning.
        rules: the recipe's sharding rules.
    """

    model: ModelSettings
    mesh: MeshSettings
    lora: LoraSettings | None
    data: DataSettings
    train: TrainSettings
    checkpoint: CheckpointSettings
    rules: tuple[Rule, ...] = ()
