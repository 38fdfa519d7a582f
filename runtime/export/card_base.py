"""How a model card names the base, and what of the base's own card holds for what was made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.export.card_markdown import code

SITE = "https://huggingface.co"
CARRIED = ("pipeline_tag", "license", "license_name", "license_link", "language", "tags")
"""Metadata of the base's card that hold for what was made of it."""


FRONT_MATTER = 1 << 16
"""Characters of a base's card in which its metadata are looked for."""


class Base:
    """How a card names the base.

    Attributes:
        id: its id on the hub, or the name of its folder: where that lies is nobody's concern.
        on_hub: whether the hub has it.
        revision: on the hub.
    """

    def __init__(self, base: Mapping[str, Any]) -> None:
        self.on_hub = _is_hub_id(base["id"])
        self.id: str = base["id"] if self.on_hub else _last(base["id"])
        self.revision: str | None = base.get("revision") if self.on_hub else None

    @property
    def path(self) -> str:
        """What it is loaded from."""
        return self.id if self.on_hub else f"path/to/{self.id}"

    @property
    def link(self) -> str:
        """Its name in a sentence."""
        if not self.on_hub:
            return code(self.id)
        text = f"[{self.id}]({SITE}/{self.id})"
        return f"{text} at revision {code(self.revision)}" if self.revision else text


def carried(card: str | None) -> dict[str, Any]:
    """What of a base's card holds for a model made of it; {} for one without metadata that can be read."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK, RepoCard

    head = (card or "")[:FRONT_MATTER]
    if not REGEX_YAML_BLOCK.search(head):
        return {}
    try:
        data = RepoCard(head, ignore_metadata_errors=True).data
    except Exception:  # whatever somebody wrote there: the parser raises many kinds
        return {}
    out = {key: _texts(data.get(key)) for key in CARRIED}
    return {key: value for key, value in out.items() if value and (key != "tags" or isinstance(value, list))}


def place(path: str) -> str:
    """A path or an address as a card names it: a path of this machine by its last part alone."""
    local = path.removeprefix("file://")
    return _last(local) if local.startswith(("/", "~")) else path


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _texts(value: Any) -> str | list[str] | None:
    if isinstance(value, list):
        return list(dict.fromkeys(item for item in value if isinstance(item, str)))
    return value if isinstance(value, str) else None


def _is_hub_id(model: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return not model.startswith((".", "/", "~"))
