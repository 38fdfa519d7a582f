"""Measure generation with a cache against Tunix's sampler, on the same checkpoint, prompts and CPU.

python -m tests.bench.decoding short|long    one line of JSON: tokens a second
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Case:
    """A Gemma 3 of six layers, and what it generates.

    Attributes:
        sizes: changes to its config.json.
        prompt, most: tokens of a prompt, and new tokens.
    """

    sizes: dict[str, int]
    prompt: int
    most: int


HEADS = {"head_dim": 64, "query_pre_attn_scalar": 64, "num_attention_heads": 4}
SHORT = Case(
    {
        **HEADS,
        "vocab_size": 65_536,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_key_value_heads": 1,
        "sliding_window": 64,
    },
    prompt=32,
    most=64,
)
"""The output head takes most of a step, as in Gemma 3 270M."""
LONG = Case(
    {
        **HEADS,
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_key_value_heads": 4,
        "sliding_window": 128,
    },
    prompt=64,
    most=256,
)
"""Reading the cache takes most of a step. A call takes seconds, and there are 17."""
CASES = {"short": SHORT, "long": LONG}
ROWS = 16
REPEATS = 2


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


def measure(case: Case, folder: Path) -> dict[str, float]:
    """Return the tokens a second of each, greedy and at temperature 1, the fastest of REPEATS calls.

    "whole" is this project's decoder, greedy, if each pass reads all slots of the cache.
    """
    import jax
    import numpy as np
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler

    from recipec.runtime.model import cache
    from recipec.runtime.model.decode import Generation, jit_generate, right_padded
    from recipec.runtime.model.sampling import Sampling, salts_of
    from tests import tiny, tunix_models
    from tests.runtime import training

    prompt, most, vocabulary = case.prompt, case.most, case.sizes["vocab_size"]
    tiny.make_gemma3(folder, **case.sizes)
    mesh, built = training.build(folder, {"fsdp": 1}, full=True)
    graph, trained, base = nnx.split(built.model, nnx.Param, ...)
    tokens = np.random.default_rng(0).integers(3, vocabulary, (ROWS, prompt)).astype(np.int32)
    tokens[:, 0] = 2
    batch = right_padded(tokens, [prompt] * ROWS, salts_of(0, np.arange(ROWS), np.zeros(ROWS, np.int32)))
    model = tunix_models.load(folder, built.forward.architecture)
    sizes = CacheConfig(prompt + most, 6, case.sizes["num_key_value_heads"], case.sizes["head_dim"])
    sampler = Sampler(model, Numbers(), sizes)
    texts = [" ".join(map(str, row[1:])) for row in tokens.tolist()]  # the sampler adds the first token
    never = (vocabulary,)

    def generate(temperature: float) -> Any:
        return run(f"{temperature}", temperature)

    def whole() -> Any:
        with (
            mock.patch.object(cache, "sizes_read", lambda prompts, slots, reach: (slots,)),
        ):
            return run("whole", 0.0)

    def run(name: str, temperature: float) -> Any:
        generation = Generation(most, never, Sampling(temperature))
        if name not in programs:
            merge = functools.partial(nnx.merge, graph)
            programs[name] = jit_generate(built.forward, merge, mesh, generation)
        with mesh:
            return jax.block_until_ready(programs[name](trained, base, batch))

    def sample(temperature: float) -> Any:
        top_p = 1.0 if temperature else None
        return sampler(texts, most, prompt, eos_tokens=never, temperature=temperature, top_p=top_p, seed=0)

    programs: dict[str, Any] = {}
    found = {"whole": fastest(whole)}
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        found[name] = fastest(functools.partial(generate, temperature))
        found[f"tunix-{name}"] = fastest(functools.partial(sample, temperature))
    ours, theirs = np.asarray(generate(0.0).tokens), sample(0.0).tokens
    same = sum(np.array_equal(row, np.asarray(other)) for row, other in zip(ours, theirs, strict=True))
    return {**{name: ROWS * most / seconds for name, seconds in found.items()}, "same": same}


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
        print(json.dumps(measure(CASES[sys.argv[1]], Path(folder))))
