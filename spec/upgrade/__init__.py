"""Recipes of older versions of the language, rewritten in the one that this compiler reads."""

from spec.upgrade.files import File, Upgraded, upgrade
from spec.upgrade.steps import STEPS

__all__ = ["STEPS", "File", "Upgraded", "upgrade"]
