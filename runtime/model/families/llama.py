"""Llama 1, 2 and 3, and models of the same form: TinyLlama, Yi, SmolLM, Falcon 3, distillations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import MULTIMODAL, DecoderFamily
from .family import LLAMA3, Architecture

LLAMA3_VOCABULARY = 128_256


class Llama(DecoderFamily):
    name = "llama"
    title = "Llama"
    wrappers = ("llava", "llava_next")
    prefixes = MULTIMODAL
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }

    def markers(self, architecture: Architecture) -> tuple[str, ...]:
        """Return Llama 3's markers if the vocabulary is Llama 3's; the markers of other models differ."""
        return LLAMA3 if architecture.vocab_size == LLAMA3_VOCABULARY else ()


FAMILY = Llama()
