"""Check batches against data-parallel devices; schedule, evaluation and checkpoints against steps; the
log."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from recipec.compiler.checks.backends import E0514
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.run_length import (
    ENOUGH_STEPS,
    FEW_SAMPLES_EPOCHS,
    MOST_EPOCHS,
    steps_left,
    warmup_steps,
)
from recipec.compiler.lowering.runtime_settings import SETTINGS
from recipec.compiler.wording import line, listing, plural
from recipec.runtime.model.adapters import matches
from recipec.runtime.model.partition_rules import DATA
from recipec.runtime.model.selection import selected
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.spec import words
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.secrets import WANDB_KEY

HIGHEST_RATE = 1e-2
"""Above this peak, AdamW on adapters diverges in every published run."""

BY_SIGN = ("adamw", "lion")
"""Optimizers whose step size is the learning rate, whatever the gradient's size."""

SIZES = range(64, 0, -1)
"""Suggested micro-batch sizes, the largest first."""


W0507 = Code(
    "W0507",
    "very high learning rate",
    cause="The size of AdamW's and Lion's steps is the learning rate, and training diverges with such "
    "a peak.",
    cure="Write `learning_rate: 1.0e-4`. Values from 1.0e-5 to 1.0e-3 are usual.",
)

W0508 = Code(
    "W0508",
    "min_lr_ratio has no effect",
    cause="A constant schedule stays at its peak.",
    cure="Remove it, or use the schedule cosine or linear.",
)

N0509 = Code(
    "N0509",
    "merged in float32",
    cause="The merged checkpoint is twice the size of the base, and the server still computes in bfloat16.",
    cure="Write `merge.dtype: bfloat16`.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _batches(facts)
    yield from _steps(facts)
    yield from _without_effect(facts)
    yield from _muon(facts)
    yield from _preferences(facts)
    yield from _only(facts)
    yield from _all_weights(facts)
    train = facts.recipe.train
    rate = train.optimizer.learning_rate
    if rate > HIGHEST_RATE and train.optimizer.name in BY_SIGN:
        yield Diagnostic(
            W0507,
            f"a peak learning rate of {rate:g} is far too high for {train.optimizer.name}: usual values are "
            "1e-5 to 1e-3",
            "train.optimizer.learning_rate",
            "learning_rate: 1.0e-4",
        )
    if train.schedule.name == "constant" and train.schedule.min_lr_ratio not in (0.0, 1.0):
        yield Diagnostic(
            W0508,
            "min_lr_ratio has no effect: the schedule is constant",
            "train.schedule.min_lr_ratio",
            "remove the line, or write name: cosine",
            at_key=True,
        )
    merge = facts.recipe.merge
    if (merge.dtype, merge.quantization, facts.recipe.model.dtype) == ("float32", None, "bfloat16"):
        yield Diagnostic(
            N0509,
            "the merged checkpoint is written in float32: it is twice the base's size, and the server still "
            "uses bfloat16",
            "merge.dtype",
            "dtype: bfloat16",
        )
    yield from _evaluations(facts)
    yield from _log(facts)
    yield from _balance(facts)


E0440 = Code(
    "E0440",
    "nothing is evaluated",
    cause="`train.early_stopping` and `checkpoint.keep_best` need the evaluation loss, or with grpo the "
    "reward of held-out prompts. The recipe has no evaluation data.",
    cure="Add `data.eval` or `data.eval_fraction`.",
)

W0441 = Code(
    "W0441",
    "early stopping can never apply",
    cause="The first evaluation counts as progress. The run ends before `patience` more evaluations "
    "without progress are possible.",
    cure="Evaluate more often with `train.eval_every`, or use a smaller patience.",
)


def _evaluations(facts: Facts) -> Iterator[Diagnostic]:
    """Check the settings that depend on evaluations."""
    recipe, stopping, steps = facts.recipe, facts.recipe.train.early_stopping, facts.length.steps
    asked = {
        "train.early_stopping": stopping is not None,
        "checkpoint.keep_best": recipe.checkpoint.keep_best,
    }
    if not recipe.data.evaluates:
        for path in (path for path, on in asked.items() if on):
            yield Diagnostic(
                E0440,
                f"`{path.rpartition('.')[2]}` needs evaluations, and the recipe has no data to evaluate on",
                path,
                "add data: {eval_fraction: 0.05} or data.eval, or remove the line",
                at_key=True,
            )
    elif stopping is not None and steps and (stopping.patience + 1) * recipe.train.eval_every >= steps:
        yield Diagnostic(
            W0441,
            f"patience {stopping.patience} has no effect: the first evaluation counts as progress, so the "
            f"run can stop after {plural((stopping.patience + 1) * recipe.train.eval_every, 'step')} at "
            f"the earliest, but it has only {facts.length.words()}",
            "train.early_stopping.patience",
            f"eval_every: {max(1, (steps - 1) // (2 * (stopping.patience + 1)))}; or remove early_stopping"
            if stopping.patience + 1 < steps
            else "remove early_stopping",
        )


def _balance(facts: Facts) -> Iterator[Diagnostic]:
    model = facts.model
    if not facts.recipe.train.router_aux_loss_coef or model is None or model.architecture.balanced:
        return
    name = model.family.title
    why = f"{name} has no experts"
    if not model.family.tunix:
        why = "the TorchAX backend, the only one for this model, does not have it"
    elif model.architecture.routing[0]:
        why = f"transformers does not define it for {name}'s experts"
    yield Diagnostic(
        E0514,
        f"router_aux_loss_coef is the weight of the load-balancing loss: {why}",
        "train.router_aux_loss_coef",
        "remove the line",
        at_key=True,
    )


E0515 = Code(
    "E0515",
    "train.trainable_modules with adapters",
    cause="`train.trainable_modules` is for full fine-tuning. Adapters have their own keys.",
    cure="Use `lora.targets`, `lora.layers` and `lora.modules_to_save`, or remove the `lora` section.",
)

E0516 = Code(
    "E0516",
    "name that matches nothing",
    cause="An entry of `train.trainable_modules` is a module's name, the end of one after a dot, or a "
    "regular expression that matches a whole name.",
    cure="Use a name like those in the help.",
)

E0517 = Code(
    "E0517",
    "part of an array",
    cause="The model keeps several modules in one array, which is trained as a whole.",
    cure="Name all modules of the array, or none.",
)


def _only(facts: Facts) -> Iterator[Diagnostic]:
    """Check the modules that full fine-tuning is restricted to."""
    names = facts.recipe.train.trainable_modules
    if names and facts.recipe.lora is not None:
        yield Diagnostic(
            E0515,
            "train.trainable_modules chooses what full fine-tuning trains, and this recipe trains adapters",
            "train.trainable_modules",
            "remove the line and choose modules with lora.targets and lora.modules_to_save, or write "
            "lora: null",
            at_key=True,
        )
    if not names or facts.model is None or facts.recipe.lora is not None:
        return
    title = facts.model.title
    parameters = [parameter for parameter in facts.defaults if parameter.trainable]
    modules = [source.module for parameter in parameters for source in parameter.sources]
    for index, name in enumerate(names):
        if not any(matches(name, module) for module in modules):
            last = dict.fromkeys(module.rpartition(".")[2] for module in modules)
            close = words.slip(name, list(last))
            hint = f"did you mean `{close}`? " if close else ""
            yield Diagnostic(
                E0516,
                f"`{name}` matches no module of {title}",
                f"train.trainable_modules[{index}]",
                f"{hint}module names look like {modules[-1]} and {modules[len(modules) // 2]}",
            )
    for parameter in parameters:
        chosen = selected(parameter, names)
        if any(chosen) and not all(chosen):
            pairs = zip(parameter.sources, chosen, strict=True)
            left = [source.module for source, taken in pairs if not taken]
            yield Diagnostic(
                E0517,
                f"{left[0]} is one array with modules that train.trainable_modules names, so {title} "
                "trains all of them or none",
                "train.trainable_modules",
                f"trainable_modules: {flow([*names, left[0].rpartition('.')[2]])}",
            )
            return


HYPERPARAMETERS = {
    "adamw": {"b1", "b2", "eps"},
    "lion": {"b1", "b2"},
    "adafactor": set(),
    "rmsprop": {"b2", "eps", "momentum"},
    "sgd": {"momentum"},
    "muon": {"b1", "b2", "eps", "momentum"},
}
"""Which of the fields b1, b2, eps and momentum each optimizer has."""


E0523 = Code(
    "E0523",
    "muon with adapters or experts",
    cause="Muon orthogonalizes the updates of a model's matrices. Whether it also does so for A and B "
    "of adapters depends on the tool. For experts it depends on the version of transformers, in "
    "which they are matrices or one array.",
    cure="Write `name: adamw`, or remove the section lora.",
)


def _muon(facts: Facts) -> Iterator[Diagnostic]:
    """Refuse what the tools orthogonalize differently."""
    if facts.recipe.train.optimizer.name != "muon":
        return
    if facts.lora is not None:
        what, help = "adapters", "name: adamw, or lora: null"
    elif facts.model is not None and facts.model.architecture.routing[0]:
        what, help = "experts", "name: adamw"
    else:
        return
    yield Diagnostic(E0523, f"muon does not train {what}", "train.optimizer.name", help)


W0513 = Code(
    "W0513",
    "fewer than 50 optimizer steps",
    cause="Packing puts several samples into a row, and a step takes global_batch_size rows. A small "
    "data set gives so few steps that the weights hardly change.",
    cure="Use more samples, more epochs, a smaller global_batch_size or a smaller max_length.",
)

N0527 = Code(
    "N0527",
    "samples too few for 50 optimizer steps",
    cause="With the smallest batch of the mesh and several epochs, the samples give fewer than 50 "
    "steps. More epochs would only overfit.",
    cure="Give more samples.",
)


def _few_steps(facts: Facts, most: str) -> Iterator[Diagnostic]:
    """Report too few optimizer steps: a note where the recipe can give no more of them.

    Args:
        most: the number of steps in words.
    """
    train, data = facts.recipe.train, facts.recipe.data
    length = train.epochs or 1
    epochs = math.ceil(ENOUGH_STEPS * length / (facts.length.least or 1))
    place = facts.first_given("train.epochs", "train.global_batch_size", "data.train")
    few = f"the run has {most}, and with fewer than {ENOUGH_STEPS} steps a model hardly learns"
    least = 2 if train.objective == "kto" else 1
    smallest = train.micro_batch_size == least and train.global_batch_size == least * facts.data_parallel
    if smallest and length >= FEW_SAMPLES_EPOCHS and epochs > MOST_EPOCHS:
        yield Diagnostic(N0527, f"{few}: the samples are too few", "data.train", "give more samples")
        return
    packed = ", or a smaller data.max_length, since samples are packed into rows of that length"
    overfits = ", because with so many epochs the model overfits"
    yield Diagnostic(
        W0513,
        few,
        place,
        f"{line('train.epochs', epochs, place)}; or a smaller train.global_batch_size"
        f"{packed if data.packing else ''}; or more samples{overfits if epochs > MOST_EPOCHS else ''}",
    )


W0510 = Code(
    "W0510",
    "optimizer key without effect",
    cause="The optimizer has no such hyperparameter.",
    cure="Remove it, or choose an optimizer that has it.",
)

E0512 = Code(
    "E0512",
    "adapter requested for full fine-tuning",
    cause="Without a lora section there is no adapter to write.",
    cure="Write `adapter: false`.",
)

W0526 = Code(
    "W0526",
    "eval_every without evaluation data",
    cause="The key sets how often the evaluation data is evaluated.",
    cure="Add `data.eval` or `data.eval_fraction`, or remove the key.",
)


def _without_effect(facts: Facts) -> Iterator[Diagnostic]:
    recipe, train = facts.recipe, facts.recipe.train
    optimizer = train.optimizer
    ignored = {"b1", "b2", "eps", "momentum"} - HYPERPARAMETERS[optimizer.name]
    if recipe.lora is not None or recipe.model.dtype == "float32":
        ignored.add("master_weights")
    for name in sorted(ignored & optimizer.model_fields_set):
        why = (
            f"{optimizer.name} has no {name}"
            if name != "master_weights"
            else "it applies only to full fine-tuning in bfloat16"
        )
        yield Diagnostic(
            W0510,
            f"{name} has no effect: {why}",
            f"train.optimizer.{name}",
            "remove the line",
            at_key=True,
        )
    evaluates = recipe.data.evaluates or train.generations is not None
    if "eval_every" in train.model_fields_set and not evaluates:
        yield Diagnostic(
            W0526,
            "eval_every has no effect: the recipe has no data to evaluate on",
            "train.eval_every",
            "data: {eval_fraction: 0.05} or data.eval, or remove the line",
            at_key=True,
        )
    if recipe.lora is None and recipe.merge.adapter and "adapter" in recipe.merge.model_fields_set:
        yield Diagnostic(
            E0512,
            "there is no adapter to write: without a lora section every weight is trained",
            "merge.adapter",
            "adapter: false",
        )


E0431 = Code(
    "E0431",
    "loss of another objective",
    cause="Each objective has its own values of `loss_type`: sft learns to write texts, dpo compares "
    "with a reference model, cpo has none, and kto rates single answers.",
    cure="Use another `loss_type`, or the objective that has this one.",
)

E0432 = Code(
    "E0432",
    "label_smoothing with a loss that has none",
    cause="With preferences, only the logistic losses can assume that a share of the labels is wrong. "
    "With sft, only nll can spread a target over the vocabulary.",
    cure="Remove it, or write `loss_type: sigmoid` or `robust`, for sft `loss_type: nll`.",
)

W0511 = Code(
    "W0511",
    "key of another objective or loss",
    cause="rewards, reward_limits, rollout, grpo, beta, loss_type, label_smoothing, z_loss, "
    "neftune_noise_alpha, simpo_gamma, cpo_alpha, "
    "eaft_alpha, eaft_top_k, eaft_entropy, asft_alpha, desirable_weight, undesirable_weight and "
    "distill each belong to certain objectives or losses, which this recipe does not use.",
    cure="Remove it.",
)

E0722 = Code(
    "E0722",
    "nothing to pair an answer with",
    cause="The loss kto estimates the distance from the reference with prompts and the answers of "
    "other rows of the same device. A single row has only its own answer, which TRL refuses too.",
    cure="Write `micro_batch_size: 2` or more, or `loss_type: apo_zero_unpaired`, which estimates nothing.",
)


def _preferences(facts: Facts) -> Iterator[Diagnostic]:
    """Check the keys for preferences against the objective and its loss."""
    train = facts.recipe.train
    objective, names = OBJECTIVES[train.objective], facts.recipe.train.model_fields_set
    if "loss_type" in objective.settings and objective.loss(train.loss_type) is None:
        having = [name for name, kind in OBJECTIVES.items() if train.loss_type in kind.losses]
        yield Diagnostic(
            E0431,
            f"{train.objective} has no loss `{train.loss_type}`: it has {listing(objective.losses)}",
            "train.loss_type",
            f"loss_type: {next(iter(objective.losses))}, or objective: {listing(having, 'or')}",
        )
        return
    if train.loss_type in objective.mismatched and train.micro_batch_size < 2:
        rows = 2 * facts.data_parallel
        whole = -(-train.global_batch_size // rows) * rows
        more = f" with global_batch_size: {whole}" if whole != train.global_batch_size else ""
        yield Diagnostic(
            E0722,
            f"the loss {train.loss_type} also asks for each prompt with the answer of another row of its "
            "micro-batch on a device, and there is none",
            "train.micro_batch_size",
            f"micro_batch_size: 2{more}, or loss_type: apo_zero_unpaired",
        )
    read = objective.reads(train.loss_type)
    by_loss = "loss_type" in objective.settings
    if by_loss and train.label_smoothing and "label_smoothing" not in read:
        smoothed = [name for name, keys in objective.losses.items() if "label_smoothing" in keys]
        yield Diagnostic(
            E0432,
            f"the loss {train.loss_type} has no label_smoothing",
            "train.label_smoothing",
            f"remove the line, or loss_type: {listing(smoothed, 'or')}",
            at_key=True,
        )
        names = names - {"label_smoothing"}
    for name in sorted(({*SETTINGS} - {*read}) & names):
        of_loss = by_loss and any(name in keys for keys in objective.losses.values())
        what = f"{train.objective}'s loss {train.loss_type}" if of_loss else train.objective
        yield Diagnostic(
            W0511,
            f"{name} has no effect with {what}",
            f"train.{name}",
            "remove the line",
            at_key=True,
        )


N0525 = Code(
    "N0525",
    "full fine-tuning without saying so",
    cause="The recipe has no `lora` section, so all weights are trained. That takes many times the "
    "memory of adapters, and the default learning rate is lower (1e-5 for sft).",
    cure="Write `lora: null` if full fine-tuning is meant, or a `lora` section.",
)


def _all_weights(facts: Facts) -> Iterator[Diagnostic]:
    """Say that a recipe without `lora` trains all weights, unless it writes so."""
    recipe = facts.recipe
    if "lora" in recipe.model_fields_set or recipe.train.trainable_modules or facts.model is None:
        return
    rate = recipe.train.optimizer.learning_rate
    yield Diagnostic(
        N0525,
        f"without a lora section, all weights are trained (full fine-tuning), at a learning rate of {rate:g}",
        "model.id",
        "lora: null, which says so; or lora: {rank: 16}, which trains adapters",
    )


E0501 = Code(
    "E0501",
    "global batch is not whole micro-batches",
    cause="An optimizer step consists of whole micro-batches. Each has micro_batch_size rows on every "
    "data-parallel device (dcn x fsdp x ep).",
    cure="Make global_batch_size a multiple of micro_batch_size x dcn x fsdp x ep.",
)


def _batches(facts: Facts) -> Iterator[Diagnostic]:
    train, shards = facts.recipe.train, facts.data_parallel
    rows = train.micro_batch_size * shards
    if train.global_batch_size % rows == 0:
        return
    sizes = [("micro_batch_size", train.micro_batch_size)]
    sizes += [(name, facts.axes[name]) for name in facts.axes if name in DATA]
    product = f"{' x '.join(f'{name} {size}' for name, size in sizes)} = {rows}"
    below, above = train.global_batch_size // rows * rows, -(-train.global_batch_size // rows) * rows
    choices = [size for size in (below, above) if size]
    micro = next(
        (m for m in SIZES if m < train.micro_batch_size and train.global_batch_size % (m * shards) == 0), 0
    )
    place = facts.first_given("train.global_batch_size", "train.micro_batch_size", "mesh.axes")
    if place.startswith("train."):
        ways = [f"global_batch_size: {listing(choices, 'or')}"]
    else:
        ways = [line("train.global_batch_size", size, place) for size in choices]
    ways += [line("train.micro_batch_size", micro, place)] if micro else []
    yield Diagnostic(
        E0501,
        f"global_batch_size {train.global_batch_size} is not a multiple of {product} rows, one micro-batch "
        "over all data-parallel devices",
        place,
        "; or ".join(ways),
    )


W0502 = Code(
    "W0502",
    "warm-up as long as the run",
    cause="The learning rate rises until the run ends, and never reaches its peak.",
    cure="Use fewer warmup_steps, or a warmup_ratio. A run of very few steps is better without: "
    "`warmup_steps: 0`.",
)

W0503 = Code(
    "W0503",
    "warm-up takes more than half of the run",
    cause="For most of the run the learning rate is below its peak.",
    cure="Use a smaller warm-up. A warmup_ratio of 0.03 is usual.",
)

W0504 = Code(
    "W0504",
    "no checkpoint before the end",
    cause="The run is shorter than checkpoint.every_steps. If it is interrupted, it starts over.",
    cure="Use a smaller every_steps.",
)

N0506 = Code(
    "N0506",
    "no evaluation before the end",
    cause="The run is shorter than train.eval_every.",
    cure="Use a smaller eval_every.",
)

E0524 = Code(
    "E0524",
    "no step after continue_from",
    cause="`train.steps` and `train.epochs` count from the beginning of the run, also for the steps "
    "that an earlier recipe trained.",
    cure="Give the steps of the whole run: those that are done, and those that you add.",
)


def _steps(facts: Facts) -> Iterator[Diagnostic]:
    recipe = facts.recipe
    train = recipe.train
    length = facts.length
    if length.steps is None:
        return
    steps = length.steps
    most = length.words()
    rows = length.data.rows if length.data is not None and train.steps is None else None
    source = "" if rows is None else f" ({plural(rows, 'row')} of data at hand)"
    warmup, bound = warmup_steps(recipe, steps), length.bound
    in_steps = train.schedule.warmup_ratio is None
    begins = "" if train.continue_from is None else f", of which the schedule has {steps_left(train, steps)}"
    key = facts.first_given(
        f"train.schedule.{'warmup_steps' if in_steps else 'warmup_ratio'}",
        *("train.steps", "train.epochs", "data.train"),
    )
    shorter = f"warmup_steps: {steps_left(train, steps) // 20}" if in_steps else "warmup_ratio: 0.03"
    if warmup == 1:  # no share of the steps is shorter
        shorter = "warmup_steps: 0"
    if not key.startswith("train.schedule."):
        shorter = f"train: {{schedule: {{{shorter}}}}}"
    if train.continue_from is not None and length.bound is not None and length.bound <= train.continue_from:
        yield Diagnostic(
            E0524,
            f"the run has {most}{source}, counted from its beginning, so no step is left after step "
            f"{train.continue_from}",
            "train.continue_from",
            line("train.steps", 2 * train.continue_from, "train.continue_from"),
        )
    elif warmup > 0 and bound is not None and warmup_steps(recipe, bound) >= steps_left(train, bound):
        yield Diagnostic(
            W0502,
            f"the warm-up takes {plural(warmup, 'step')}, and the run has only {most}{source}{begins}: the "
            "learning rate never reaches its peak",
            key,
            shorter,
        )
    elif warmup * 2 > steps_left(train, steps):
        yield Diagnostic(
            W0503,
            f"the warm-up takes {plural(warmup, 'step')}, more than half of the run's {most}{source}{begins}",
            key,
            shorter,
        )
    if train.steps is None and steps < ENOUGH_STEPS:
        yield from _few_steps(facts, f"{most}{source}")
    place = facts.first_given("checkpoint.every_steps", "train.steps", "train.epochs", "data.train")
    if recipe.checkpoint.every_steps > steps:
        yield Diagnostic(
            W0504,
            f"checkpoints are saved every {plural(recipe.checkpoint.every_steps, 'step')}, and the run has "
            f"{most}{source}: only the end is saved, and an interrupted run starts over",
            place,
            line("checkpoint.every_steps", max(1, steps // 10), place),
        )
    place = facts.first_given(
        "train.eval_every", "train.steps", "train.epochs", "data.eval", "data.eval_fraction"
    )
    evaluates = recipe.data.evaluates or train.generations is not None
    if evaluates and train.eval_every > steps:
        yield Diagnostic(
            N0506,
            f"the run evaluates every {plural(train.eval_every, 'step')} and has {most}{source}: it "
            "evaluates only at the end",
            place,
            line("train.eval_every", max(1, steps // 10), place),
        )


PROJECT_PATH = "train.log.wandb_project"
PROJECT_REFUSED = "/\\#?%:"
"""Characters that Weights & Biases does not allow in a project's name."""
PROJECT_LONGEST = 128


E1225 = Code(
    "E1225",
    "not a Weights & Biases project",
    cause="train.log.wandb_project is not a valid name for Weights & Biases: it contains one of `/ \\ "
    "# ? % :`, or more than 128 characters.",
    cure="Write only the name of the project. WANDB_ENTITY in the run's environment names its owner.",
)

E1226 = Code(
    "E1226",
    "API key instead of a project",
    cause="train.log.wandb_project looks like an API key of Weights & Biases, and recipes are kept in git.",
    cure="Name the project, and set the key in the run's environment.",
)


def _log(facts: Facts) -> Iterator[Diagnostic]:
    project = facts.recipe.train.log.wandb_project
    if project is None:
        return
    if WANDB_KEY.fullmatch(project):
        yield Diagnostic(
            E1226,
            "this looks like an API key of Weights & Biases, and would be written into the artifact",
            PROJECT_PATH,
            "wandb_project: my-project; revoke this key, and give the run one with `wandb login` or "
            "WANDB_API_KEY",
        )
        return
    entity, slash, name = project.partition("/")
    refused = [letter for letter in PROJECT_REFUSED if letter in project]
    if slash and name and not any(letter in name for letter in PROJECT_REFUSED):
        yield Diagnostic(
            E1225,
            f"`{project}` also names an entity, and a project's name has no slash",
            PROJECT_PATH,
            f"wandb_project: {flow(name)}, and WANDB_ENTITY={entity} in the environment of the run",
        )
    elif refused:
        yield Diagnostic(
            E1225,
            f"Weights & Biases does not allow {' '.join(refused)} in a project's name",
            PROJECT_PATH,
            f"wandb_project: {_allowed(project)}",
        )
    elif len(project) > PROJECT_LONGEST:
        yield Diagnostic(
            E1225,
            f"the project's name has {len(project)} characters, and Weights & Biases allows "
            f"{PROJECT_LONGEST}",
            PROJECT_PATH,
            f"wandb_project: {flow(project[:PROJECT_LONGEST].rstrip())}",
        )


def _allowed(project: str) -> str:
    """Return a project's name with hyphens instead of characters that Weights & Biases refuses."""
    name = re.sub(rf"[{re.escape(PROJECT_REFUSED)}]+", "-", project).strip("- ")
    return flow(name) if name else "my-project"
