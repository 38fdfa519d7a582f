"""The model: whether this Tunix trains it right, and how it computes."""

from __future__ import annotations

from collections.abc import Iterator

from compiler import catalog
from compiler.facts import Facts
from spec.diagnostics import Diagnostic


def check(facts: Facts) -> Iterator[Diagnostic]:
    model, section = facts.model, facts.recipe.model
    if model is not None:
        reason = model.family.untrainable(model.architecture)
        if reason:
            yield Diagnostic(
                "E0805",
                f"{model.title} is not trained right by this version: {reason}",
                "model.id",
                "choose a dense model, for example google/gemma-4-31B-it or google/gemma-3-4b-it",
            )
    if catalog.is_directory(section.id) and section.revision is not None:
        yield Diagnostic(
            "W0806",
            f"model.revision has no effect: `{section.id}` is a directory",
            "model.revision",
            "remove it, or write the Hugging Face id as model.id",
        )
    if section.dtype == "float32" and facts.accelerator is not None and facts.accelerator.platform == "tpu":
        yield Diagnostic(
            "W0807",
            "the base weights are held and computed in float32: twice the memory of bfloat16, and the TPU's "
            "matrix units run at a fraction of their bfloat16 rate",
            "model.dtype",
            "dtype: bfloat16; adapters and optimizer state stay float32 (lora.dtype)",
        )
