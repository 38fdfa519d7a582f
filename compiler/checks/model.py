"""The model: what is said of it that has no effect, how it computes, and where splash attention runs."""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler.lowering import catalog
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.wording import flow, listing
from recipec.runtime.model.adapters import trained_whole
from recipec.spec.diagnostics import Diagnostic


def check(facts: Facts) -> Iterator[Diagnostic]:
    section = facts.recipe.model
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
            "the base weights are stored and computed in float32: this takes twice the memory of bfloat16, "
            "and the TPU computes at a fraction of its bfloat16 rate",
            "model.dtype",
            "dtype: bfloat16; adapters and optimizer state stay float32 (lora.dtype)",
        )
    yield from _attention(facts)
    yield from _tokens(facts)
    left_out = getattr(facts.model.architecture, "dropout", ()) if facts.model else ()
    if left_out:
        asked = listing(f"{key} {rate:g}" for key, rate in left_out)
        yield Diagnostic(
            "W0805",
            f"`{section.id}` is trained without the dropout or noise in its config.json: {asked}",
            "model.id",
            "use lora.dropout for dropout of the adapters' inputs",
        )


def _tokens(facts: Facts) -> Iterator[Diagnostic]:
    """New tokens: whose tokenizer gets them, and whether their embeddings are trained."""
    recipe = facts.recipe
    if not recipe.model.add_tokens:
        return
    place = "model.add_tokens"
    if recipe.model.tokenizer is not None:
        message = "add_tokens changes the checkpoint's own tokenizer, but model.tokenizer names another"
        yield Diagnostic("E0324", message, place, "remove model.tokenizer")
    if recipe.serve is not None and recipe.serve.weights == "adapter":
        message = "a server with an adapter uses the base's tokenizer, which lacks the new tokens"
        yield Diagnostic("E0324", message, place, "weights: merged in serve")
    lora = recipe.lora
    if facts.lora is not None and lora is not None:
        trained = {s.module for p in trained_whole(facts.defaults, facts.lora) for s in p.sources}
        there = {s.module for p in facts.defaults for s in p.sources}
        missing = [name for name in ("embed_tokens", "lm_head") if name in there - trained]
        if missing:
            message = f"the rows of the new tokens in {listing(missing)} are not trained"
            yield Diagnostic(
                "W0325", message, place, f"train_also: {flow([*lora.train_also, *missing])} in lora"
            )


def _attention(facts: Facts) -> Iterator[Diagnostic]:
    recipe, accelerator = facts.recipe, facts.accelerator
    if recipe.model.attention != "splash":
        if recipe.model.attention_block is not None:
            message = "model.attention_block has no effect: attention dot has no blocks"
            yield Diagnostic("W0806", message, "model.attention_block", "attention: splash, or remove it")
        return
    if accelerator is not None and accelerator.platform != "tpu":
        yield Diagnostic(
            "E0903",
            f"splash attention is a TPU kernel, and {accelerator.name} is a CPU",
            "model.attention",
            "attention: dot",
        )
