"""What the tools call models, chat templates and tokenizers: data/port_models.json, read once.

Everything in this room that knows a family by its name asks here:

    tokenizers      families whose models have several tokenizers, told by the size of their vocabulary
    torchtune       builders (without lora_ and qlora_) with the checkpoints that they are for; what its
                    tokenizers write around messages
    litgpt          its names of models, with their ids
    maxtext         its names of models that are not in its own table of ids
    tunix           its ids of models, with those of the hub
    llamafactory    parts of names of vision towers, by family
    swift           the template that it takes for a model, by what the id has: the first that fits
    axolotl         chat templates that are a tokenizer's own; tokenizers whose chat-tuned models end a turn
                    with their eos_token
    unsloth         its names of templates that are a tokenizer's own, by Axolotl's
    marks           marks of templates, with the tokenizers in which they are tokens; to others they are text
    adds_bos        tokenizers that begin each text with their bos_token
    experts         what linear layers of experts are as parameters, by family, as PEFT reads target modules;
                    the families for which transformers has a load-balancing loss, with its coefficient
    peft            target modules where none are given; the Linear modules of vision towers, by family; what
                    the names of a multimodal checkpoint's language model begin with, where it is not usual

What the tools' templates write, by name, is data/chat_templates.json, made by scripts/chat_templates.py: rows
of meaning.templates.Turns as JSON, where {bos_token} and {eos_token} stand for the tokenizer's own. `like` of
a tokenizer of torchtune names a template of LLaMA-Factory's whose values hold where the row has none.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.catalog import Model

DATA = Path(__file__).parents[1] / "data" / "port_models.json"
TEMPLATES = DATA.with_name("chat_templates.json")


@functools.cache
def known(*keys: str) -> Mapping[str, Any]:
    """The part of the table at these keys."""
    found: Any = json.loads(DATA.read_text(encoding="utf-8")) if len(keys) < 2 else known(*keys[:-1])
    return found[keys[-1]] if keys else found


def written_by(tool: str) -> Mapping[str, Any]:
    """A tool's chat templates by name: rows of Turns, or why one is none."""
    found: Mapping[str, Any] = _templates()[tool]["templates"]
    return found


@functools.cache
def _templates() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(TEMPLATES.read_text(encoding="utf-8"))
    return found


def tokenizer_of(model: Model) -> str:
    """The tokenizer of a model, by its family, or by its family and vocabulary: "llama2", "qwen3"."""
    sizes = known("tokenizers").get(model.family.name, {})
    name: str = sizes.get(str(model.architecture.vocab_size), model.family.name)
    return name
