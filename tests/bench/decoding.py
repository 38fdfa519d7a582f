"""Measure generation with a cache against Tunix's sampler, on the same checkpoint, prompts and CPU.

python -m tests.bench.decoding    one line of JSON: tokens a second
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, PROMPT, MOST = 16, 32, 64
SIZES = {
    "vocab_size": 65_536,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 64,
}
"""A Gemma 3 of six layers whose output head takes most of a step, as in Gemma 3 270M."""
REPEATS = 3


class Numbers:
    """A tokenizer of texts that are token ids with spaces between them."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 2

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0


def measure(folder: Path) -> dict[str, float]:
    """Return the tokens a second of each, greedy and at temperature 1, the fastest of REPEATS calls."""
    import jax
    import numpy as np
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler

    from recipec.runtime.model.decode import Generation, jit_generate, right_padded
    from recipec.runtime.model.sampling import Sampling, salts_of
    from tests import tiny, tunix_models
    from tests.runtime import training

    tiny.make_gemma3(folder, **SIZES)
    mesh, built = training.build(folder, {"fsdp": 1}, full=True)
    graph, trained, base = nnx.split(built.model, nnx.Param, ...)
    tokens = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (ROWS, PROMPT)).astype(np.int32)
    tokens[:, 0] = 2
    batch = right_padded(tokens, [PROMPT] * ROWS, salts_of(0, np.arange(ROWS), np.zeros(ROWS, np.int32)))
    model = tunix_models.load(folder, built.forward.architecture)
    sizes = CacheConfig(PROMPT + MOST, 6, SIZES["num_key_value_heads"], SIZES["head_dim"])
    sampler = Sampler(model, Numbers(), sizes)
    texts = [" ".join(map(str, row[1:])) for row in tokens.tolist()]  # the sampler adds the first token
    never = (SIZES["vocab_size"],)

    def generate(temperature: float) -> Any:
        generation = Generation(MOST, never, Sampling(temperature))
        if temperature not in programs:
            merge = functools.partial(nnx.merge, graph)
            programs[temperature] = jit_generate(built.forward, merge, mesh, generation)
        with mesh:
            return jax.block_until_ready(programs[temperature](trained, base, batch))

    def sample(temperature: float) -> Any:
        top_p = 1.0 if temperature else None
        return sampler(texts, MOST, PROMPT, eos_tokens=never, temperature=temperature, top_p=top_p, seed=0)

    programs: dict[float, Any] = {}
    found = {}
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        found[name] = fastest(functools.partial(generate, temperature))
        found[f"tunix-{name}"] = fastest(functools.partial(sample, temperature))
    ours, theirs = np.asarray(generate(0.0).tokens), sample(0.0).tokens
    same = sum(np.array_equal(row, np.asarray(other)) for row, other in zip(ours, theirs, strict=True))
    return {**{name: ROWS * MOST / seconds for name, seconds in found.items()}, "same": same}


def fastest(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of REPEATS calls, after one that compiles."""
    call()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder))))
