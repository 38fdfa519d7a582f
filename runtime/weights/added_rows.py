"""A checkpoint whose embedding and head have additional rows for new tokens.

Each added row is the mean of the checkpoint's rows. transformers' resize_token_embeddings (mean_resizing)
draws around that mean with a billionth of the rows' covariance; nothing is drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .agreement import embeddings, heads_of
from .headers import ITEM_BYTES, Tensor, View, numpy_type

if TYPE_CHECKING:
    import numpy as np

    from .checkpoint import HFCheckpoint

BLOCK_ROWS = 4096
"""Number of rows that are summed at a time."""


def with_vocabulary(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a config.json with this vocabulary size in all places that state it."""
    changed = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        changed["text_config"] = with_vocabulary(config["text_config"], rows)
    if "vocab_size" in config or "text_config" not in changed:
        changed["vocab_size"] = rows
    return changed


def grown(base: HFCheckpoint, rows: int) -> HFCheckpoint:
    """Return the checkpoint with this many rows in its embedding and head.

    Raises:
        UserError: when it has more rows.
    """
    vocabulary = base.architecture.vocab_size
    if rows < vocabulary:
        raise UserError(
            f"{base.name}: its embedding has {vocabulary} rows, and the recipe was compiled for {rows}",
            "give the checkpoint of the recipe's model.id with --model",
        )
    wanted = {*(name for _, name in embeddings(base.family)), *heads_of(base.family)}
    replaced: dict[str, Tensor] = {
        name: Grown(t.file, t.dtype, (rows, *t.shape[1:]), t.start, t.end, t)
        for name, t in base.tensors.items()
        if name in wanted and t.shape[:1] == (vocabulary,)
    }
    tensors = {**base.tensors, **replaced}
    config = with_vocabulary(base.config, rows)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    headers = {
        file: replace(header, tensors={name: tensors[name] for name in header.tensors})
        for file, header in base.headers.items()
    }
    architecture = base.family.architecture_of(config, shapes)
    return replace(base, config=config, architecture=architecture, tensors=tensors, headers=headers)


@dataclass(frozen=True)
class Grown(Tensor):
    """A tensor with additional rows.

    Attributes:
        start, end: place of its own rows in their file.
        tensor: the stored tensor.
        means: its rows' mean, after the first request.
    """

    tensor: Tensor
    means: list[np.ndarray] = field(default_factory=list, compare=False, repr=False)

    @property
    def size(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def bytes_of(self, view: View, start: int, end: int) -> memoryview:
        import numpy as np

        here = self.tensor.size
        if end <= here:
            return self.tensor.bytes_of(view, start, end)
        if not self.means:
            self.means.append(self._mean(view))
        row = self.means[0].nbytes
        first, last = max(start - here, 0), end - here
        added = np.tile(self.means[0].view(np.uint8), -(-last // row))[first:last]
        if start >= here:
            return added.data.toreadonly()
        before = np.frombuffer(self.tensor.bytes_of(view, start, here), np.uint8)
        return np.concatenate([before, added]).data.toreadonly()

    def _mean(self, view: View) -> np.ndarray:
        """Return the mean of the rows, in their type; the sum is in float64."""
        import numpy as np

        count, width = self.tensor.shape
        step = BLOCK_ROWS * self.tensor.size // count
        total = np.zeros(width)
        for start in range(0, self.tensor.size, step):
            data = self.tensor.bytes_of(view, start, min(start + step, self.tensor.size))
            total += np.frombuffer(data, numpy_type(self.dtype)).reshape(-1, width).sum(0, np.float64)
        return (total / count).astype(numpy_type(self.dtype))
