"""Describe a step's loss: its objective, what is added to it, and the rounding of its products."""

from __future__ import annotations

import math
from collections.abc import Iterator

from recipec.compiler.catalog import Model
from recipec.compiler.explain.reinforcement import groups
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import run_length
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.pages.numbers import gib_number
from recipec.compiler.wording import plural, rounded
from recipec.runtime.training.objectives import NLL, OBJECTIVES, keeps_copy, settings_of, stores
from recipec.spec.language.train import Train


def objective(program: Program) -> list[str]:
    """Describe a loss other than the plain likelihood, and which reference and settings it needs."""
    recipe, train = program.recipe, program.recipe.train
    kind = OBJECTIVES[train.objective]
    if kind.loss(train.loss_type) == NLL:
        return []
    out = [f"learned with {kind.title}{settings_of(train.model_dump())}"]
    if train.grpo is not None:
        out += groups(program)
    if recipe.lora is not None and keeps_copy(train, recipe.lora):
        whole = " and of the whole modules" if recipe.lora.modules_to_save else ""
        whole += " and of the embedding's rows" if recipe.lora.trainable_tokens else ""
        what = "adapters" if recipe.lora.start_from is None else "adapter"
        out.append(f"the reference is a copy of the {what}{whole} that training starts from")
    elif keeps_copy(train, recipe.lora):
        size = program.trainable_parameters * BYTES[recipe.model.dtype]
        out.append(
            f"the reference is a copy of the weights that training starts from: {gib_number(size)} GiB "
            "over all devices"
        )
    elif kind.refers(train.loss_type):
        out.append("the reference is the base without its adapters, so it needs no additional weights")
    if (teacher := program.teacher) is not None:
        out.append(_teacher(program, teacher))
    if train.grpo is None and (about := program.generated) is not None:
        out.append(
            f"{about.share:.0%} of the steps train on the student's own answers, of at most "
            f"{plural(about.completion, 'token')}, to prompts of at most {plural(about.prompt, 'token')}"
        )
    if train.loss_type in kind.mismatched:
        out.append(
            "how far the model is from the reference is estimated in each micro-batch, from its prompts with "
            f"other rows' answers: each of a device's {train.micro_batch_size} rows gets the answer of the "
            "row "
            "before it, and the first row gets the last one's"
        )
    return out


def _teacher(program: Program, teacher: Model) -> str:
    """Describe where a distillation's teacher is."""
    distill = program.recipe.train.distill
    assert distill is not None
    if stores(program.recipe.train):
        return (
            f"the teacher, {teacher.title}, is computed once by `train.py --write-teacher`: a step reads its "
            f"{plural(distill.top_k, 'likeliest token')} at each target from {distill.stored}"
        )
    numbers = sum(math.prod(p.shape) for p in teacher.family.parameters(teacher.architecture))
    return (
        f"the teacher, {teacher.title} with {numbers:,} parameters, stands next to the model on the same "
        "mesh and is not trained"
    )


def additions(train: Train) -> Iterator[str]:
    """Yield what a step adds to the targets' likelihood and to the embeddings."""
    if coefficient := train.router_aux_loss_coef:
        yield f"{coefficient:g} x the load-balancing loss of each micro-batch's real tokens is added to it"
    if train.objective != "sft":
        return
    read = OBJECTIVES[train.objective].reads(train.loss_type)
    if train.label_smoothing and "label_smoothing" in read:
        yield f"{train.label_smoothing:g} of each target is spread evenly over the vocabulary"
    if train.z_loss and "z_loss" in read:
        yield f"{train.z_loss:g} x the squared logsumexp of each target's logits is added to it"
    if train.neftune_noise_alpha is not None and "neftune_noise_alpha" in read:
        bound = f"{train.neftune_noise_alpha:g} / sqrt(row's tokens x hidden size)"
        yield f"noise on the embeddings, uniform within {bound}; none in evaluations"


def rounding(program: Program) -> list[str]:
    """Describe what train.qat rounds; [] for nothing."""
    qat, length = program.recipe.train.qat, run_length(program.recipe, program.source.parent)
    if qat is None:
        return []
    places = "all projections" if program.lora is None else "the adapted projections"
    if qat.head:
        places += " and the head"
    out = [
        f"{places} are computed with rounded operands: {rounded(qat)}; gradients pass through the rounding"
    ]
    if qat.start_step:
        of = f" of {length.steps:,}" if length.exact and length.steps else ""
        out.append(f"the first {plural(qat.start_step, 'step')}{of} are not rounded")
    return [*out, "checkpoints and merged weights are not rounded: quantize the merged model afterwards"]
