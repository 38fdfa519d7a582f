"""Pictures in a tool's run: whether the recipe's model reads them, and what the recipe says of them."""

from __future__ import annotations

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
    """Return whether the model's family has its vision tower here."""
    return model.family.vision(model.config) is not None


def say_images(
    keys: Keys, key: str, model: Model | None, objective: str, note: str = "", help: str = WITHOUT
) -> Statements[bool]:
    """State the key that turns pictures on; return whether the recipe has them.

    Args:
        model: None if it is not known, which is an error of its own.
        note: how the recipe's pictures differ.
        help: how to do without pictures.
    """
    if model is not None and not has_tower(model):
        yield keys.refuse(key, E1150, NO_TOWER.format(key, model.title), help)
        return False
    if objective != "sft":
        yield keys.refuse(key, E1150, OTHER_OBJECTIVE.format(key), help)
        return False
    yield keys.say(key, {IMAGES: {}}, note)
    return True


def trained_on(keys: Keys) -> bool:
    """Return whether an earlier rule turned pictures on."""
    return keys.ledger.value(IMAGES) is not None
