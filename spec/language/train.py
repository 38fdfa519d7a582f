"""The `train`, `checkpoint` and `merge` sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from recipec.spec.language.base import LARGEST, Problem, Section, field, section


def _b2_of_optimizer(given: dict[str, Any]) -> float:
    return 0.99 if given.get("name") == "lion" else 0.999


class Optimizer(Section):
    """The optimizer of optax, and its hyperparameters; one that has no use for a field ignores it."""

    name: Literal["adamw", "adafactor", "lion", "sgd"] = field(
        "The optimizer.",
        "adamw",
        choices={
            "adamw": "Adam with decoupled weight decay.",
            "adafactor": "Second moments factored by rows and columns: little memory.",
            "lion": "Sign of the running mean: one moment alone.",
            "sgd": "Plain gradient descent, with momentum where asked.",
        },
    )
    learning_rate: float = field(
        "The schedule's peak.", 1.0e-4, unit="none (a step size)", gt=0, allow_inf_nan=False
    )
    b1: float = field("Decay of the gradient's running mean.", 0.9, unit="none (a factor)", ge=0, lt=1)
    b2: float = field(
        "Decay of the squared gradient's running mean; lion: of the gradient's.",
        unit="none (a factor)",
        default_is="0.999, or 0.99 for lion",
        default_factory=_b2_of_optimizer,
        ge=0,
        lt=1,
        example=0.999,
    )
    eps: float = field("Added to the denominator.", 1.0e-8, unit="none", gt=0, allow_inf_nan=False)
    momentum: float = field(
        "sgd: decay of the gradient's running sum.", 0.0, unit="none (a factor)", ge=0, lt=1
    )
    master_weights: bool = field(
        "Full fine-tuning in bfloat16: keep a float32 copy of the weights, which small updates need.", True
    )
    weight_decay: float = field(
        "Share of each parameter that a step takes away, times the learning rate.",
        0.001,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
    )
    max_grad_norm: float | None = field(
        "Gradients are scaled down to this global norm; null does not clip.",
        None,
        unit="none (an L2 norm)",
        gt=0,
        allow_inf_nan=False,
        example=1.0,
    )


class Schedule(Section):
    """The learning rate over the run: a linear warm-up from zero, then a decay to one step after the last."""

    name: Literal["cosine", "linear", "constant"] = field(
        "Form of the decay.",
        "cosine",
        choices={
            "cosine": "Half a cosine from the peak down to final_ratio of it.",
            "linear": "A straight line from the peak down to final_ratio of it.",
            "constant": "The peak, to the end.",
        },
    )
    warmup_steps: int | None = field(
        "Length of the warm-up. Either this or warmup_ratio; neither means none.",
        None,
        unit="optimizer steps",
        ge=0,
        le=LARGEST,
        example=100,
    )
    warmup_ratio: float | None = field(
        "Length of the warm-up as a share of all steps, rounded up.",
        None,
        unit="share of the steps",
        ge=0,
        lt=1,
        example=0.03,
    )
    final_ratio: float = field(
        "Where the decay ends, one step after the last, as a share of the peak.",
        0.0,
        unit="share of the peak",
        ge=0,
        le=1,
    )

    @classmethod
    def crosscheck(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        if given.get("warmup_steps") is not None and given.get("warmup_ratio") is not None:
            yield Problem(
                "E0107",
                ("warmup_ratio",),
                "`warmup_steps` and `warmup_ratio` both set the warm-up",
                "remove one of the two, or write `warmup_steps: null` when it comes from an extended file",
                at_key=True,
            )


class Log(Section):
    """What is recorded while training."""

    every: int = field("A line of metrics is written every so many steps.", 10, unit="optimizer steps", ge=1)
    tensorboard: bool = field("Write TensorBoard event files too.", True)
    wandb_project: str | None = field(
        "Weights & Biases project to report to; null does not.", None, min_length=1, example="my-project"
    )
    mlflow_experiment: str | None = field(
        "MLflow experiment to report to, at the MLFLOW_TRACKING_URI of the run's environment; null does not.",
        None,
        min_length=1,
        example="my-experiment",
    )


class EarlyStopping(Section):
    """When a run ends before its last step, counted as transformers' EarlyStoppingCallback does."""

    patience: int = field(
        "Evaluations in a row without progress after which the run ends.", unit="evaluations", ge=1, example=3
    )
    min_delta: float = field(
        "Progress is an evaluation loss that is lower than the lowest before by more than this.",
        0.0,
        unit="nats a token",
        ge=0,
        allow_inf_nan=False,
    )


class Samples(Section):
    """Answers to fixed prompts, while the model is trained."""

    prompts: str = field(
        'A file as data.train has them, of lines with "messages", which the chat template writes, or with '
        '"prompt": messages, or a text that is tokenized as it stands.',
        min_length=1,
        example="data/prompts.jsonl",
    )
    max_tokens: int = field(
        "Length of an answer at most. Each token is a forward pass of the prompts.",
        64,
        unit="tokens",
        ge=1,
        le=LARGEST,
    )


def _loss_of_objective(given: dict[str, Any]) -> str:
    return "kto" if given.get("objective") == "kto" else "sigmoid"


def _epochs(given: dict[str, Any]) -> int | None:
    return 1 if given.get("steps") is None else None


class Train(Section):
    """The run: its length, batches, optimizer and schedule."""

    objective: Literal["sft", "dpo", "cpo", "orpo", "kto"] = field(
        "What is learnt: sft, to write the samples; dpo, cpo and orpo, to prefer the chosen answer to the "
        "rejected one (data.format: preference); kto, to prefer desirable answers to undesirable ones "
        "(data.format: unpaired_preference).",
        "sft",
        choices={
            "sft": "Supervised: to write the samples.",
            "dpo": "Direct preference optimisation, against the model that training starts from.",
            "cpo": "Contrastive preference optimisation, without a reference: with `loss_type: simpo` and "
            "`cpo_alpha: 0` it is SimPO.",
            "orpo": "Odds ratio preference optimisation, without a reference.",
            "kto": "Kahneman-Tversky optimisation, against the model that training starts from.",
        },
    )
    beta: float = field(
        "dpo and kto: how closely to stay to the model that training starts from; cpo: what "
        "log-probabilities are multiplied by; orpo: weight of the odds ratio.",
        0.1,
        unit="none (a factor)",
        gt=0,
        allow_inf_nan=False,
    )
    loss_type: Literal[
        "sigmoid",
        "sigmoid_norm",
        "robust",
        "hinge",
        "ipo",
        "apo_zero",
        "apo_down",
        "sppo_hard",
        "simpo",
        "kto",
        "apo_zero_unpaired",
    ] = field(
        "dpo, cpo and kto: the loss, by TRL's names. Of a pair cpo has sigmoid, hinge, ipo and simpo, and "
        "dpo all but simpo; of a single answer kto has kto and apo_zero_unpaired.",
        default_is="sigmoid, or kto for kto",
        default_factory=_loss_of_objective,
        example="sigmoid",
        choices={
            "sigmoid": "The logistic loss of how much more likely the chosen answer has become.",
            "sigmoid_norm": "The same of log-probabilities that are means over an answer's tokens.",
            "robust": "The logistic loss, corrected for label_smoothing's mistaken preferences.",
            "hinge": "Nothing once the chosen answer is ahead by 1 / beta.",
            "ipo": "The squared distance from being ahead by 1 / (2 beta), in means over an answer's tokens.",
            "apo_zero": "Makes the chosen answer likelier and the rejected one less likely.",
            "apo_down": "Makes both less likely, the rejected one more so.",
            "sppo_hard": "Squared distances: the chosen answer's from 1 / (2 beta), the rejected one's from "
            "its negative.",
            "simpo": "The logistic loss beyond a margin of simpo_gamma, in means over an answer's tokens.",
            "kto": "How far an answer is better than what the model gains on average, estimated from the "
            "micro-batch's prompts with one another's answers.",
            "apo_zero_unpaired": "The same without the estimate: desirable answers become likelier, others "
            "less likely.",
        },
    )
    label_smoothing: float = field(
        "sigmoid, robust and simpo: share of the preferences that are taken to be mistaken; sft: share of a "
        "target that is spread evenly over the vocabulary.",
        0.0,
        unit="probability",
        ge=0,
        lt=0.5,
    )
    z_loss: float = field(
        "sft: weight of the squared logsumexp of the logits, which keeps it near zero; 0 adds none.",
        0.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
        example=1.0e-4,
    )
    neftune_noise_alpha: float | None = field(
        "sft: NEFTune's noise on the embeddings while training, uniform within alpha / sqrt(tokens of a row "
        "* hidden size); null adds none.",
        None,
        unit="none (a factor)",
        gt=0,
        allow_inf_nan=False,
        example=5.0,
    )
    simpo_gamma: float = field(
        "simpo: how far the chosen answer's reward, beta times the mean of its log-probabilities, is to be "
        "ahead.",
        0.5,
        unit="none (a reward)",
        ge=0,
        allow_inf_nan=False,
    )
    cpo_alpha: float = field(
        "cpo: weight of the chosen answers' negative log-likelihood, the mean over a micro-batch's tokens; "
        "0 leaves it out.",
        1.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
    )
    desirable_weight: float = field(
        "kto: weight of the desirable answers' losses, against an unequal number of the two kinds.",
        1.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
    )
    undesirable_weight: float = field(
        "kto: weight of the undesirable answers' losses.",
        1.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
    )
    steps: int | None = field(
        "Length of the run; the data is gone through as often as that takes. Either this or epochs.",
        None,
        unit="optimizer steps",
        ge=1,
        example=1000,
    )
    epochs: int | None = field(
        "Length of the run as passes over the data. Either this or steps.",
        unit="epochs",
        default_is="1, or null when steps is given",
        default_factory=_epochs,
        ge=1,
        example=1,
    )
    global_batch_size: int = field(
        "Rows per optimizer step, over all devices; a row is one sample, or several when packing.",
        8,
        unit="rows",
        ge=1,
        le=10**6,
    )
    micro_batch_size: int = field(
        "Rows that one data-parallel device handles at once. Gradients are accumulated over "
        "global_batch_size / (micro_batch_size * fsdp) micro-batches.",
        1,
        unit="rows per device",
        ge=1,
        le=10**6,
    )
    loss_normalization: Literal["tokens", "micro_batches"] = field(
        "tokens: mean over all target tokens of the optimizer step; micro_batches: mean of each "
        "micro-batch's mean.",
        "tokens",
        choices={
            "tokens": "Every target token of the step weighs the same.",
            "micro_batches": "Every micro-batch weighs the same, however many targets it has.",
        },
    )
    router_aux_loss_coef: float = field(
        "Models with experts: weight of transformers' load-balancing loss of their routers, which training "
        "adds to the objective's; 0 adds none. A micro-batch's is of its real tokens and all layers "
        "together, and a step takes the mean over its micro-batches.",
        0.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
        example=0.001,
    )
    optimizer: Optimizer = section(
        "The optimizer and its hyperparameters.", Optimizer, {"name": "adamw", "learning_rate": 0.0001}
    )
    schedule: Schedule = section(
        "The learning rate over the run.", Schedule, {"name": "cosine", "warmup_ratio": 0.03}
    )
    eval_every: int = field(
        "Evaluate every so many steps, and at the end.", 100, unit="optimizer steps", ge=1
    )
    early_stopping: EarlyStopping | None = field(
        "Stop before the last step, where the evaluation loss makes no more progress; null does not.",
        None,
        example={"patience": 3},
    )
    samples: Samples | None = field(
        "Prompts that the model answers at each evaluation, greedily, into samples.jsonl beside the "
        "metrics; null for none.",
        None,
        example={"prompts": "data/prompts.jsonl"},
    )
    seed: int = field(
        "Seed of the adapters' initial values and of dropout.", 0, unit="none (a seed)", ge=0, le=2**32 - 1
    )
    log: Log = section("What is recorded while training.", Log, {"every": 10})

    @classmethod
    def crosscheck(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        if given.get("steps") is not None and given.get("epochs") is not None:
            yield Problem(
                "E0107",
                ("steps",),
                "`epochs` and `steps` both set the length of the run",
                "remove one of the two, or write `epochs: null` when it comes from an extended file",
                at_key=True,
            )
        if "epochs" in given and given["epochs"] is None and given.get("steps") is None:
            yield Problem("E0110", ("epochs",), "neither `epochs` nor `steps` is given", "epochs: 1")


class LocalCheckpoint(Section):
    """Checkpoints on each host's own disk: a run goes on from one that is newer than the shared ones."""

    directory: str = field(
        "A folder of each host: on an attached disk, or in its memory, which outlives the process alone.",
        "/dev/shm/recipec",
        pattern=r"^/",
        form="an absolute path",
        example="/mnt/disks/local",
    )
    every_steps: int = field("Save every so many steps.", 10, unit="optimizer steps", ge=1)


class Checkpoint(Section):
    """Where and how often the adapters and the optimizer's state are saved."""

    directory: str = field(
        "A folder below the artifact's output folder, or a gs:// address.",
        "checkpoints",
        min_length=1,
        example="gs://bucket/run",
    )
    every_steps: int = field("Save every so many steps, and at the end.", 100, unit="optimizer steps", ge=1)
    keep: int = field("Only the newest are kept.", 3, unit="checkpoints", ge=1)
    keep_best: bool = field(
        "Save at each evaluation whose loss is the lowest so far too, and keep the last of these beside the "
        "newest, for `merge.py --step best`.",
        False,
    )
    local: LocalCheckpoint | None = field(
        "Other checkpoints in between, on each host's own disk; null saves none.",
        None,
        example={"directory": "/mnt/disks/local", "every_steps": 10},
    )

    @classmethod
    def crosscheck(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        local, every = given.get("local"), given.get("every_steps", 100)
        own = local.get("every_steps", 10) if isinstance(local, Mapping) else None
        if isinstance(own, int) and isinstance(every, int) and own >= every:
            yield Problem(
                "E1316",
                ("local", "every_steps"),
                f"local checkpoints every {own} steps leave none between those of `directory` every {every}",
                f"every_steps: {every // 2}" if every > 1 else "remove `local`",
            )


class Cache(Section):
    """Tokenised data and compiled programs, each under a key of all that made it."""

    directory: str | None = field(
        "A folder below the artifact's output folder, or a gs:// address; null keeps nothing.",
        "cache",
        min_length=1,
    )


class Merge(Section):
    """How the adapters are written back into the checkpoint."""

    output: str = field(
        "A folder below the artifact's output folder, or an address that fsspec writes to.",
        "merged",
        min_length=1,
        example="gs://bucket/merged",
    )
    dtype: Literal["bfloat16", "float32"] = field(
        "Type of the merged weights.",
        "bfloat16",
        choices={"bfloat16": "16 bits a number; what vLLM serves in.", "float32": "32 bits a number."},
    )
    quantization: Literal["fp8", "int8"] | None = field(
        "Type of the linear weights of attention and MLP instead, with a scale for each output channel, as "
        "compressed-tensors; null keeps them in `dtype`.",
        None,
        example="fp8",
        choices={"fp8": "8 bits of floating point (e4m3).", "int8": "8-bit whole numbers."},
    )
    max_shard_size: str = field(
        "Largest size of one safetensors file, as a number with KB, MB or GB (powers of ten); `base` keeps "
        "the base's own split into files.",
        "5GB",
        unit="bytes",
        pattern=r"^(base|[1-9][0-9]{0,5}(\.[0-9]{1,6})?[KMG]B)$",
        form="a number of at most six digits directly followed by KB, MB or GB, or base",
    )
    adapter: bool = field("Write a PEFT adapter too.", True)
