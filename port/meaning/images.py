"""Pictures in a tool's run: whether the recipe's model reads them, and what the recipe says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipec.compiler.catalog import Model
from recipec.port.engine import Statements
from recipec.port.keys import Keys
from recipec.port.refusals import E1150

IMAGES = "data.images"

NO_TOWER = "`{}` is for pictures, and recipec has no vision tower for {}"
OTHER_OBJECTIVE = "`{}` is for pictures: recipec trains on pictures by supervised fine-tuning alone"
WITHOUT = "train on text: remove the key, and use data sets of text"

NOT_CARRIED = "{} has pictures, which recipe port does not carry over from {}"
AFTERWARDS = "port a config of text, and add data.images to the recipe (docs/images.md)"
"""What a dialect without rules for pictures says of them, and the way out."""


def has_tower(model: Model) -> bool:
    """Return whether this version computes the model's vision tower."""
    return model.tower is not None


def say_images(
    keys: Keys,
    key: str,
    model: Model | None,
    objective: str,
    sets: Mapping[str, Any],
    note: str = "",
    help: str = WITHOUT,
) -> Statements[bool]:
    """State the key that turns pictures on; return whether the recipe has them.

    Args:
        model: None if it is not known, which is an error of its own.
        sets: the section data.images, or keys of it.
        note: how the recipe's pictures differ.
        help: how to do without pictures.
    """
    if model is not None and not has_tower(model):
        yield keys.refuse(key, E1150, NO_TOWER.format(key, model.title), help)
        return False
    if objective != "sft":
        yield keys.refuse(key, E1150, OTHER_OBJECTIVE.format(key), help)
        return False
    yield keys.say(key, sets, note)
    return True


def trained_on(keys: Keys) -> bool:
    """Return whether an earlier rule turned pictures on."""
    return any(path == IMAGES or path.startswith(f"{IMAGES}.") for path in keys.ledger.lines)


BY_SCORES = "the mask follows the pictures: recipec computes all scores"


def needs_scores(keys: Keys, model: Model | None) -> bool:
    """Return whether a picture's tokens see each other both ways: splash's mask does not follow them."""
    tower = None if model is None else model.tower
    return trained_on(keys) and tower is not None and bool(tower.both_ways)
