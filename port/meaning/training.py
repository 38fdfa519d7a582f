"""The tools' batches, optimizers and schedules, and the folder of a run's results.

The recipe's schedules are transformers' get_*_schedule_with_warmup, whose decay may end above zero. Some
other schedules are special cases of these (a polynomial of power 1 is linear). The rest get the nearest
schedule, and a note on the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipec.compiler.wording import listing
from recipec.port.engine import Says, Statements
from recipec.port.keys import TRUE, Keys, table
from recipec.port.refusals import E1160, E1163
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.language import Checkpoint


@dataclass(frozen=True)
class Batch:
    """The rows of an optimizer step.

    Attributes:
        per_device: rows that one data-parallel device handles at once.
        accumulation: the number of micro-batches of an optimizer step.
        data_parallel: the number of devices, or groups of devices sharing the model, with their own rows.
    """

    per_device: int
    accumulation: int
    data_parallel: int

    @property
    def rows(self) -> int:
        """The rows of an optimizer step: the recipe's `train.global_batch_size`."""
        return self.per_device * self.accumulation * self.data_parallel

    def __str__(self) -> str:
        """Write the product for a note: "2 rows x 8 micro-batches x 4 devices"."""
        return (
            f"{_count(self.per_device, 'row')} x "
            f"{_count(self.accumulation, 'micro-batch', 'micro-batches')} x "
            f"{_count(self.data_parallel, 'data-parallel device')}"
        )


E1162 = Code(
    "E1162",
    "devices that cannot be grouped",
    cause="The number of GPUs is not a multiple of the GPUs that share rows (tensor, context or "
    "sequence parallelism). The number of data-parallel devices and the global batch are therefore "
    "undefined.",
    cure="Give the number of GPUs that the run used with `--devices`.",
)


def say_steps(
    keys: Keys, key: str, note: str, epochs: str, epochs_in: Keys | None = None
) -> Statements[bool]:
    """State a number of steps above zero, which sets the length of the run in place of the epochs.

    Args:
        note: how the length may differ.
        epochs: the key of the epochs.
        epochs_in: the section that it is in, if that is not the steps' own.

    Returns:
        Whether there is such a number. If not, nothing was said.
    """
    steps = keys.integer(key)
    if steps is None or steps <= 0:
        return False
    yield keys.say(key, {"train.steps": steps}, note)
    yield (epochs_in or keys).same(epochs, note=f"{key} sets the length of the run")
    return True


def say_groups(
    keys: Keys, key: str, per_device: int, accumulation: int, processes: int, shared: int
) -> Statements[Batch]:
    """Return the rows of an optimizer step. It is an error if the GPUs do not divide into the groups."""
    try:
        return global_batch(per_device, accumulation, processes, shared)
    except ValueError:
        message = f"{processes} GPUs cannot be split into groups of {shared} that share their rows"
        help = f"give the number of GPUs of the run with --devices, a multiple of {shared}"
        yield keys.refuse(key, E1162, message, help)
        return Batch(per_device, accumulation, processes)


def global_batch(per_device: int, accumulation: int, processes: int, shared: int = 1) -> Batch:
    """Return the rows of an optimizer step.

    Args:
        per_device: the rows of a process at once.
        accumulation: the number of micro-batches.
        processes: the number of all GPUs.
        shared: GPUs that work on the same rows: the tensor-parallel axis times the context-parallel one.

    Raises:
        ValueError: `shared` does not divide `processes`.
    """
    if shared < 1 or processes % shared:
        raise ValueError(f"{processes} processes cannot be split into groups of {shared}")
    return Batch(per_device, accumulation, processes // shared)


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


@dataclass(frozen=True)
class Translation:
    """The meaning of an optimizer's name here.

    Attributes:
        name: the nearest optimizer of the recipe.
        note: how it differs, "" if the arithmetic is the same.
        same: whether the update rule is the same, even if in another precision. Another rule is an error.
    """

    name: str
    note: str = ""
    same: bool = True


ADAMW = Translation("adamw")
MUON = Translation("muon")
"""LLaMA-Factory's Muon. The names do not include it: other tools' Muon makes other updates."""

OPTIMIZERS: Mapping[str, Translation] = {
    name: Translation(row.target, row.note, row.verdict == "same")
    for row in table("""
same adamw adamw_hf adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_apex_fused
    paged_adamw paged_adamw_32bit pagedadamw -> adamw
same adafactor -> adafactor
same sgd -> sgd
same rmsprop -> rmsprop
same fusedadam -> adamw
same flashadamw flash_adamw -> adamw: recipec keeps the optimizer state in float32, not compressed to 8 bits:
    the same rule, more precise, with more memory
same lion lion_pytorch lion_32bit paged_lion paged_lion_32bit pagedlion -> lion
same adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit adamw8bit pagedadamw8bit ao_adamw_8bit
    ao_adamw_fp8 adamwfp8 -> adamw: recipec keeps the optimizer state in float32, not in 8 bits: the same
    rule, more precise, with more memory
same adamw_torch_4bit ao_adamw_4bit adamw4bit -> adamw: recipec keeps the optimizer state in float32, not in 4
    bits: the same rule, more precise, with more memory
same lion_8bit paged_lion_8bit lion8bit pagedlion8bit -> lion: recipec keeps the optimizer state in float32,
    not in 8 bits: the same rule, more precise, with more memory
same flash_lion -> lion: recipec keeps the optimizer state in float32, not compressed to 8 bits: the same
    rule, more precise, with more memory
same flash_sgdw -> sgd: recipec keeps the optimizer state in float32, not compressed to 8 bits
same adam flash_adam -> adamw: Adam adds weight decay to the gradient; AdamW subtracts it from the weights
same cpuoffloadoptimizer -> adamw: recipec keeps the optimizer state on the devices, not on the host
same adamw_anyprecision -> adamw: recipec keeps the optimizer state in float32, without Kahan summation
same optimi_adamw -> adamw: recipec computes the update in float32, without Kahan summation
other galore_adamw galore_adamw_8bit galore_adamw_layerwise galore_adamw_8bit_layerwise apollo_adamw
    apollo_adamw_layerwise q_galore_adamw8bit -> adamw: recipec uses plain AdamW and does not project
    gradients to a low rank: other updates, and a larger state
other galore_adafactor galore_adafactor_layerwise -> adafactor: recipec uses plain Adafactor and does not
    project gradients to a low rank: other updates, and a larger state
other schedule_free_adamw -> adamw: recipec uses AdamW with its schedule, and does not average weights
other schedule_free_sgd -> sgd: recipec uses SGD with its schedule, and does not average weights
other stable_adamw -> adamw: recipec does not clip updates by their root mean square
other grokadamw -> adamw: recipec does not filter or amplify gradients
other ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit -> adamw: recipec uses AdamW instead,
    without a second, slow mean of the gradients
other came_pytorch -> adafactor: recipec uses Adafactor instead, and does not scale updates by their
    confidence
other adopt_adamw -> adamw: recipec uses AdamW instead; ADOPT normalizes before the momentum
""")
    for name in row.keys
}
"""The optimizers by their lower-case names in transformers, Axolotl, torchtune and litgpt."""


def optimizer_of(name: str) -> Translation:
    """Return the recipe's optimizer for a tool's name of one."""
    last = name.strip().rsplit(".", 1)[-1].lower()
    return OPTIMIZERS.get(
        last, Translation("adamw", "recipec uses AdamW instead, which makes other updates", same=False)
    )


def say_optimizer(keys: Keys, key: str, name: str, translation: Translation, help: str) -> Says:
    """State an optimizer. One with another update rule is an error."""
    sets = {"train.optimizer.name": translation.name}
    if not translation.same:
        message = f"the optimizer {name} has no counterpart: {translation.note}"
        yield keys.refuse(key, E1163, message, f"{key}: {help}")
    yield keys.say(key, sets, translation.note)


def arguments(text: str | Mapping[str, object] | None) -> dict[str, str]:
    """Parse `optim_args` ("beta1=0.9, eps=1e-6", or a mapping) into a mapping of texts.

    Raises:
        ValueError: a piece of the text is not NAME=VALUE.
    """
    if not text:
        return {}
    if isinstance(text, Mapping):
        return {str(key): str(value) for key, value in text.items()}
    if not isinstance(text, str):
        raise ValueError(f"`{text}` is neither text nor a mapping")
    out = {}
    for piece in text.replace(" ", "").split(","):
        name, equals, value = piece.partition("=")
        if not equals:
            raise ValueError(f"`{piece}` is not NAME=VALUE")
        out[name] = value
    return out


def of_rmsprop(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the recipe's values for transformers' `optim_args` of rmsprop. The keys of Adam do not count.

    Raises:
        ValueError: a value is no number, or `centered` is on.
    """
    if settings.get("centered", "").lower() in TRUE:
        raise ValueError("`centered` has no counterpart: recipec subtracts no mean from the second moment")
    defaults = TORCH_DEFAULTS["rmsprop"]
    names = {"alpha": "b2", "eps": "eps", "momentum": "momentum"}
    return {f"train.optimizer.{to}": float(settings.get(key, defaults[key])) for key, to in names.items()}


_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}

TORCH_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {**_ADAM, "weight_decay": 0.01},
    "adam": {**_ADAM, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
    "adafactor": {"lr": 1e-2, "weight_decay": 0.0},
    "rmsprop": {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
    "fusedadam": {**_ADAM, "weight_decay": 0.0, "master_weights": False},
    "flashadamw": {**_ADAM, "weight_decay": 0.01, "master_weight_bits": 24},
    "optimi": {"lr": None, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.01},
}
"""Default arguments of the classes of torch.optim, bitsandbytes, torchao, Transformer Engine, flashoptim and
optimi, by the beginning of their names after Paged. optimi has no default rate."""

BY_AXOLOTL = {
    "optimi_adamw": "optimi",
    "ao_adamw_fp8": "adamw",
    "flash_adamw": "flashadamw",
    "flash_adam": "adam",
    "flash_lion": "lion",
    "flash_sgdw": "sgd",
}
"""Optimizers that Axolotl constructs itself, with the class whose defaults apply. Transformers constructs the
others, and gives them TrainingArguments' betas and epsilon."""

OF_OPTIMIZERS = table("""
lost amsgrad=false maximize=false
learned centered=false bias_correction=true decouple_lr=false
files fused foreach capturable differentiable is_paged block_wise bf16_stochastic_round optim_bits
    min_8bit_size percentile_clipping args offload_gradients store_param_remainders quantize
    compress_state_dict check_numerics use_decoupled_grad set_grad_none
""")


def say_torch_optimizer(keys: Keys, name: str, where: Keys, key: str) -> Says:
    """State an optimizer's class and its arguments."""
    translation = optimizer_of(name)
    bare = name.rpartition(".")[2].lower().removeprefix("paged")
    begins = next((kind for kind in TORCH_DEFAULTS if bare.startswith(kind)), "adamw")
    keys.defaults = {**TORCH_DEFAULTS[begins], **keys.defaults}
    keys.tool = name.rpartition(".")[2]
    decay = keys.number("weight_decay") or 0.0
    if begins == "adam" and decay == 0.0:
        translation = ADAMW
    if begins == "fusedadam":
        translation = yield from _fused(keys, translation, decay)
    yield from say_optimizer(where, key, name, translation, "torch.optim.AdamW")
    yield keys.say("lr", {"train.optimizer.learning_rate": keys.number("lr")})
    yield keys.say("weight_decay", {"train.optimizer.weight_decay": decay})
    yield from _betas(keys, translation.name)
    if translation.name == "rmsprop":
        yield keys.say("alpha", {"train.optimizer.b2": keys.number("alpha")})
    if translation.name in ("adamw", "rmsprop"):
        yield keys.say("eps", {"train.optimizer.eps": keys.number("eps")})
    if translation.name in ("rmsprop", "sgd"):
        yield keys.say("momentum", {"train.optimizer.momentum": keys.number("momentum") or 0.0})
    if translation.name == "sgd":
        yield keys.unless("nesterov", (False,), "recipec's momentum is not Nesterov's")
        yield keys.unless("dampening", (0,), "recipec does not dampen the momentum")
    yield from keys.passive(("eps", "betas", "momentum"), f"{translation.name} does not have this setting")
    yield from keys.follow(OF_OPTIMIZERS)


def _fused(keys: Keys, translation: Translation, decay: float) -> Statements[Translation]:
    """Return what Transformer Engine's FusedAdam is here, by the keys that the other classes do not have."""
    if keys.value("adam_w_mode") is False and decay:
        translation = OPTIMIZERS["adam"]
    yield keys.same("adam_w_mode", note="where weight decay applies")
    moments = ("exp_avg_dtype", "exp_avg_sq_dtype")
    kept = {str(keys.value(key) or "float32").rpartition(".")[2] for key in moments} - {"float32"}
    if kept:
        note = (
            f"recipec keeps the optimizer state in float32, not in {listing(sorted(kept))}: the "
            "same rule, more precise"
        )
        translation = replace(translation, note=f"{translation.note}; {note}" if translation.note else note)
    yield from keys.passive(moments, "the precision of the optimizer's state")
    return translation


def _betas(keys: Keys, name: str) -> Says:
    if name not in ("adamw", "lion"):
        return
    betas = keys.value("betas")
    if isinstance(betas, str):
        betas = [piece for piece in betas.strip("()[] ").replace(",", " ").split()]
    try:
        first, second = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        yield keys.refuse("betas", E1160, f"betas are {flow(betas)}, not two numbers", "betas: [0.9, 0.999]")
        return
    yield keys.say("betas", {"train.optimizer.b1": first, "train.optimizer.b2": second})


@dataclass(frozen=True)
class Schedule:
    """The meaning of a schedule's name here.

    Attributes:
        name: the recipe's schedule; None for an unknown name.
        min_lr_ratio: the last rate, as a share of the peak.
        note: how it differs, "" if each step's rate is the same.
        warms_up: whether a given warm-up takes effect; transformers' `constant` has none.
    """

    name: str | None
    min_lr_ratio: float = 0.0
    note: str = ""
    warms_up: bool = True


@dataclass(frozen=True)
class Warmup:
    """The warm-up of a run. Either `steps` or `ratio` is set, or neither.

    Attributes:
        steps: optimizer steps.
        ratio: a share of all steps, rounded up.
        note: what becomes of a value that is not used as written, "" otherwise.
    """

    steps: int | None = None
    ratio: float | None = None
    note: str = ""

    def values(self) -> dict[str, Any]:
        """Return the recipe's values."""
        if self.ratio:
            return {"train.schedule.warmup_ratio": self.ratio}
        return {"train.schedule.warmup_steps": self.steps or 0}


SCHEDULES: Mapping[str, Schedule] = {
    name: Schedule(row.target, note=row.note, warms_up=row.verdict == "warm")
    for row in table("""
warm linear -> linear
cold constant -> constant
warm constant_with_warmup -> constant
warm warmup_stable_decay -> constant: recipec keeps the learning rate at its peak, without the decay at the
    end of the run
warm inverse_sqrt -> constant: recipec keeps the learning rate at its peak, without the slow decay with the
    square root of the step
cold reduce_lr_on_plateau greedy -> constant: recipec keeps the learning rate at its peak: it does not follow
    the evaluation loss
""")
    for name in row.keys
}
"""Schedules that do not depend on their arguments. With some of them a warm-up takes effect."""


def schedule_of(
    name: str, kwargs: Mapping[str, Any] | None = None, learning_rate: float | None = None
) -> Schedule:
    """Return the recipe's schedule for one of transformers' (`lr_scheduler_type`) or of torchtune's."""
    settings = dict(kwargs or {})
    if name in ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "cosine_with_restarts"):
        return _cosine(name, settings, learning_rate)
    if name == "polynomial":
        return _polynomial(settings, learning_rate)
    return SCHEDULES.get(name, Schedule(None))


def _cosine(name: str, settings: Mapping[str, Any], learning_rate: float | None) -> Schedule:
    final = 0.0
    if "min_lr" in name or "min_lr" in settings or "min_lr_rate" in settings:
        final = _share(settings.get("min_lr_rate"), settings.get("min_lr"), learning_rate)
    notes = []
    whole = 1 if name == "cosine_with_restarts" else 0.5
    cycles = settings.get("num_cycles", whole)
    if cycles != whole:
        notes.append(f"recipec's cosine is one half wave, not num_cycles: {cycles}")
    if name == "cosine_warmup_with_min_lr":
        notes.append(
            "recipec's warm-up starts from zero; the tool's starts one step below warmup_lr_rate, or at it"
        )
    return Schedule("cosine", final, "; ".join(notes))


def _polynomial(settings: Mapping[str, Any], learning_rate: float | None) -> Schedule:
    power = settings.get("power", 1.0)
    final = _share(None, settings.get("lr_end", 1e-7), learning_rate)
    note = "" if power == 1.0 else f"recipec's decay is linear, not of the power {power}"
    return Schedule("linear", final, note)


def _share(ratio: Any, rate: Any, learning_rate: float | None) -> float:
    if ratio is not None:
        return float(ratio)
    return float(rate) / learning_rate if rate is not None and learning_rate else 0.0


def warmup(steps: float | None = None, ratio: float | None = None) -> Warmup:
    """Return the warm-up of transformers' TrainingArguments.

    `warmup_ratio` overrides `warmup_steps`. Below 1, the value is a share of all steps. From 1 on, it is a
    number of steps (a ratio of 1.0 is one step).
    """
    held = steps if ratio is None else ratio
    if not held:
        return Warmup()
    if held < 1:
        return Warmup(ratio=float(held))
    note = (
        ""
        if int(held) == held and ratio is None
        else f"recipec reads it as {int(held)} steps, as transformers does"
    )
    return Warmup(steps=int(held), note=note)


FOLDER = "where results are kept; recipec uses the artifact's output folder"
UPLOAD = "recipec uploads nothing during training: `recipe push` uploads what merge.py writes"
LOGS = "train.log supports TensorBoard, Weights & Biases and MLflow"
OFF: tuple[Any, ...] = (None, False, "", 0, [], "none", "false")
PROJECT = "train.log.wandb_project"
EXPERIMENT = "train.log.mlflow_experiment"
BY_MLFLOW = "the run's environment gives MLFLOW_EXPERIMENT_NAME and MLFLOW_TRACKING_URI"
PATIENCE = "early_stopping_patience"
STOPPING, BEST = "train.early_stopping", "checkpoint.keep_best"
TAKEN = "recipec keeps the best checkpoint next to the newest: merge.py takes it with --step best"
BY_ENVIRONMENT = "transformers reads WANDB_PROJECT, or else uses `huggingface`, as recipec does"
"""transformers' own rule, for a run whose environment variables are not among the files."""


def directory(keys: Keys, key: str) -> Says:
    """State the folder for results. A folder in a bucket is also used for the checkpoints."""
    folder = keys.source.get(keys.prefix + key, None)
    remote = isinstance(folder, str) and folder.startswith(("gs://", "gcs://"))
    if remote:
        place = "gs://" + str(folder).partition("://")[2].rstrip("/")
        yield keys.same(
            key,
            {"checkpoint.directory": place},
            "checkpoints go to this folder; merge.output names the folder of the merged weights",
        )
    yield keys.same(key, note=FOLDER)


EVERY: int = Checkpoint.model_fields["every_steps"].default
"""A recipe's default for train.eval_every and checkpoint.every_steps."""
EPOCH = f"the tool counts the interval in epochs; recipec does it every {EVERY} steps, and at the end"
SERVICES = (
    ("wandb", PROJECT, "huggingface", BY_ENVIRONMENT),
    ("mlflow", EXPERIMENT, "Default", BY_MLFLOW),
)
"""transformers' external loggers: the name, the recipe's path, the default value, and the note."""


def best(keys: Keys, patience: str = PATIENCE, also: Mapping[str, Any] | None = None) -> Says:
    """State what depends on evaluations: transformers' early stopping, and the best model."""
    evaluates = bool(keys.ledger.value("data.eval") or keys.ledger.value("data.eval_fraction"))
    metric = str(keys.value("metric_for_best_model") or "loss").removeprefix("eval_")
    why = "" if evaluates else "the recipe has no evaluation data"
    if metric != "loss" or keys.value("greater_is_better"):
        why = why or "recipec goes only by the lowest evaluation loss"
    count = keys.integer(patience) if keys.given(patience) else None
    if count and not why:
        sets = {f"{STOPPING}.patience": count, **(also or {})}
        yield keys.say(patience, sets, TAKEN if also else "")
        delta = keys.number("early_stopping_threshold") if keys.given("early_stopping_threshold") else None
        yield keys.same("early_stopping_threshold", {f"{STOPPING}.min_delta": delta} if delta else None)
    yield keys.unless(patience, OFF, f"recipec runs until the last step: {why}")
    if keys.given("load_best_model_at_end") and keys.flag("load_best_model_at_end") and not why:
        yield keys.say("load_best_model_at_end", {BEST: True}, TAKEN)
    yield keys.unless("load_best_model_at_end", OFF, f"recipec keeps the last step's weights: {why}")
    for name in ("metric_for_best_model", "greater_is_better", "early_stopping_threshold"):
        yield keys.same(
            name, note="the lowest evaluation loss" if not why else f"it has no effect in recipec: {why}"
        )
    if keys.given(patience):
        yield keys.same("callbacks", note="early stopping is train.early_stopping")


def report_to(keys: Keys) -> Says:
    """State transformers' `report_to`: the loggers by name."""
    loggers = keys.value("report_to")
    names = loggers if isinstance(loggers, list) else [loggers]
    lost = [str(name) for name in names if name not in (*OFF, "all", "tensorboard", "wandb", "mlflow")]
    notes = [f"recipec does not log to {listing(lost)}: {LOGS}"] if lost else []
    services = [service for service in SERVICES if service[0] in names]
    if services:
        sets = {path: value for _, path, value, _ in services}
        yield keys.say("report_to", sets, "; ".join([*(note for *_, note in services), *notes]))
    elif lost:
        yield keys.unless("report_to", (), notes[0])
    yield keys.same("report_to", {"train.log.tensorboard": True} if "tensorboard" in names else None, "a log")


HUB = (
    *("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_strategy", "hub_always_push"),
    *("hub_revision", "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"),
)
"""transformers' keys for uploads to the hub."""


def hub(keys: Keys) -> Says:
    """State transformers' upload to the hub, with the keys that `push_to_hub` needs."""
    pushes = keys.flag("push_to_hub")
    for key in HUB:
        if pushes:
            yield keys.unless(key, OFF, UPLOAD)
        else:
            yield keys.same(key, note="it has no effect without push_to_hub" if keys.value(key) else "off")
