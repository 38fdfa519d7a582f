"""What a recipe trains in addition to adapters, or of all weights without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .adapters import EMBEDDING, PROJECTOR, TOKEN_ROWS, LoraSettings, matches
from .families.family import Parameter, Source
from .families.vision import PROJECTING


def trained_whole(parameters: Sequence[Parameter], lora: LoraSettings | None) -> tuple[Parameter, ...]:
    """Return the arrays that a recipe's lora.modules_to_save selects, in the model's order, and that of
    lora.trainable_tokens."""
    names = lora.modules_to_save if lora is not None else ()
    whole = tuple(
        parameter
        for parameter in (parameters if names else ())
        if (PROJECTOR in names and parameter.path.startswith(PROJECTING))
        or (
            parameter.trainable
            and any(matches(name, source.module) for name in names for source in parameter.sources)
        )
    )
    embedding = next((parameter for parameter in parameters if parameter.path == EMBEDDING), None)
    if (
        lora is None or not lora.trainable_tokens or embedding is None
    ):  # transformers' models have no such path
        return whole
    return (*whole, _rows(embedding, lora))


def _rows(embedding: Parameter, lora: LoraSettings) -> Parameter:
    """Return the trained rows of the embedding as an array [tokens, D], ordered as lora.trainable_tokens.

    Its tensor is the one that PEFT saves.
    """
    shape = (len(lora.trainable_tokens), embedding.shape[1])
    name = f"{embedding.sources[0].module}.token_adapter.trainable_tokens_delta"
    return Parameter(TOKEN_ROWS, shape, (None, embedding.spec[1]), (Source(name, shape, shape, (0, 1)),))


def train_only(parameters: Sequence[Parameter], names: Sequence[str]) -> tuple[Parameter, ...]:
    """Return the arrays; those that a recipe's train.trainable_modules does not select are frozen."""
    if not names:
        return tuple(parameters)
    return tuple(
        parameter if any(selected(parameter, names)) else replace(parameter, frozen=True)
        for parameter in parameters
    )


def selected(parameter: Parameter, names: Sequence[str]) -> list[bool]:
    """Return for each tensor of an array whether any of the names matches its module."""
    return [any(matches(name, source.module) for name in names) for source in parameter.sources]
