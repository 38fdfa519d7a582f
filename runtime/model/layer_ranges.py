"""Read which layers a recipe names."""

from __future__ import annotations

import re
from collections.abc import Sequence


def parse_layers(layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the layer indices of "all", "20-59", "0-4,10" or a list.

    Raises:
        ValueError: for other text, or an index that is not in 0..num_layers-1.
    """
    if layers == "all":
        return tuple(range(num_layers))
    if isinstance(layers, str):
        chosen: list[int] = []
        for part in layers.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            if match is None:
                raise ValueError(f"{part.strip()!r} is neither a layer nor a range such as 20-59")
            first = int(match[1])
            last = int(match[2] or first)
            # A larger range would fill memory before it is refused.
            chosen += range(first, min(last, first + num_layers) + 1)
    else:
        chosen = list(layers)
    outside = [i for i in chosen if not 0 <= i < num_layers]
    if outside:
        raise ValueError(f"layer {outside[0]} is not one of the model's {num_layers} (0 to {num_layers - 1})")
    if not chosen:
        raise ValueError("no layer is chosen")
    return tuple(sorted(set(chosen)))
