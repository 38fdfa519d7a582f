"""Check a distillation's teacher against the student, the data and the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator

from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.hardware import arranged
from recipec.compiler.lowering.sizes import tp_sizes
from recipec.compiler.wording import listing
from recipec.runtime.data.tokenizer import first_difference
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic

E0528 = Code(
    "E0528",
    "distillation without a teacher",
    cause="`objective: distill` trains a model to predict as another one does, which `train.distill` names.",
    cure="Write `distill: {teacher: {id: ...}}` with a model that has the same tokenizer.",
)

E0529 = Code(
    "E0529",
    "teacher with another tokenizer",
    cause="Distillation compares the probabilities that two models give the same tokens. With another "
    "tokenizer, or with tokens that only the student has, the numbers stand for different tokens.",
    cure="Use a teacher with the student's tokenizer, such as a larger model of the same series. Remove "
    "`model.add_tokens`.",
)

N0530 = Code(
    "N0530",
    "teacher with another number of rows",
    cause="The embeddings of two models with one tokenizer can have different numbers of rows behind the "
    "last token. No text has these tokens.",
    cure="Nothing. The loss compares the rows that both models have, and gives the others no probability.",
)

E0531 = Code(
    "E0531",
    "distillation with a model of no family",
    cause="Student and teacher are computed in one step of train.py, which needs a description of both.",
    cure="Use models of the families in docs/models.md.",
)

W0532 = Code(
    "W0532",
    "samples longer than the teacher's positions",
    cause="max_length is above the positions in the teacher's config.json. The teacher does not know later "
    "positions, and its predictions there are of no use.",
    cure="Use the max_length that the message names, or another teacher.",
)

E0533 = Code(
    "E0533",
    "tp does not divide the teacher's heads",
    cause="The teacher is computed on the student's mesh, where the axis tp splits the heads of both models.",
    cure="Use the smaller tp of the help.",
)

TEACHER = "train.distill.teacher"


def check(facts: Facts) -> Iterator[Diagnostic]:
    recipe, teacher = facts.recipe, facts.teacher
    if recipe.train.objective != "distill":
        return
    if recipe.train.distill is None:
        yield Diagnostic(
            E0528,
            "objective distill needs a teacher",
            "train.objective",
            "train: {distill: {teacher: {id: OWNER/NAME}}}",
        )
        return
    for model, place in ((facts.model, "model.id"), (teacher, f"{TEACHER}.id")):
        if model is not None and not model.family.tunix:
            yield Diagnostic(
                E0531,
                f"no family describes {model.title}, and distillation needs one of both models",
                place,
                "choose a model of docs/models.md",
            )
    if recipe.model.add_tokens:
        yield Diagnostic(
            E0529,
            f"the teacher does not have {listing(list(recipe.model.add_tokens))}, which the student gets",
            "model.add_tokens",
            "remove it",
            at_key=True,
        )
    elif (difference := _difference(facts)) is not None:
        yield Diagnostic(
            E0529,
            f"the teacher's tokenizer is not the student's: {difference}",
            f"{TEACHER}.id",
            "choose a teacher with the student's tokenizer, such as a larger model of the same series",
        )
    if teacher is not None:
        yield from _fits(facts)


def _difference(facts: Facts) -> str | None:
    """Describe the first difference of the tokenizers, if both are next to the recipe."""
    assert facts.recipe.train.distill is not None
    student = None if facts.recipe.model.tokenizer else facts.token_ids
    teacher = facts.token_ids_of(facts.recipe.train.distill.teacher.id)
    return None if student is None or teacher is None else first_difference(student, teacher)


def _fits(facts: Facts) -> Iterator[Diagnostic]:
    """Compare the teacher's sizes with the student's, with the rows, and with the mesh."""
    teacher, model = facts.teacher, facts.model
    assert teacher is not None
    most, length = teacher.positions(), facts.recipe.data.max_length
    if most is not None and length > most:
        yield Diagnostic(
            W0532,
            f"max_length is {length:,}, and the teacher {teacher.title} has {most:,} positions: it does not "
            "know the positions of longer samples",
            "data.max_length",
            f"max_length: {most}",
        )
    tp = facts.axes.get("tp", 1)
    sizes = tp_sizes(teacher.architecture, tp) if teacher.family.tunix else [tp]
    if tp not in sizes:
        devices, largest = math.prod(facts.axes.values()) // facts.axes.get("dcn", 1), sizes[-1]
        yield Diagnostic(
            E0533,
            f"tp {tp} does not divide the heads of the teacher {teacher.title}",
            facts.first_given("mesh.axes.tp", "mesh.axes"),
            f"axes: {flow(arranged(facts.axes.get('dcn', 1), devices // largest, largest))}",
        )
    if model is None:
        return
    rows = [side.architecture.vocab_size for side in (model, teacher)]
    if rows[0] != rows[1]:
        yield Diagnostic(
            N0530,
            f"the teacher's embedding has {rows[1]:,} rows and the student's {rows[0]:,}: the loss compares "
            f"the first {min(rows):,}",
            f"{TEACHER}.id",
            "nothing, if both models have the same tokenizer, which train.py checks",
        )
