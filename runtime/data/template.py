"""Chat templates: Jinja as transformers runs it, the generation markers, and the form of tool calls.

A template is a program from a model's repository, so it runs in Jinja's sandbox. It can use everything
that transformers gives it: `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens,
`raise_exception`, `strftime_now`, the filter `tojson`, loop controls and the tag `generation`.

Templates differ in how they take an assistant's tool calls. Most take a call's arguments as an object,
but DeepSeek's concatenate them as JSON text. Some write the calls of a message only if its content is
null. Gemma 4's writes the text of a message after its calls and their results, although the model writes
it before; as a message of its own, the text comes first. Short conversations with known texts show which
form a template takes.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import UserError
from ..untrusted import TooLong, limit
from .messages import REASONING
from .picture_rows import with_parts

Messages = list[dict[str, Any]]

Span = tuple[int, int]

Tools = list[dict[str, Any]] | None

TODAY = datetime.datetime(2024, 7, 26)
"""The date of a template's `strftime_now`: the default of Llama's templates. With the current date, the same
recipe would train on other tokens tomorrow, and a resumed run on others than before."""

RENDER_SECONDS = 30.0
"""The time limit of a template for one conversation; milliseconds are usual."""

LARGEST = 1 << 24
"""The most characters of a rendering, and items of an operation's result."""

MOST_POWER = 64
"""The largest exponent: Python's integers are unbounded, and could fill the memory."""


class TemplateRefusal(ValueError):
    """The template does not accept the conversation."""

    kind = "malformed"


class Misplaced(ValueError):
    """The place of the template's generation markers cannot be determined."""


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: the text that the model writes."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way to register a tag)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_written")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.environment.recorder(text)  # type: ignore[attr-defined]
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which bounds loops, with a further bound on results of operations on small values."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and (abs(left) > LARGEST or right > MOST_POWER):
            raise jinja2.exceptions.SecurityError("`**` makes too large a number")
        if operator == "*" and not numbers:
            size = max((len(value) for value in (left, right) if hasattr(value, "__len__")), default=0)
            times = next((value for value in (left, right) if isinstance(value, int)), 0)
            if size * times > LARGEST:
                raise jinja2.exceptions.SecurityError(f"`*` makes more than {LARGEST:,} items")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled template. It is not thread-safe.

    Args:
        source: Jinja text.
        variables: further variables for it: bos_token and so on.

    Attributes:
        marked: whether it has generation markers.
        calls: the form in which it takes tool calls.

    Raises:
        UserError: it is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = TODAY.strftime
        environment.extend(recorder=self._record)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
                "data.chat_template takes what tokenizer_config.json has as chat_template",
            ) from error
        except Exception as error:  # constant parts are computed at compile time, and nesting has no limit
            reason = type(error).__name__
            raise UserError(
                f"the chat template cannot be compiled: {reason}", "write it without deep nesting"
            ) from error
        self.marked = any(
            isinstance(node.call.node, jinja2.nodes.ExtensionAttribute)
            for node in tree.find_all(jinja2.nodes.CallBlock)
        )
        self._variables = dict(variables)
        self._length = 0
        self._marks: list[tuple[int, str]] = []

    @cached_property
    def calls(self) -> CallForm:
        def render(messages: Messages, tools: list[dict[str, Any]]) -> str | None:
            try:
                return self._written(messages, tools, False)
            except TemplateRefusal:
                return None

        return call_form(render)

    def render_marked(self, messages: Messages, tools: Tools = None) -> tuple[str, list[Span]]:
        """Return a conversation as text, and the characters that are marked as generated, in order.

        Raises:
            TemplateRefusal: the template raises on it.
            Misplaced: the place of the markers in the text cannot be determined, as in a macro.
        """
        text = self.render(messages, tools)
        spans: list[Span] = []
        for start, written in self._marks:
            end = start + len(written)
            if text[start:end] != written or (spans and start < spans[-1][1]):
                raise Misplaced("the template's generation markers are in a macro or in a captured block")
            spans.append((start, end))
        return text, spans

    def render(self, messages: Messages, tools: Tools = None, add_generation_prompt: bool = False) -> str:
        """Render a conversation as text, with its tool calls in the form that the template takes.

        Raises:
            TemplateRefusal: the template raises on it.
        """
        if any(message.get("tool_calls") for message in messages):
            messages = self.calls.messages(messages)
        return self._written(messages, tools, add_generation_prompt)

    def _written(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
        self._length, self._marks = 0, []
        parts: list[str] = []
        try:
            with limit(RENDER_SECONDS):
                for part in self._template.generate(
                    messages=with_parts(messages),
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._variables,
                ):
                    parts.append(part)
                    self._length += len(part)
                    if self._length > LARGEST:
                        raise jinja2.exceptions.SecurityError(f"it writes more than {LARGEST:,} characters")
        except TooLong as error:
            raise TemplateRefusal(f"the chat template has not ended within {RENDER_SECONDS:g} s") from error
        except Exception as error:  # a template is a program: it may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TemplateRefusal(f"the chat template refuses it: {reason}") from error
        return "".join(parts)

    def _record(self, written: str) -> None:
        """Record that the next part of the text is generated: Jinja yields each part in turn."""
        self._marks.append((self._length, written))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


Render = Callable[[Messages, list[dict[str, Any]]], str | None]
"""Render a conversation with tools; None if the template refuses it."""


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
        """Return the changes that apply to a message, as keys of `report.ADAPTED`."""
        calls, content = message.get("tool_calls"), message.get("content")
        if not calls or message.get("role") != "assistant":
            return ()
        apart = self.order == "apart" and bool((content or "").strip())
        uses = {"json": self.json, "null": self.null and (apart or not content), "apart": apart}
        return tuple(name for name, used in uses.items() if used)

    def messages(self, messages: Messages) -> Messages:
        """Return a conversation in this form."""
        return [part for message in messages for part in self._of(message)]

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


PROBE_NAME, PROBE_KEY, PROBE_VALUE, PROBE_TEXT = "probe_name", "probe_key", "probe_value", "Probed text."

PROBE_CALL = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": PROBE_NAME, "arguments": {PROBE_KEY: PROBE_VALUE}},
}

PROBE_PARAMETERS = {"type": "object", "properties": {PROBE_KEY: {"type": "string", "description": "A text."}}}

PROBE_TOOLS = [
    {
        "type": "function",
        "function": {"name": PROBE_NAME, "description": "A probe.", "parameters": PROBE_PARAMETERS},
    }
]

PROBE_QUESTION = {"role": "user", "content": "Probed question?"}

PROBE_ANSWER: Messages = [
    {"role": "tool", "name": PROBE_NAME, "tool_call_id": PROBE_CALL["id"], "content": "Probed result."},
    {"role": "assistant", "content": "Probed answer."},
]


def call_form(render: Render) -> CallForm:
    """Return the form that a template takes; the plain one if it writes calls in none."""
    for as_text, null in product((False, True), (False, True)):
        form = CallForm(as_text, null)
        if any(_writes_calls(render, form, rest) for rest in (PROBE_ANSWER, [])):
            return CallForm(as_text, null, _order_of_text(render, form))
    return CallForm(order="unknown")


def _probed(render: Render, form: CallForm, messages: Messages) -> str:
    return render(form.messages([PROBE_QUESTION, *messages]), PROBE_TOOLS) or ""


def _writes_calls(render: Render, form: CallForm, rest: Messages) -> bool:
    """Return whether a call is written, its arguments neither as Python's text nor as quoted JSON."""
    text = _probed(render, form, [_probe_message("", True), *rest])
    # The tool's own definition has the name and the key as well.
    without = _probed(render, form, [_probe_message(PROBE_TEXT, False), *rest])
    written = all(text.count(word) > without.count(word) for word in (PROBE_NAME, PROBE_VALUE))
    return written and f"{{'{PROBE_KEY}'" not in text and f'\\"{PROBE_KEY}' not in text and "None" not in text


def _order_of_text(render: Render, form: CallForm) -> str:
    both = _probed(render, form, [_probe_message(PROBE_TEXT, True), *PROBE_ANSWER]) or _probed(
        render, form, [_probe_message(PROBE_TEXT, True)]
    )
    text, call = both.find(PROBE_TEXT), both.find(PROBE_VALUE)
    if 0 <= text < call:
        return "before"
    apart = [_probe_message(PROBE_TEXT, False), _probe_message("", True)]
    header = _probed(render, form, [_probe_message(PROBE_TEXT, False)]).partition(PROBE_TEXT)[0]
    for rest in (PROBE_ANSWER, []):
        alone = _probed(render, form, [_probe_message("", True), *rest])
        expected = header + PROBE_TEXT + alone[len(header) :]
        if not alone.startswith(header) or _probed(render, form, [*apart, *rest]) != expected:
            return "after" if 0 <= call < text else "unknown"
    return "apart"


def _probe_message(text: str, calls: bool) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": [PROBE_CALL]} if calls else {})}
