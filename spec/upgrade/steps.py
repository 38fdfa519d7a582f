"""From each version of the language to the next one."""

from __future__ import annotations

from collections.abc import Callable

from spec.upgrade.draft import Draft

Step = Callable[[Draft], None]
"""Brings one file of a recipe from a version to the next, by what a Draft can do. Moves come first: what
follows uses the names of the new version."""

STEPS: dict[int, Step] = {}
"""By the version that it starts from. Version 1 is the first one, so that there is none yet; no step is ever
removed, and `recipe upgrade` takes a recipe of any age to the version that is read."""
