"""The semantic checks: one module per section of the recipe, each with a function from facts to
diagnostics."""

from __future__ import annotations

from recipec.compiler.checks import (
    as_it_is,
    data,
    distill,
    evaluate,
    formats,
    images,
    launch,
    lora,
    mesh,
    model,
    paths,
    qat,
    quantized,
    reinforcement,
    samples,
    sharding,
    start_from,
    tensors,
    train,
    xla,
)
from recipec.compiler.checks import server as serve
from recipec.compiler.checks import server_cache as serve_plan
from recipec.compiler.checks import server_flags as serve_flags
from recipec.compiler.checks import server_weights as serve_weights
from recipec.compiler.lowering.facts import Facts
from recipec.spec.diagnostics import Diagnostic

CHECKS = (
    model.check,
    as_it_is.check,
    tensors.check,
    mesh.check,
    sharding.check,
    xla.check,
    lora.check,
    start_from.check,
    formats.check,
    data.check,
    images.check,
    samples.check,
    train.check,
    reinforcement.check,
    distill.check,
    qat.check,
    quantized.check,
    serve.check,
    serve_flags.check,
    serve_weights.check,
    serve_plan.check,
    evaluate.check,
    paths.check,
    launch.check,
)


def run_checks(facts: Facts) -> list[Diagnostic]:
    """Return every diagnostic of every check, in the order of the sections."""
    return [diagnostic for check in CHECKS for diagnostic in check(facts)]


__all__ = ["CHECKS", "run_checks"]
