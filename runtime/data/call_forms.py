"""Find the form in which a chat template takes an assistant's tool calls.

Templates differ. Most take a call's arguments as an object, but DeepSeek's concatenate them as JSON text.
Some write the calls of a message only if its content is null. Gemma 4's writes the text of a message after
its calls and their results, although the model writes it before; as a message of its own, the text comes
first. Short conversations with known texts show which form a template takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from .messages import REASONING

Messages = list[dict[str, Any]]
Render = Callable[[Messages, list[dict[str, Any]]], str | None]
"""Render a conversation with tools; None if the template refuses it."""

FORMS = {
    "json": "the chat template takes the arguments of tool calls as JSON text",
    "null": "the chat template writes tool calls only in a message whose content is null, not empty",
    "apart": "the chat template writes the text of a message after its tool calls, so the text is given as a "
    "message of its own before them",
}
"""The changes to a message that calls tools, and why each is made."""


@dataclass(frozen=True)
class CallForm:
    """The form in which a template takes a message that calls tools.

    Attributes:
        json: whether arguments are JSON text.
        null: whether a content without text is null.
        order: where the template writes a message's text: "before" its calls; "apart", before them if it is a
            message of its own; "after" them; or "unknown", because it does not write both.
    """

    json: bool = False
    null: bool = False
    order: str = "before"

    def applied(self, message: dict[str, Any]) -> tuple[str, ...]:
        """Return the keys of FORMS that apply to a message."""
        calls, content = message.get("tool_calls"), message.get("content")
        if not calls or message.get("role") != "assistant":
            return ()
        apart = self.order == "apart" and bool((content or "").strip())
        uses = {"json": self.json, "null": self.null and (apart or not content), "apart": apart}
        return tuple(name for name, used in uses.items() if used)

    def messages(self, messages: Messages) -> Messages:
        """Return a conversation in this form."""
        return [made for message in messages for made in self._of(message)]

    def _of(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        applied = self.applied(message)
        if "apart" in applied:
            yield {key: item for key, item in message.items() if key not in ("tool_calls", "tool_responses")}
            message = {key: item for key, item in message.items() if key not in REASONING} | {"content": ""}
        if "null" in applied:
            message = {**message, "content": None}
        if "json" in applied:
            message = {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        yield message


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    # A source's own text stays as it is.
    text = getattr(arguments, "text", "") or json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


NAME, KEY, VALUE, TEXT = "probe_name", "probe_key", "probe_value", "Probed text."
CALL = {"id": "probe0000", "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}
PARAMETERS = {"type": "object", "properties": {KEY: {"type": "string", "description": "A text."}}}
TOOLS = [
    {"type": "function", "function": {"name": NAME, "description": "A probe.", "parameters": PARAMETERS}}
]
ASKED = {"role": "user", "content": "Probed question?"}
ANSWERED: Messages = [
    {"role": "tool", "name": NAME, "tool_call_id": CALL["id"], "content": "Probed result."},
    {"role": "assistant", "content": "Probed answer."},
]


def call_form(render: Render) -> CallForm:
    """Return the form that a template takes; the plain one if it writes calls in none."""
    for as_text, null in product((False, True), (False, True)):
        form = CallForm(as_text, null)
        if any(_writes(render, form, rest) for rest in (ANSWERED, [])):
            return CallForm(as_text, null, _order(render, form))
    return CallForm(order="unknown")


def _rendered(render: Render, form: CallForm, messages: Messages) -> str:
    return render(form.messages([ASKED, *messages]), TOOLS) or ""


def _writes(render: Render, form: CallForm, rest: Messages) -> bool:
    """Return whether a call is written, its arguments neither as Python's text nor as quoted JSON."""
    text = _rendered(render, form, [_message("", True), *rest])
    # The tool's own definition has the name and the key as well.
    without = _rendered(render, form, [_message(TEXT, False), *rest])
    written = all(text.count(word) > without.count(word) for word in (NAME, VALUE))
    return written and f"{{'{KEY}'" not in text and f'\\"{KEY}' not in text and "None" not in text


def _order(render: Render, form: CallForm) -> str:
    both = _rendered(render, form, [_message(TEXT, True), *ANSWERED]) or _rendered(
        render, form, [_message(TEXT, True)]
    )
    text, call = both.find(TEXT), both.find(VALUE)
    if 0 <= text < call:
        return "before"
    apart = [_message(TEXT, False), _message("", True)]
    header = _rendered(render, form, [_message(TEXT, False)]).partition(TEXT)[0]
    for rest in (ANSWERED, []):
        alone = _rendered(render, form, [_message("", True), *rest])
        expected = header + TEXT + alone[len(header) :]
        if not alone.startswith(header) or _rendered(render, form, [*apart, *rest]) != expected:
            return "after" if 0 <= call < text else "unknown"
    return "apart"


def _message(text: str, calls: bool) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": [CALL]} if calls else {})}
