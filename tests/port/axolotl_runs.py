"""Port a config of Axolotl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipec.compiler.port.ledger import Ledger
from tests.port.dialects import base, ported

BASE = base("axolotl")


def port(folder: Path, devices: int | None = None, **changes: Any) -> Ledger:
    """Port the base config with other keys; None removes a key."""
    content = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    return ported("axolotl", folder, content, devices=devices)
