"""serve/smoke.sh: the questions that a new server is asked before its clients come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compiler import pins
from compiler.emitters.folders import assignment
from compiler.render import render
from compiler.serving.container import container
from compiler.serving.weights import model_weights
from compiler.sources import asks_chats
from runtime.serving.evaluate_prompts import parse

if TYPE_CHECKING:
    from compiler.program import Program
    from spec.language import Recipe

TAKEN = 3
"""Prompts of the evaluation that are asked here too."""

LONGEST = 200
"""Characters of such a prompt: it stands in a script."""


def emit_smoke(program: Program) -> dict[str, str]:
    """smoke.sh by its path; nothing without a `serve` section."""
    recipe = program.recipe
    if recipe.serve is None:
        return {}
    server = container(recipe, program.family.name)
    text = render(
        "serve/smoke.sh",
        url=server.health_url.removesuffix("/health"),
        name=server.name,
        base=f"{server.name}-base" if recipe.serve.weights == "adapter" else None,
        wait=server.startup_minutes,
        vllm=pins.sets()["serve"]["vllm-tpu"],
        api_key=server.api_key,
        weights=_weights(recipe),
        text=not asks_chats(recipe),
        must_differ=recipe.serve.smoke_prompts,
        prompts=[] if recipe.serve.smoke_prompts else _evaluated(program),
    )
    return {"serve/smoke.sh": text}


def _weights(recipe: Recipe) -> list[str]:
    """Lines that set `model` to the merged weights' folder; none for an adapter, or weights of elsewhere."""
    assert recipe.serve is not None
    weights = model_weights(recipe)
    if recipe.serve.weights != "merged" or weights.kind != "folder" or not weights.address:
        return []
    return assignment("model", weights, recipe.name)


def _evaluated(program: Program) -> list[str]:
    """The first short prompts of evaluate.prompts; none where the file is elsewhere or not to be read."""
    path = program.recipe.evaluate.prompts
    if path is None or "://" in path:
        return []
    chat = asks_chats(program.recipe)
    prompts, _ = parse(program.source.parent / path, chat)
    texts = (_turn(prompt.messages) if chat else prompt.text for prompt in prompts)
    return [text for text in texts if text and text.isprintable() and len(text) <= LONGEST][:TAKEN]


def _turn(messages: Sequence[Mapping[str, Any]] | None) -> str | None:
    """The text of a chat of one turn."""
    turn = messages[0] if messages is not None and len(messages) == 1 else {}
    text = turn.get("content")
    return text if turn.get("role") == "user" and isinstance(text, str) else None
