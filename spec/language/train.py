"""The `train`, `checkpoint` and `merge` sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from recipec.spec.codes import Code
from recipec.spec.language.distill import Distill
from recipec.spec.language.reinforcement import Grpo
from recipec.spec.language.section import E0107, E0110, LARGEST, Problem, Section, distinct, field, section


def _b2_of_optimizer(values: dict[str, Any]) -> float:
    return 0.99 if values.get("name") in ("lion", "rmsprop") else 0.999


def _momentum_of_optimizer(values: dict[str, Any]) -> float:
    return 0.95 if values.get("name") == "muon" else 0.0


RATES = {
    ("lora", "sft"): 1.0e-4,
    ("full", "sft"): 1.0e-5,
    ("lora", "other"): 5.0e-6,
    ("full", "other"): 1.0e-6,
}
"""Default peak learning rates: of adapters or of all weights, for sft and distill, or for the objectives that
compare answers."""


def default_rate(full: bool, objective: str) -> float:
    """Return the default of `train.optimizer.learning_rate`.

    Args:
        full: whether all weights are trained, without adapters.
    """
    return RATES["full" if full else "lora", "sft" if objective in ("sft", "distill") else "other"]


class Optimizer(Section):
    """The optax optimizer and its hyperparameters. An optimizer ignores hyperparameters that it does not
    have."""

    name: Literal["adamw", "adafactor", "lion", "rmsprop", "sgd", "muon"] = field(
        "The optimizer.",
        "adamw",
        choices={
            "adamw": "Adam with decoupled weight decay.",
            "adafactor": "Second moments factored by rows and columns, which needs little memory.",
            "lion": "Sign of the running mean, with a single moment.",
            "rmsprop": "Gradients divided by the root of the squared gradient's running mean, as in PyTorch.",
            "sgd": "Plain gradient descent, optionally with momentum.",
            "muon": "For full fine-tuning: each matrix's momentum, made orthogonal by five Newton-Schulz "
            "steps in bfloat16, times 0.2 x the root of its longer side. Embeddings, the head and vectors "
            "have Adam.",
        },
    )
    learning_rate: float = field(
        "Peak learning rate of the schedule.",
        unit="none (a step size)",
        default_is="by method: for sft and distill 1e-4 with LoRA and 1e-5 for all weights; for other "
        "objectives 5e-6 with LoRA and 1e-6 for all weights",
        default_factory=lambda: RATES["lora", "sft"],  # Recipe replaces it, because it knows the method
        gt=0,
        allow_inf_nan=False,
        example=1.0e-4,
    )
    b1: float = field("Decay of the gradient's running mean.", 0.9, unit="none (a factor)", ge=0, lt=1)
    b2: float = field(
        "Decay of the squared gradient's running mean; for lion, of the gradient's running mean.",
        unit="none (a factor)",
        default_is="0.999, or 0.99 for lion and rmsprop",
        default_factory=_b2_of_optimizer,
        ge=0,
        lt=1,
        example=0.999,
    )
    eps: float = field("Added to the denominator.", 1.0e-8, unit="none", gt=0, allow_inf_nan=False)
    momentum: float = field(
        "For sgd, rmsprop and muon: decay of the running sum of the gradients that a step takes; for muon in "
        "Nesterov's form.",
        unit="none (a factor)",
        default_is="0, or 0.95 for muon",
        default_factory=_momentum_of_optimizer,
        ge=0,
        lt=1,
        example=0.9,
    )
    master_weights: bool = field(
        "For full fine-tuning in bfloat16: keep a float32 copy of the weights, so that small updates count.",
        True,
    )
    weight_decay: float = field(
        "Share of each parameter that a step subtracts, multiplied by the learning rate.",
        0.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
    )
    max_grad_norm: float | None = field(
        "Largest global norm of the gradients; larger ones are scaled down. null does not clip.",
        1.0,
        unit="none (an L2 norm)",
        gt=0,
        allow_inf_nan=False,
    )


WARMUP_RATIO = 0.03
"""The default warm-up of a schedule that decays, as a share of the steps."""


def _warmup_of_schedule(values: dict[str, Any]) -> float | None:
    has_steps = values.get("warmup_steps") is not None
    return None if has_steps or values.get("name") == "constant" else WARMUP_RATIO


class Schedule(Section):
    """The learning rate over the run: a linear warm-up from zero, then a decay that ends one step after the
    last."""

    name: Literal["cosine", "linear", "constant"] = field(
        "Shape of the decay.",
        "cosine",
        choices={
            "cosine": "Half a cosine from the peak down to min_lr_ratio of it.",
            "linear": "A straight line from the peak down to min_lr_ratio of it.",
            "constant": "The peak until the end.",
        },
    )
    warmup_steps: int | None = field(
        "Length of the warm-up; 0 has none. Give either this or warmup_ratio.",
        None,
        unit="optimizer steps",
        ge=0,
        le=LARGEST,
        example=100,
    )
    warmup_ratio: float | None = field(
        "Length of the warm-up as a share of all steps, rounded up; 0 has none.",
        unit="share of the steps",
        default_is="0.03, or null with warmup_steps and for constant",
        default_factory=_warmup_of_schedule,
        ge=0,
        lt=1,
        example=0.03,
    )
    min_lr_ratio: float = field(
        "Learning rate at the end of the decay, one step after the last, as a share of the peak.",
        0.0,
        unit="share of the peak",
        ge=0,
        le=1,
    )

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        if values.get("warmup_steps") is not None and values.get("warmup_ratio") is not None:
            yield Problem(
                E0107,
                ("warmup_ratio",),
                "`warmup_steps` and `warmup_ratio` both set the warm-up",
                "remove one of the two, or write `warmup_steps: null` when it comes from an extended file",
                at_key=True,
            )


class Log(Section):
    """What is recorded during training."""

    every: int = field("Number of steps between two lines of metrics.", 10, unit="optimizer steps", ge=1)
    tensorboard: bool = field("Also write TensorBoard event files.", True)
    wandb_project: str | None = field(
        "Weights & Biases project to report to; null does not report.",
        None,
        min_length=1,
        example="my-project",
    )
    mlflow_experiment: str | None = field(
        "MLflow experiment to report to, at MLFLOW_TRACKING_URI of the environment; null does not report.",
        None,
        min_length=1,
        example="my-experiment",
    )


class EarlyStopping(Section):
    """When a run ends before its last step, by the rule of transformers' EarlyStoppingCallback."""

    patience: int = field(
        "Number of consecutive evaluations without progress after which the run ends.",
        unit="evaluations",
        ge=1,
        example=3,
    )
    min_delta: float = field(
        "An evaluation counts as progress if its loss is below the lowest so far by more than this. With "
        "grpo its reward must be that far above the highest.",
        0.0,
        unit="nats a token",
        ge=0,
        allow_inf_nan=False,
    )


class Generations(Section):
    """Answers to fixed prompts during training."""

    prompts: str = field(
        'A file of a kind that data.train reads. Each line has "messages", for the chat template, or a '
        '"prompt" with messages, or with a text that is tokenized without changes.',
        min_length=1,
        example="data/prompts.jsonl",
    )
    max_tokens: int = field(
        "Largest length of an answer. Each token of the longest answer takes one pass through the model.",
        64,
        unit="tokens",
        ge=1,
        le=LARGEST,
    )


class FakeQuantization(Section):
    """Quantization-aware training: products of a training step use rounded weights and activations."""

    weights: Literal["int4", "int4_asymmetric", "mxfp4"] = field(
        "How the weights are rounded, in groups of group_size inputs of one output. int4 is torchao's "
        "Int8DynActInt4Weight; int4_asymmetric is torchao's int4 for bfloat16 kernels, and Axolotl's.",
        "int4",
        choices={
            "int4": "Symmetric: from -8 to 7 times a group's largest magnitude / 7.5.",
            "int4_asymmetric": "16 values from a group's smallest to its largest weight.",
            "mxfp4": "4 bits of floating point times a power of two for 32 inputs; for activations too.",
        },
    )
    activations: Literal["int8", "mxfp4"] | None = field(
        "How the inputs of the products are rounded, token by token; null leaves them as they are.",
        "int8",
        example="int8",
        choices={
            "int8": "Asymmetric: 256 values from a token's smallest to its largest number.",
            "mxfp4": "As the weights, in blocks of 32 inputs.",
        },
    )
    group_size: int = field(
        "Number of neighboring inputs whose weights share a scale. It must divide the inputs of every "
        "projection that is rounded.",
        32,
        unit="inputs",
        ge=2,
        le=LARGEST,
    )
    head: bool = field(
        "Without lora: also round the output head, whether it has weights of its own or the embedding's.",
        False,
    )
    start_step: int = field(
        "Number of steps at the beginning of the run that do not round.",
        0,
        unit="optimizer steps",
        ge=0,
        le=LARGEST,
    )


def _loss_of_objective(values: dict[str, Any]) -> str:
    return {"sft": "nll", "kto": "kto"}.get(str(values.get("objective")), "sigmoid")


def _epochs(values: dict[str, Any]) -> int | None:
    return 1 if values.get("steps") is None else None


def _grpo_of_objective(values: dict[str, Any]) -> Grpo | None:
    return Grpo() if values.get("objective") == "grpo" else None


class Train(Section):
    """The run: its length, batches, optimizer and schedule."""

    objective: Literal["sft", "dpo", "cpo", "orpo", "kto", "grpo", "distill"] = field(
        "What the model learns. dpo, cpo and orpo need data.format: preference, kto unpaired_preference, "
        "grpo prompt.",
        "sft",
        choices={
            "sft": "Supervised: to write the samples.",
            "dpo": "Direct preference optimization, with the model before training as the reference.",
            "cpo": "Contrastive preference optimization, without a reference. With `loss_type: simpo` and "
            "`cpo_alpha: 0` it is SimPO.",
            "orpo": "Odds ratio preference optimization, without a reference.",
            "kto": "Kahneman-Tversky optimization, with the model before training as the reference.",
            "grpo": "Group relative policy optimization: reinforcement learning with `rewards` of the "
            "model's own answers.",
            "distill": "Knowledge distillation: the next-token probabilities of the teacher that `distill` "
            "names, at each token that carries loss.",
        },
    )
    distill: Distill | None = field(
        "distill: the teacher, and the divergence from it. null has none.",
        None,
        example={"teacher": {"id": "Qwen/Qwen3-14B"}, "beta": 0.5},
    )
    grpo: Grpo | None = field(
        "grpo: groups of completions, their lengths and sampling, and the loss.",
        default_is="the default of each key with objective grpo, or null",
        default_factory=_grpo_of_objective,
        example={"num_generations": 8, "max_completion_length": 512},
    )
    beta: float = field(
        "dpo and kto: how close the model stays to the model before training; cpo: factor of the "
        "log-probabilities; orpo: weight of the odds ratio.",
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
        "nll",
        "dft",
        "eaft",
        "asft",
    ] = field(
        "The loss, by TRL's and LLaMA-Factory's names. sft has nll, dft, eaft and asft; cpo has sigmoid, "
        "hinge, ipo and simpo; kto has kto and apo_zero_unpaired; dpo has all others except simpo.",
        default_is="sigmoid, nll for sft, or kto for kto",
        default_factory=_loss_of_objective,
        example="sigmoid",
        choices={
            "sigmoid": "The logistic loss of how much more likely the chosen answer has become.",
            "sigmoid_norm": "The same, with log-probabilities averaged over the tokens of an answer.",
            "robust": "The logistic loss, corrected for the share of wrong preferences in label_smoothing.",
            "hinge": "The hinge loss, zero once the chosen answer leads by 1 / beta.",
            "ipo": "The squared distance from a lead of 1 / (2 beta), averaged over an answer's tokens.",
            "apo_zero": "Makes the chosen answer more likely and the rejected one less likely.",
            "apo_down": "Makes both less likely, and the rejected one more so.",
            "sppo_hard": "Squared distances: of the chosen answer from 1 / (2 beta), of the rejected one "
            "from -1 / (2 beta).",
            "simpo": "The logistic loss with a margin of simpo_gamma, averaged over an answer's tokens.",
            "kto": "How much better an answer is than the model's average gain, estimated from the prompts "
            "of the micro-batch with one another's answers.",
            "apo_zero_unpaired": "The same without the estimate: desirable answers become more likely, the "
            "others less likely.",
            "nll": "The negative log-likelihood of each target: cross-entropy.",
            "dft": "Dynamic fine-tuning: each target's cross-entropy times the target's probability.",
            "eaft": "Entropy-adaptive fine-tuning: each target's cross-entropy times how uncertain the model "
            "is, (entropy of its eaft_top_k likeliest tokens / eaft_entropy) ** eaft_alpha.",
            "asft": "Anchored fine-tuning: dft, plus asft_alpha times the KL divergence of the model before "
            "training from the model.",
        },
    )
    label_smoothing: float = field(
        "sigmoid, robust and simpo: assumed share of wrong preferences; nll: share of a target's probability "
        "that is spread evenly over the vocabulary.",
        0.0,
        unit="probability",
        ge=0,
        lt=0.5,
    )
    z_loss: float = field(
        "nll: weight of the squared logsumexp of the logits, a penalty that keeps it near zero; 0 adds none.",
        0.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
        example=1.0e-4,
    )
    eaft_alpha: float = field(
        "eaft: exponent of the entropy; 0 weights all targets equally.",
        1.0,
        unit="none (an exponent)",
        ge=0,
        allow_inf_nan=False,
    )
    eaft_top_k: int = field(
        "eaft: number of the likeliest tokens whose entropy counts, as if there were no others.",
        20,
        unit="tokens",
        ge=2,
        le=LARGEST,
    )
    eaft_entropy: float = field(
        "eaft: entropy at which a target has weight 1. LLaMA-Factory has 3, about the logarithm of 20; "
        "Axolotl has 1.",
        3.0,
        unit="nats",
        gt=0,
        allow_inf_nan=False,
    )
    asft_alpha: float = field(
        "asft: weight of the KL divergence.",
        0.1,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
    )
    neftune_noise_alpha: float | None = field(
        "nll, dft and eaft: NEFTune noise on the embeddings during training, uniform within alpha / "
        "sqrt(tokens of a row * hidden size); null adds none.",
        None,
        unit="none (a factor)",
        gt=0,
        allow_inf_nan=False,
        example=5.0,
    )
    simpo_gamma: float = field(
        "simpo: target lead of the chosen answer's reward. The reward is beta times the mean of the answer's "
        "log-probabilities.",
        0.5,
        unit="none (a reward)",
        ge=0,
        allow_inf_nan=False,
    )
    cpo_alpha: float = field(
        "cpo: weight of the chosen answers' negative log-likelihood, averaged over the tokens of a "
        "micro-batch; 0 leaves it out.",
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
        "Length of the run in steps; the data repeats as often as needed. Give either this or epochs.",
        None,
        unit="optimizer steps",
        ge=1,
        example=1000,
        compiled=False,
    )
    epochs: int | None = field(
        "Length of the run in passes over the data. Give either this or steps.",
        unit="epochs",
        default_is="1, or null when steps is given",
        default_factory=_epochs,
        ge=1,
        example=1,
        compiled=False,
    )
    continue_from: int | None = field(
        "Begin a new schedule after this step of a run, which then continues with its optimizer's state: "
        "learning_rate and schedule apply from there to the end. steps and epochs count from the run's "
        "beginning. The run needs a checkpoint of this step, and train.py --resume. null has one schedule.",
        None,
        unit="optimizer steps",
        ge=1,
        le=LARGEST,
        example=1000,
        compiled=False,
    )
    global_batch_size: int = field(
        "Rows per optimizer step, over all devices. A row is one sample, or several with packing; with grpo, "
        "one completion.",
        8,
        unit="rows",
        ge=1,
        le=10**6,
    )
    micro_batch_size: int = field(
        "Rows that one data-parallel device processes at once. Gradients are accumulated over "
        "global_batch_size / (micro_batch_size * dcn * fsdp * ep) micro-batches.",
        1,
        unit="rows per device",
        ge=1,
        le=10**6,
    )
    loss_normalization: Literal["tokens", "micro_batches"] = field(
        "tokens: mean over all target tokens of the optimizer step; micro_batches: mean of the means of the "
        "micro-batches.",
        "tokens",
        choices={
            "tokens": "Every target token of the step has the same weight.",
            "micro_batches": "Every micro-batch has the same weight, for any number of targets.",
        },
    )
    router_aux_loss_coef: float = field(
        "For models with experts: weight of transformers' load-balancing loss of the routers, which is added "
        "to the loss; 0 adds none. It is computed over the real tokens and all layers of a micro-batch "
        "together. A step takes the mean over its micro-batches.",
        0.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
        example=0.001,
    )
    trainable_modules: Annotated[list[str], AfterValidator(distinct)] = field(
        "Without lora: the modules that are trained, as names or regular expressions like those of "
        "lora.targets; all others stay as they are. [] trains every module.",
        [],
        example=["lm_head", "layers\\.(30|31)\\..*"],
    )
    qat: FakeQuantization | None = field(
        "sft: round weights and activations during training, as they will be after quantization. Without "
        "lora this is done in all projections, with lora in those that have an adapter. The weights that "
        "are trained and merged are not rounded. null does not round.",
        None,
        example={"group_size": 32},
    )
    optimizer: Optimizer = section(
        "The optimizer and its hyperparameters.", Optimizer, {"name": "adamw", "learning_rate": 0.0001}
    )
    schedule: Schedule = section(
        "The learning rate over the run.", Schedule, {"name": "cosine", "warmup_ratio": 0.03}
    )
    eval_every: int = field(
        "Number of steps between two evaluations. The run also evaluates at the end.",
        100,
        unit="optimizer steps",
        ge=1,
        compiled=False,
    )
    early_stopping: EarlyStopping | None = field(
        "Stop before the last step if the evaluation loss makes no more progress; null does not.",
        None,
        example={"patience": 3},
        compiled=False,
    )
    generations: Generations | None = field(
        "Prompts that the model answers at each evaluation, greedily. The answers go to generations.jsonl "
        "next to the metrics. null has none.",
        None,
        example={"prompts": "data/prompts.jsonl"},
        compiled=False,
    )
    seed: int = field(
        "Seed of the adapters' initial values and of dropout.", 0, unit="none (a seed)", ge=0, le=2**32 - 1
    )
    log: Log = section("What is recorded during training.", Log, {"every": 10}, compiled=False)

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        if values.get("steps") is not None and values.get("epochs") is not None:
            yield Problem(
                E0107,
                ("steps",),
                "`epochs` and `steps` both set the length of the run",
                "remove one of the two, or write `epochs: null` when it comes from an extended file",
                at_key=True,
            )
        if "epochs" in values and values["epochs"] is None and values.get("steps") is None:
            yield Problem(E0110, ("epochs",), "neither `epochs` nor `steps` is given", "epochs: 1")


class LocalCheckpoint(Section):
    """Checkpoints on each host's own disk. A run resumes from one that is newer than the shared ones."""

    directory: str = field(
        "A folder on each host: on an attached disk, or in memory, which survives only the process.",
        "/dev/shm/recipec",
        pattern=r"^/",
        form="an absolute path",
        example="/mnt/disks/local",
    )
    every_steps: int = field(
        "Number of steps between two local checkpoints.", 10, unit="optimizer steps", ge=1
    )


E1316 = Code(
    "E1316",
    "local checkpoints not more frequent than shared ones",
    cause="checkpoint.local saves on the hosts' own disks between the checkpoints of "
    "checkpoint.directory. With its every_steps there are none in between.",
    cure="Use a smaller checkpoint.local.every_steps, or leave checkpoint.local out.",
)


class Checkpoint(Section):
    """Where and how often the adapters and the optimizer's state are saved."""

    directory: str = field(
        "A folder below the artifact's output folder, or a gs:// address.",
        "checkpoints",
        min_length=1,
        example="gs://bucket/run",
    )
    every_steps: int = field(
        "Number of steps between two checkpoints. The end is also saved.", 100, unit="optimizer steps", ge=1
    )
    keep: int = field("Number of newest checkpoints to keep.", 3, unit="checkpoints", ge=1)
    keep_best: bool = field(
        "Also save at each evaluation with the lowest loss so far (with grpo, the highest reward), and "
        "keep the last of these in addition to "
        "the newest, for `merge.py --step best`.",
        False,
    )
    local: LocalCheckpoint | None = field(
        "More checkpoints in between, on each host's own disk; null saves none.",
        None,
        example={"directory": "/mnt/disks/local", "every_steps": 10},
    )

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        local, every = values.get("local"), values.get("every_steps", 100)
        local_steps = local.get("every_steps", 10) if isinstance(local, Mapping) else None
        if isinstance(local_steps, int) and isinstance(every, int) and local_steps >= every >= 1:
            yield Problem(
                E1316,
                ("local", "every_steps"),
                f"with local checkpoints every {local_steps} steps there are none between those of "
                f"`directory` every {every}",
                f"every_steps: {every // 2}" if every > 1 else "remove `local`",
            )


class Cache(Section):
    """Tokenized data and compiled programs, each under a key made from its inputs."""

    directory: str | None = field(
        "A folder below the artifact's output folder, or a gs:// address; null keeps no cache.",
        "cache",
        min_length=1,
    )


class Merge(Section):
    """How the adapters are merged into the checkpoint."""

    output: str = field(
        "A folder below the artifact's output folder, or an address that fsspec writes to.",
        "merged",
        min_length=1,
        example="gs://bucket/merged",
    )
    dtype: Literal["bfloat16", "float32"] = field(
        "Type of the merged weights.",
        "bfloat16",
        choices={
            "bfloat16": "16 bits a number; the type in which vLLM serves.",
            "float32": "32 bits a number.",
        },
    )
    quantization: Literal["fp8", "int8"] | None = field(
        "Quantization of the linear weights of attention and MLP, with a scale for each output channel, as "
        "compressed-tensors; null keeps them in `dtype`.",
        None,
        example="fp8",
        choices={"fp8": "8 bits of floating point (e4m3).", "int8": "8-bit whole numbers."},
    )
    max_shard_size: str = field(
        "Largest size of one safetensors file, as a number with KB, MB or GB (powers of ten); `base` splits "
        "the weights into the same files as the base.",
        "5GB",
        unit="bytes",
        pattern=r"^(base|[1-9][0-9]{0,5}(\.[0-9]{1,6})?[KMG]B)$",
        form="a number of at most six digits directly followed by KB, MB or GB, or base",
    )
    adapter: bool = field("Also write a PEFT adapter.", True)
