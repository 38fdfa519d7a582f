"""Convert a recipe to and from its form in recipe.lock.json, with all defaults and with patterns as pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipec.spec.language import Recipe

PATTERNS = ("rank_pattern", "alpha_pattern")
"""Keys of `lora` recorded as pairs: the first matching pattern wins, and the lock sorts its keys."""


def to_record(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe with all its defaults as JSON values; `extends` has been applied and is left out."""
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude={"extends"})
    lora = values["lora"] or {}
    for name in PATTERNS:
        if lora.get(name):
            lora[name] = [list(pair) for pair in lora[name].items()]
    return values


def from_record(values: Any) -> Any:
    """Return a lock's recipe in the form of the language; an invalid recipe is returned unchanged."""
    if not isinstance(values, Mapping) or not isinstance(values.get("lora"), Mapping):
        return values
    lora = dict(values["lora"])
    for name in PATTERNS:
        pairs = lora.get(name)
        if isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            lora[name] = {str(pattern): value for pattern, value in pairs}
    return {**values, "lora": lora}
