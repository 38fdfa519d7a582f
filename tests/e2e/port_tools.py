"""Print as JSON the tokens and labels that LLaMA-Factory and Axolotl make of rows, by their own code.

Empty modules replace imported packages that play no part here.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "one turn": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}],
    "two turns": [
        {"role": "user", "content": "The fox?"},
        {"role": "assistant", "content": "It thinks."},
        {"role": "user", "content": "And the world?"},
        {"role": "assistant", "content": "It says hello."},
    ],
    "a thought": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>\nquick\n</think>\n\nSo."},
    ],
}
SYSTEMS = ("", "Be brief.")
ROW: dict[str, Any] = {
    "instruction": "Say hello to the fox.",
    "input": "quick",
    "output": "hello fox",
    "response": "hello world",
    "system": "Be kind.",
    "INSTRUCTION": "Think.",
    "RESPONSE": "It thinks.",
    "article": "The fox thinks.",
    "summary": "Fox.",
    "question": "The fox?",
    "answer": "It thinks.",
    "message_1": "Hello?",
    "message_2": "Hello.",
}
OWN = {
    "format": "Q: {instruction} {input}\nA: ",
    "no_input_format": "Q: {instruction}\nA: ",
    "field_output": "answer",
}


def main() -> None:
    _stand_ins()
    print(json.dumps({"templates": templates(), "prompts": prompts(), "texts": texts()}))


def _stand_ins() -> None:
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    import trl

    trl.AutoModelForCausalLMWithValueHead = object
    colors = SimpleNamespace(CYAN="", RESET="")
    for name, members in (("torchaudio", {}), ("colorama", {"Fore": colors})):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        sys.modules[name] = module


def templates() -> dict[str, Any]:
    """Return LLaMA-Factory's tokens and labels of rows, by template, thinking, conversation and system."""
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import TEMPLATES

    from recipec.port.meaning.templates import LLAMAFACTORY
    from tests.runtime.chats import tokenizer

    settings = SimpleNamespace(mask_history=False, train_on_prompt=False, cutoff_len=10**6)
    out: dict[str, Any] = {}
    for name in LLAMAFACTORY:
        for thinking in (True, False):
            template = TEMPLATES[name]
            template.enable_thinking = thinking
            template.mm_plugin = TEMPLATES["default"].mm_plugin  # there are no images
            made = SupervisedDatasetProcessor(template, tokenizer(), None, settings)
            for title, messages in CONVERSATIONS.items():
                for system in SYSTEMS:
                    encoded = made._encode_data_example(messages[:-1], messages[-1:], system, "", [], [], [])
                    out[f"{name}|{thinking}|{title}|{system}"] = encoded
    return out


def prompts() -> dict[str, Any]:
    """Return the tokens and labels of Axolotl's data set types, for a row with and without an input."""
    from importlib import import_module

    from axolotl import prompt_tokenizers as strategies
    from axolotl import prompters
    from axolotl.prompt_strategies.user_defined import UserDefinedDatasetConfig

    from tests.runtime.chats import tokenizer

    config = SimpleNamespace(train_on_inputs=False, sequence_len=4096)
    of_handlers = {
        "gpteacher": (strategies.GPTeacherPromptTokenizingStrategy, prompters.GPTeacherPrompter),
        "oasst": (strategies.OpenAssistantPromptTokenizingStrategy, prompters.AlpacaPrompter),
        "summarizetldr": (strategies.SummarizeTLDRPromptTokenizingStrategy, prompters.SummarizeTLDRPrompter),
        "alpaca": (strategies.AlpacaPromptTokenizingStrategy, prompters.AlpacaPrompter),
    }
    from recipec.port.dialects.axolotl_prompts import PROMPTS

    out: dict[str, Any] = {}
    for name in (*PROMPTS, "user_defined"):
        base, _, style = name.partition(":")
        module, _, function = name.partition(".")
        if name == "user_defined":
            load = import_module("axolotl.prompt_strategies.user_defined").load
            made = load(tokenizer(), config, UserDefinedDatasetConfig(**OWN))
        elif base in of_handlers:
            strategy, prompter = of_handlers[base]
            made = strategy(prompter(style or None), tokenizer(), False, 4096)
        else:
            found = import_module(f"axolotl.prompt_strategies.{module}")
            made = getattr(found, function or "load")(tokenizer(), config)
        for title, row in (("input", ROW), ("none", {**ROW, "input": ""})):
            encoded = made.tokenize_prompt(row)
            out[f"{name}|{title}"] = [list(encoded["input_ids"]), list(encoded["labels"])]
    return out


TEXTS = [" fox" * count for count in (3, 6, 7, 14, 15, 40)]
ROW_LENGTH = 8
"""Tokens of a row for TEXTS."""


def texts() -> dict[str, Any]:
    """Return the rows of texts by Axolotl's type completion, and by LLaMA-Factory's stage pt."""
    from axolotl.prompt_strategies import completion
    from llamafactory.data.processor.pretrain import PretrainDatasetProcessor

    from tests.runtime.chats import tokenizer

    config = SimpleNamespace(train_on_inputs=False, sequence_len=ROW_LENGTH)
    split = completion.load(tokenizer(), config).tokenize_prompt({"text": TEXTS})
    kept = [row for row in split["input_ids"] if len(row) > 1]  # as filter_sequences_by_length, later
    own = tokenizer()
    own.add_bos_token = True
    settings = SimpleNamespace(template="default", packing=False, cutoff_len=ROW_LENGTH)
    cut = PretrainDatasetProcessor(None, own, None, settings)
    prompts = {"_prompt": [[{"role": "user", "content": text}] for text in TEXTS]}
    return {"split": kept, "truncate": cut.preprocess_dataset(prompts)["input_ids"]}


if __name__ == "__main__":
    main()
