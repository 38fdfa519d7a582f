"""Write the positions of the catalog's models into compiler/data/models.json.

    python -m scripts.positions

positions.json holds them by source: max_position_embeddings of each model's config.json, as copies of that
file or tables made from it have it. Only what a source confirms is in it. A model without an entry, and
without the key in the catalog before, has no known positions: the checks say nothing about its lengths.
tests/compiler/test_positions.py compares the catalog with the record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[1] / "compiler" / "data" / "models.json"
RECORD = Path(__file__).with_name("positions.json")
KEY = "max_position_embeddings"


def main() -> int:
    data = json.loads(MODELS.read_text(encoding="utf-8"))
    MODELS.write_text(json.dumps(written(data, read()), indent=1) + "\n", encoding="utf-8")
    return 0


def read() -> dict[str, int]:
    """Read the record as {id: positions}."""
    by_source: dict[str, dict[str, int]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: number for models in by_source.values() for name, number in models.items()}


def written(data: dict[str, Any], known: dict[str, int]) -> dict[str, Any]:
    """Return the content of models.json with the positions of the record.

    An entry that is like another one inherits its config. It gets its own value, null for an unknown one,
    where the other's comes from the record and differs.
    """
    for name, entry in data.items():
        base = entry.get("like")
        if name in known and (base is None or known.get(base) != known[name]):
            _text(entry, data)[KEY] = known[name]
        elif name not in known and base in known:
            _text(entry, data)[KEY] = None
    return data


def _text(entry: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the entry's own part of the config that describes the language model."""
    config: dict[str, Any] = entry.setdefault("config", {})
    nested = "text_config" in (data[entry["like"]] if "like" in entry else entry)["config"]
    text: dict[str, Any] = config.setdefault("text_config", {}) if nested else config
    return text


if __name__ == "__main__":
    sys.exit(main())
