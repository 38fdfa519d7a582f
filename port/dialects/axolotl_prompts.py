"""Axolotl's types that write a row as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipec.port.meaning import conversion

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
"""Axolotl's prompt styles: the system message, a turn with an input, and a turn without one."""


def _styled(style: str, systems: tuple[str, str], **columns: Any) -> conversion.Prompt:
    system, turn, bare = STYLES[style]
    before = [system.format(system=text) if text else "" for text in systems]
    return conversion.Prompt(_braced(before[0]) + turn, _braced(before[1]) + bare, **columns)


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


_QA = {"instruction": "question", "input": None, "output": "answer"}
_TLDR = "USER: Summarize the following article as a TL;DR.\n{instruction}"

PROMPTS: Mapping[str, conversion.Prompt] = {
    "alpaca": _styled("instruct", _ALPACA),
    **{f"alpaca:{style}": _styled(style, _ALPACA) for style in STYLES},
    "gpteacher": _styled("instruct", _ALPACA, output="response"),
    "oasst": _styled("instruct", _ALPACA, instruction="INSTRUCTION", input=None, output="RESPONSE"),
    "summarizetldr": conversion.Prompt(
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
