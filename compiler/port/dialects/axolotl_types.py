"""Axolotl's data set types: how each writes a row, and what that is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from compiler.port.meaning import conversion
from compiler.port.meaning.conversion import Prompt


@dataclass(frozen=True)
class Kind:
    """What a type's rows are here.

    Attributes:
        format: of `data.format`.
        fields: of `data.fields`.
        transform: text of the file of `data.transform`, "" for none.
        note: how the tokens differ.
    """

    format: str
    fields: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    note: str = ""


PLAIN = (
    "the same text, tokenised as a whole: a row whose completion fuses with the prompt's last "
    "token is left out "
    "and counted"
)
PIECES = (
    "a text longer than sequence_len is cut at its end here, where Axolotl goes on with it in further rows"
)
SEGMENTS = "rows whose learnt segments are not all at the end are left out, and each row ends its sequence"

_TASK = "Below is an instruction that describes a task"
_ALPACA = (
    f"{_TASK}, paired with an input that provides further context. Write a response that appropriately "
    "completes the request.",
    f"{_TASK}. Write a response that appropriately completes the request.",
)
_USER_TASK = "Below is an instruction from a USER that describes a task"
_CONCISE = (
    f"{_USER_TASK}, paired with an input that provides further context. The ASSISTANT writes a response "
    "that concisely and appropriately completes the request.\n\n",
    f"{_USER_TASK}. The ASSISTANT writes a response that appropriately and concisely completes the "
    "request.\n\n",
)
_NO_SYSTEM = ("", "")

STYLES = {
    "instruct": (
        "{system}\n\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "chat": (
        "SYSTEM: {system}\n",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
    ),
    "chatml": (
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
}
"""Axolotl's prompt styles: of the system message, of a turn with an input, and of one without."""


def _styled(style: str, systems: tuple[str, str], **columns: Any) -> Prompt:
    system, turn, bare = STYLES[style]
    before = [system.format(system=text) if text else "" for text in systems]
    return Prompt(_braced(before[0]) + turn, _braced(before[1]) + bare, **columns)


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


_QA = {"instruction": "question", "input": None, "output": "answer"}
_TLDR = "USER: Summarize the following article as a TL;DR.\n{instruction}"

PROMPTS: Mapping[str, Prompt] = {
    "alpaca": _styled("instruct", _ALPACA),
    **{f"alpaca:{style}": _styled(style, _ALPACA) for style in STYLES},
    "gpteacher": _styled("instruct", _ALPACA, output="response"),
    "oasst": _styled("instruct", _ALPACA, instruction="INSTRUCTION", input=None, output="RESPONSE"),
    "summarizetldr": Prompt(
        f"{_TLDR}\n{{input}}\nASSISTANT:", f"{_TLDR}\nASSISTANT:", "article", None, "summary"
    ),
    "alpaca_chat": _styled("chat", _ALPACA),
    "alpaca_chat.load_concise": _styled("chat", _CONCISE),
    "alpaca_chat.load_qa": _styled("chat", _CONCISE, **_QA),
    "alpaca_chat.load_camel_ai": _styled(
        "chat", _CONCISE, instruction="message_1", input=None, output="message_2"
    ),
    "alpaca_chat.load_no_prompt": _styled("chat", _NO_SYSTEM),
    "alpaca_instruct": _styled("instruct", _ALPACA),
    "alpaca_instruct.load_no_prompt": _styled("instruct", _NO_SYSTEM),
    "alpaca_w_system": replace(_styled("chat", _NO_SYSTEM), system="SYSTEM: {system}\n"),
    "alpaca_w_system.load_chat": replace(_styled("chat", _NO_SYSTEM), system="SYSTEM: {system}\n"),
    "alpaca_w_system.load_instruct": replace(_styled("instruct", _NO_SYSTEM), system="{system}\n\n"),
}
"""Types that write a row as plain text."""

UNPORTED = {
    "sharegpt": "Axolotl refuses it",
    "explainchoice": "its lists of choices have no format here",
    "concisechoice": "its lists of choices have no format here",
    "reflection": "its reflections have no format here",
    "jeopardy": "its answers are rewritten",
    "bradley_terry": "it is for reward models",
    "stepwise_supervised": "it is for reward models",
    "_synthetic": "its tokens are drawn at random",
    "pretrain": "it is for pre-training",
}
"""Types that Axolotl has, or had, and why they are not taken over."""


def plain(name: str) -> Kind | None:
    """A type that needs no other key, None for another."""
    prompt = PROMPTS.get(name.removesuffix(".load"))
    if prompt is not None:
        made = conversion.prompts(prompt, f"Axolotl's {name}")
        return Kind("prompt_completion", transform=made, note=PLAIN)
    if name == "input_output":
        return Kind("prompt_completion", transform=conversion.segments(), note=SEGMENTS)
    return None


def user_defined(given: Mapping[str, Any]) -> Kind:
    """A type that the file defines: `type: {field_instruction: ..., format: ...}`."""

    def text(key: str, default: str) -> str:
        value = given.get(key)
        return default if value is None else str(value)

    system = text("system_format", "{system}")
    prompt = Prompt(
        text("format", "{instruction} {input} "),
        text("no_input_format", "{instruction} "),
        text("field_instruction", "instruction"),
        text("field_input", "input"),
        text("field_output", "output"),
        system,
        text("field_system", "system"),
        text("system_prompt", ""),
    )
    return Kind("prompt_completion", transform=conversion.prompts(prompt, "this type"), note=PLAIN)
