"""The tools' names of models, chat templates and tokenizers. They are read once from data/models.json.

All modules of port/ take their names of model families from here:

    tokenizers      families whose models have several tokenizers; the vocabulary size decides which
    torchtune       builders (without lora_ and qlora_) with their checkpoints, and the text that its
                    tokenizers write around messages
    litgpt          its model names, with their ids
    maxtext         its model names that are missing in its own table of ids
    tunix           its model ids, with the ids of the hub
    llamafactory    parts of the names of vision towers, by family or model_type
    swift           its template for a model, by a part of the id; the first match counts
    axolotl         its chat templates that models have as their own, with a pattern of the models' ids;
                    tokenizers whose chat-tuned models end a turn with their eos_token
    unsloth         the same of its templates
    marks           marks of templates, with the tokenizers that have them as tokens; other tokenizers split
                    them as text
    tokens          the number of a tokenizer's tokens, where its models have rows that no token uses
    adds_bos        tokenizers that begin each text with their bos_token
    experts         the parameters that replace the experts' former linear layers, by family, as PEFT reads
                    target modules; families with a load-balancing loss in transformers, with the coefficient
    peft            the default target modules, and the Linear modules of vision towers, by family or
                    model_type; the prefix of the language model's names in multimodal checkpoints, where it
                    is not the usual one

The text that the tools' templates write is in data/chat_templates.json, by template name.
scripts/chat_templates.py makes that file. Its rows are meaning.templates.Turns as JSON, in which {bos_token}
and {eos_token} stand for the tokenizer's own tokens. `like` of a torchtune tokenizer names a template of
LLaMA-Factory, which supplies the values that the row lacks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipec.compiler.catalog import Model

DATA = Path(__file__).parent / "data" / "models.json"
TEMPLATES = DATA.with_name("chat_templates.json")


@functools.cache
def known(*keys: str) -> Mapping[str, Any]:
    """Return the part of the table at these keys."""
    value: Any = json.loads(DATA.read_text(encoding="utf-8")) if len(keys) < 2 else known(*keys[:-1])
    return value[keys[-1]] if keys else value


def of_model(*keys: str, model: Model) -> Any:
    """Return a model's part of the table at these keys, by model_type or else by family; None without one."""
    table = known(*keys)
    return table.get(str(model.config.get("model_type")), table.get(model.family.name))


def written_by(tool: str) -> Mapping[str, Any]:
    """Return a tool's chat templates by name: a row of Turns, or the reason why the template has none."""
    templates: Mapping[str, Any] = _templates()[tool]["templates"]
    return templates


@functools.cache
def _templates() -> Mapping[str, Any]:
    tables: dict[str, Any] = json.loads(TEMPLATES.read_text(encoding="utf-8"))
    return tables


def tokenizer_of(model: Model) -> str:
    """Return a model's tokenizer, by its family, or by family and vocabulary size: "llama2", "qwen3"."""
    sizes = known("tokenizers").get(model.family.name, {})
    name: str = sizes.get(str(model.architecture.vocab_size), model.family.name)
    return name
