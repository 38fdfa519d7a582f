"""Measure tokenizing and packing of a chat file: this project's pipeline against TRL's, in one run.

Both start from the same JSON-lines file, tokenizer and chat template with generation markers, and end with
packed rows and their masks. TRL's part is what its SFTTrainer does to a data set before it trains, with as
many processes as there are cores and nothing cached.

python -m tests.bench.bench_data [--conversations N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

CONVERSATIONS = 20_000
LENGTH = 3072
MEDIAN, SIGMA = 818, 0.488
"""Of the log-normal length in tokens: mean 922, 99th percentile 2,550."""

VOCABULARY = 32_000
TOKENS_A_WORD = 1.17
"""For the tokenizer and the words below, including punctuation."""

TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{{ '<|turn>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' -%}"
    "{% generation %}{{ message['content'] + '<turn|>' }}{% endgeneration %}"
    "{%- else -%}{{ message['content'] + '<turn|>' }}{%- endif -%}"
    "{{ '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|turn>assistant\\n' }}{%- endif -%}"
)


@dataclass(frozen=True)
class Measured:
    """Seconds from the file to packed rows, of each round.

    Attributes:
        tokens: in the rows; the same for both.
        ours, theirs: this project's and TRL's seconds.
        theirs_read: the part of `theirs` that reads the file.
        hit: this project's seconds with cached data.
    """

    tokens: int
    ours: list[float]
    theirs: list[float]
    theirs_read: list[float]
    hit: list[float]

    @property
    def ratio(self) -> float:
        """Return TRL's median time divided by ours."""
        return statistics.median(self.theirs) / statistics.median(self.ours)

    @property
    def ratio_without_reading(self) -> float:
        """Return the same ratio without TRL's reading of the file, which ours includes."""
        rest = [whole - read for whole, read in zip(self.theirs, self.theirs_read, strict=True)]
        return statistics.median(rest) / statistics.median(self.ours)

    def text(self) -> str:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        return (
            f"{self.tokens:,} tokens, median of {len(self.ours)} rounds: "
            f"this project {ours:.1f} s ({self.tokens / ours:,.0f} tokens/s), "
            f"TRL {theirs:.1f} s ({self.tokens / theirs:,.0f} tokens/s): ratio {self.ratio:.2f}, "
            f"without TRL's reading {self.ratio_without_reading:.2f}; "
            f"from the cache {statistics.median(self.hit):.2f} s"
        )


def measure(folder: Path, conversations: int = CONVERSATIONS, rounds: int = 3) -> Measured:
    """Time both, one after the other, several times.

    Args:
        folder: for the file and the caches.

    Raises:
        AssertionError: the two give different numbers of tokens.
    """
    words = vocabulary()
    tokenizer = train_tokenizer(words)
    file = folder / "chats.jsonl"
    write_chats(file, words, conversations)
    import datasets

    datasets.disable_progress_bars()
    ours, theirs, theirs_read, hit, tokens = [], [], [], [], 0
    for number in range(rounds):
        cache = folder / f"cache-{number}"
        seconds, count = _ours(file, tokenizer, cache)
        ours.append(seconds)
        seconds, again = _ours(file, tokenizer, cache)
        hit.append(seconds)
        read, seconds, reference = _theirs(file, tokenizer, folder / f"trl-{number}")
        theirs_read.append(read)
        theirs.append(seconds)
        assert count == again == reference, f"{count} tokens, {again} from the cache, {reference} by TRL"
        tokens = count
        print(
            f"round {number + 1}: {ours[-1]:.1f} s, from the cache {hit[-1]:.2f} s; TRL {theirs[-1]:.1f} s",
            file=sys.stderr,
        )
    return Measured(tokens, ours, theirs, theirs_read, hit)


def _ours(file: Path, tokenizer: Any, cache: Path) -> tuple[float, int]:
    """Return the seconds and the packed tokens."""
    from recipec.runtime.data.prepare import Tokenizing, prepare
    from recipec.runtime.settings import DataSettings, TrainSettings

    data = DataSettings(train=(file.name,), max_length=LENGTH, packing=True, overlong="truncate")
    train = TrainSettings(epochs=1, global_batch_size=8, micro_batch_size=1)
    start = time.perf_counter()
    prepared = prepare(data, train, 8, tokenizer, file.parent, tokenizing=Tokenizing(cache))
    return time.perf_counter() - start, prepared.report.train.row_tokens


def _theirs(file: Path, tokenizer: Any, cache: Path) -> tuple[float, float, int]:
    """Return the seconds of reading and of everything, and the packed tokens."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    # Only the attributes that _prepare_dataset reads: no model is needed.
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=tokenizer.chat_template, completion_only_loss=False
    )
    settings = SFTConfig(
        output_dir=str(cache),
        max_length=LENGTH,
        packing=True,
        packing_strategy="bfd",
        assistant_only_loss=True,
        dataset_num_proc=len(os.sched_getaffinity(0)),
        bf16=False,
        report_to=[],
    )
    start = time.perf_counter()
    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))
    read = time.perf_counter() - start
    packed = SFTTrainer._prepare_dataset(trainer, rows, tokenizer, settings, True, None, "train")
    seconds = time.perf_counter() - start
    return read, seconds, sum(len(ids) for ids in packed.with_format("numpy")["input_ids"])


def vocabulary(count: int = 24_000, seed: int = 0) -> list[str]:
    """Make up words of two to five syllables. The most frequent words come first, and are the shortest."""
    draw = random.Random(seed)
    starts, vowels, ends = "bcdfghjklmnprstvwz", "aeiou", ["", "", "n", "r", "s", "t", "l", "nd", "st"]
    words = dict.fromkeys(
        "".join(
            draw.choice(starts) + draw.choice(vowels) + draw.choice(ends) for _ in range(draw.randint(1, 4))
        )
        for _ in range(count)
    )
    return sorted(words, key=lambda word: (len(word), word))


def train_tokenizer(words: Sequence[str], seed: int = 1) -> Any:
    """Train a byte-level BPE of 32,000 entries on sentences of the words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    random_ = np.random.default_rng(seed)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"]
    backend.train_from_iterator(
        (sentences(words, 400, random_) for _ in range(2000)),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        extra_special_tokens=special[3:],
        chat_template=TEMPLATE,
    )


def sentences(words: Sequence[str], count: int, random_: np.random.Generator) -> str:
    """Draw a text of this many words by Zipf's law."""
    ranks = np.minimum(random_.zipf(1.2, count), len(words)) - 1
    chosen = [words[rank] for rank in ranks.tolist()]
    for i in range(0, count, 11):
        chosen[i] = chosen[i].capitalize()
        if i:
            chosen[i - 1] += random_.choice([".", ".", ",", "?", ".\n"])
    return " ".join(chosen)


def write_chats(file: Path, words: Sequence[str], count: int, seed: int = 2) -> None:
    """Write a chat file whose conversations are as long as the reference data's."""
    random_ = np.random.default_rng(seed)
    with file.open("w", encoding="utf-8") as stream:
        for tokens in random_.lognormal(np.log(MEDIAN), SIGMA, count):
            exchanges = int(random_.integers(1, 4))
            size = max(4, int(tokens / TOKENS_A_WORD / exchanges))
            messages = []
            for _ in range(exchanges):
                asked = max(2, size // 4)
                messages.append({"role": "user", "content": sentences(words, asked, random_)})
                messages.append({"role": "assistant", "content": sentences(words, size - asked, random_)})
            stream.write(json.dumps({"messages": messages}) + "\n")


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.conversations, options.rounds)
    print(measured)
    print(measured.text())


if __name__ == "__main__":
    sys.exit(main())
