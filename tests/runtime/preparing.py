"""Conversations in files, prepared for training, and the contents of their micro-batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from recipec.runtime.data.prepare import PreparedData, prepare
from recipec.runtime.settings import DataSettings, TrainSettings
from tests.runtime.chats import chat, tokenizer

WORDS = ["the", "quick", "brown", "fox", "says", "hello", "to", "a", "world", "and", "thinks"]


def conversations(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    draw = random.Random(seed)

    def say(longest: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    return [chat(f"{i} {say(6)}", say(9), *((say(3), say(5)) if i % 3 == 0 else ())) for i in range(count)]


def prepared(
    folder: Path,
    rows: int = 4,
    batch: int = 8,
    epochs: int | None = 3,
    steps: int | None = None,
    **settings: Any,
) -> PreparedData:
    normalization = settings.pop("loss_normalization", "tokens")
    data = DataSettings(**{"packing": False, "train": ("train.jsonl",), "max_length": 96, **settings})
    train = TrainSettings(
        epochs=epochs,
        steps=steps,
        global_batch_size=batch,
        micro_batch_size=1,
        loss_normalization=normalization,
    )
    return prepare(data, train, rows, tokenizer(), folder)


def pieces(batch: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Return the samples of a micro-batch, as token ids."""
    out = []
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        out += [tuple(tokens[segments == s].tolist()) for s in range(1, int(segments.max()) + 1)]
    return out


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
