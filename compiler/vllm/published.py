"""Published measurements of a server like a recipe's. Only this module reads data/published_serving.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler import catalog

if TYPE_CHECKING:
    from recipec.spec.language import Recipe

DATA = Path(__file__).parents[1] / "data" / "published_serving.json"


@dataclass(frozen=True)
class PublishedServing:
    """Measurements of one server, published by others.

    Attributes:
        source: the paper.
        model: name, as in `catalog.title`.
        accelerator, tensor_parallel_size, data_parallel_size, kv_cache_dtype: what the server ran with.
        usd_per_hour: price of the machine.
        weights_gb_per_chip: in units of 10^9 bytes.
        ttft_ms, tpot_ms: "lowest" and "highest" of all measurements.
        by_input_length: for each prompt length in tokens, "peak_output_tokens_per_s" over the request rates,
            and "usd_per_million_output_tokens" if it was published.
        median_ttft_ms: one measurement: "input_length", "requests_per_s" and "ms".
    """

    source: str
    model: str
    accelerator: str
    tensor_parallel_size: int
    data_parallel_size: int
    kv_cache_dtype: str
    usd_per_hour: float
    weights_gb_per_chip: float
    ttft_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]
    by_input_length: Mapping[str, Mapping[str, float]]
    median_ttft_ms: Mapping[str, float]

    def is_of(
        self, model: str, accelerator: str, tensor_parallel: int, data_parallel: int, kv_cache_dtype: str
    ) -> bool:
        """Return whether the server ran this model, by its id, on this accelerator with these settings."""
        return (
            catalog.title(model) == self.model
            and accelerator == self.accelerator
            and (tensor_parallel, data_parallel) == (self.tensor_parallel_size, self.data_parallel_size)
            and kv_cache_dtype.startswith(self.kv_cache_dtype)
        )


@functools.cache
def serving() -> PublishedServing:
    """Return the published measurements."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return PublishedServing(**data)


def of_recipe(recipe: Recipe, accelerator: str) -> PublishedServing | None:
    """Return the published measurements of a recipe's server; None if they are of another server.

    Args:
        accelerator: what it is served on: "v6e-8".
    """
    serve, published = recipe.serve, serving()
    if serve is None or serve.quantization is not None or recipe.merge.quantization is not None:
        return None
    parallel = (serve.tensor_parallel_size, serve.data_parallel_size)
    same = published.is_of(recipe.model.id, accelerator, *parallel, serve.kv_cache_dtype)
    return published if same else None
