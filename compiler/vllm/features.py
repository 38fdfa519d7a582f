"""Features of the pinned vllm-tpu besides serving merged weights: compiler/data/vllm_features.json.

The file is written by hand from the sources that it names. tests/e2e/test_serve_flags.py checks it
against them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.catalog import architecture_class
from recipec.compiler.vllm.flags import by_flag, flags
from recipec.compiler.vllm.lengths import overrides
from recipec.runtime.model.adapters import principal

if TYPE_CHECKING:
    from recipec.spec.language import Recipe, Serve

DATA = Path(__file__).parent.parent / "data" / "vllm_features.json"

IMPLEMENTATION = "MODEL_IMPL_TYPE"
ONE_PROCESS = "TPU_MULTIPROCESS_DP"


@cache
def features() -> dict[str, Any]:
    """Return the content of the file; it is read on the first call."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def implementation(config: Mapping[str, Any]) -> str | None:
    """Return the implementation that vllm-tpu uses for a checkpoint, by the class in its config.json:
    tpu-inference's "jax", or on torchax vLLM's own ("torch") or "transformers"; None for an unknown class."""
    name, models = architecture_class(config), features()["models"]
    return next((kind for kind in ("jax", "torch", "transformers") if name in models[kind]), None)


def served_config(config: Mapping[str, Any], serve: Serve) -> Mapping[str, Any]:
    """Return a checkpoint's config.json with the class that --hf-overrides names, if it names one."""
    named = overrides(by_flag(serve.extra_args)).get("architectures")
    return {**config, "architectures": named} if isinstance(named, list) and named else config


def runs_jax_model(config: Mapping[str, Any], serve: Serve) -> bool:
    """Return whether tpu-inference's own JAX model runs, rather than vLLM's on torchax."""
    return implementation(served_config(config, serve)) == "jax" and serve.env.get(IMPLEMENTATION) != "vllm"


def takes_adapters(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM's model of a checkpoint, or the one from transformers inside it, supports LoRA."""
    without = features()["models"]["without_adapters"]
    return implementation(config) is not None and architecture_class(config) not in without


def head_is_embedding(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM's own model of a checkpoint with a tied head multiplies with the embedding itself.

    In the others, the head is a layer of its own. tpu-inference places the weights of each layer, so that
    tied ones are in memory twice."""
    return architecture_class(config) in features()["models"]["head_is_embedding"]


def replicas_in_one_process(serve: Serve) -> bool:
    """Return whether several replicas run in one process, as `vllm serve` does if a flag says so."""
    return serve.data_parallel_size > 1 and serve.env.get(ONE_PROCESS, "").lower() in ("0", "false")


def adapter_rank(recipe: Recipe) -> int:
    """Return the largest rank of the recipe's adapter, which vLLM checks; 0 without a lora section."""
    if recipe.lora is None:
        return 0
    largest = max([recipe.lora.rank, *recipe.lora.rank_pattern.values()])
    return 2 * largest if principal(recipe.lora.init) else largest


def lora_ranks() -> tuple[int, ...]:
    """Return the values that --max-lora-rank accepts, in ascending order."""
    return tuple(map(int, flags()["max-lora-rank"].choices))


def max_lora_rank(recipe: Recipe) -> int | None:
    """Return the smallest --max-lora-rank that holds the recipe's adapter; None if none does."""
    rank = adapter_rank(recipe)
    return next((size for size in lora_ranks() if size >= rank), None)
