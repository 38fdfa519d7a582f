"""What the tools call models, chat templates and tokenizers: data/port_models.json, read once.

Everything in this room that knows a family by its name asks here:

    tokenizers      families whose models have several tokenizers, told by the size of their vocabulary
    torchtune       builders (without lora_ and qlora_) with the checkpoints that they are for; what its
                    tokenizers write around messages
    litgpt          its names of models, with their ids; prompt styles that are a tokenizer's chat template
    maxtext         its names of models that are not in its own table of ids
    llamafactory    what its templates write; parts of names of vision towers, by family
    swift           what its templates write; the template that it takes for a model, by what the id has: the
                    first that fits
    axolotl         chat templates that are a tokenizer's own; what others write; tokenizers whose chat-tuned
                    models end a turn with their eos_token
    experts         what linear layers of experts are as parameters, by family, as PEFT reads target modules;
                    the families for which transformers has a load-balancing loss, with its coefficient
    peft            target modules where none are given; the Linear modules of vision towers, by family; what
                    the names of a multimodal checkpoint's language model begin with, where it is not usual

Rows of templates are Turns as JSON, where {bos_token} and {eos_token} stand for the tokenizer's own. `like`
names a row of LLaMA-Factory's whose values hold where the row has none of its own. `tokens` are the
tokenizers in which the marks are tokens; to all others they are text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.catalog import Model

DATA = Path(__file__).parents[1] / "data" / "port_models.json"


@functools.cache
def known(*keys: str) -> Mapping[str, Any]:
    """The part of the table at these keys."""
    found: Any = json.loads(DATA.read_text(encoding="utf-8")) if len(keys) < 2 else known(*keys[:-1])
    return found[keys[-1]] if keys else found


def tokenizer_of(model: Model) -> str:
    """The tokenizer of a model, by its family, or by its family and vocabulary: "llama2", "qwen3"."""
    sizes = known("tokenizers").get(model.family.name, {})
    name: str = sizes.get(str(model.architecture.vocab_size), model.family.name)
    return name
