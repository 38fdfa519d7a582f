"""The semantic checks: one module per section of the recipe, each a function from facts to findings."""

from __future__ import annotations

from compiler.checks import (
    availability,
    data,
    formats,
    lora,
    mesh,
    model,
    paths,
    quantized,
    serve,
    sharding,
    train,
)
from compiler.facts import Facts
from spec.diagnostics import Diagnostic

CHECKS = (
    model.check,
    mesh.check,
    sharding.check,
    lora.check,
    formats.check,
    data.check,
    train.check,
    quantized.check,
    serve.check,
    paths.check,
    availability.check,
)


def run_checks(facts: Facts) -> list[Diagnostic]:
    """Every finding of every check, in the order of the sections."""
    return [diagnostic for check in CHECKS for diagnostic in check(facts)]


__all__ = ["CHECKS", "run_checks"]
