"""Parse conversations in the spellings that data sets use into messages of role and content.

OpenAI's: {"role": "user", "content": "..."}, with tool_calls and role "tool". ShareGPT's: {"from": "human",
"value": "..."}. The result is what Hugging Face chat templates expect: a tool call's arguments and a tool's
parameters as objects, calls and tools in {"type": "function", "function": {...}}. A null key of a message, a
call or a tool counts as missing. Nulls inside of arguments and parameters are values, and stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .row_values import JsonObject, Malformed, checked, filled, kind, parsed, text_of

Messages = list[dict[str, Any]]

ROLES = ("system", "user", "assistant", "tool")
"""Roles after parsing. The template decides which of them it accepts."""

ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "developer": "system",
}
"""ShareGPT's names of roles, and OpenAI's newer system role, which templates silently skip."""

CALLS = ("function_call", "tool_call")
"""ShareGPT's roles of an assistant turn whose text is a call as JSON: {"name": ..., "arguments": ...}."""

TAUGHT = re.compile(
    r"tool_calls|tool_responses|name|refusal|documents|cot|.*(reasoning|think|thought|image|audio|video).*",
    re.I,
)
"""Keys of a message that belong to its content, besides role and content. Others (ids, times, ratings, a
tool's name next to its call) are metadata. So are numbers: "reasoning_tokens" is not reasoning."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold the assistant's reasoning."""

THOUGHTS = (("<think>", "</think>"), ("<|channel>thought\n", "<channel|>"))
"""What opens and closes reasoning in a content: in Qwen's markup and others', and in Gemma 4's."""

PICTURES = ("image", "image_url", "input_image")
"""The types of a content's part that is a picture."""

TEXTS = ("text", "input_text", "output_text")
"""The types of a part that is a text; the last two are those of OpenAI's Responses API."""

QUOTES = "`'\"\u2018\u2019\u201c\u201d"


def parted(message: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return an assistant message's reasoning texts (usually one or none), and the message without them."""
    rest = {key: value for key, value in message.items() if key not in REASONING}
    thoughts = [message[key] for key in REASONING if message.get(key)]
    for opening, closing in THOUGHTS:
        before, closed, after = message["content"].partition(closing)
        before = before.strip()
        begun = before.startswith(opening.strip())
        # The prompt of a thinking model ends with the opening, so raw output begins after it.
        if closed and (begun or (opening.strip() not in before and not _is_quoted(before, after))):
            thoughts.append(before[len(opening) :].strip() if begun else before)
            rest["content"] = after.lstrip()
            break
    return [thought for thought in thoughts if thought], rest


def only_closes(content: str) -> bool:
    """Return whether a content begins with reasoning whose opening mark is missing."""
    rest = parted({"content": content})[1]["content"]
    begun = any(content.lstrip().startswith(opening.strip()) for opening, _ in THOUGHTS)
    return len(rest) < len(content) and not begun


def _is_quoted(before: str, after: str) -> bool:
    """Return whether a mark between two texts stands in quotation marks, as in a text about the mark."""
    return before[-1:] in QUOTES and after[:1] in QUOTES and bool(before and after)


def unbalanced(content: str) -> str | None:
    """Return why a content without its reasoning has an open or a closing mark of reasoning; None if not."""
    for opening, closing in ((opening.strip(), closing) for opening, closing in THOUGHTS):
        start, end = content.find(opening), content.find(closing)
        if content.lstrip().startswith(opening):
            return f"opens {opening} and does not close it" if end < 0 else f"opens {opening} twice"
        if end >= 0 and not 0 <= start < end:
            quoted = _is_quoted(content[:end], content[end + len(closing) :])
            return f"has {closing} in quotes without {opening}" if quoted else f"closes {closing} twice"
    return None


def taught(message: Mapping[str, Any]) -> list[str]:
    """Return the keys of a parsed message, other than role and content, that a chat template should write."""
    return [
        key
        for key, value in message.items()
        if key not in ("role", "content")
        and value
        and isinstance(value, str | list | dict)
        and TAUGHT.fullmatch(key)
        and not (key == "name" and message["role"] == "tool")
    ]


def parse_messages(value: Any, name: str, fields: Mapping[str, str], label: str = "message") -> Messages:
    """Parse a conversation.

    Args:
        value: a list of messages, or such a list as JSON text.
        name: the column that holds it.
        fields: `data.fields`; "role", "content" and "weight" may rename a message's keys.
        label: the word for a message in error reasons, before its number.

    Raises:
        Malformed: it is not a conversation.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, repr(name))
    if not isinstance(value, list):
        raise Malformed(f"{name!r} is {kind(value)}, not a list")
    if not value:
        raise Malformed(f"{name!r} is empty")
    return [_message(message, f"{label} {i}", fields) for i, message in enumerate(value)]


def demand_assistant(messages: Messages) -> None:
    """Refuse a conversation in which nothing can be learned.

    Raises:
        Malformed: it has no assistant message.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise Malformed("no assistant turn")


def parse_tools(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Parse the JSON schemas of the tools that a conversation may call; None if there are none.

    Args:
        value: a list of schemas, each an object or JSON text, or the list as JSON text; or null.

    Raises:
        Malformed: it is something else.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    value = parsed(value, repr(name))
    if value is None:
        return None
    if not isinstance(value, list):
        raise Malformed(f"{name!r} is {kind(value)}, not a list of JSON schemas")
    return [_tool(tool, f"tool {i}") for i, tool in enumerate(value)] or None


def _message(message: Any, what: str, fields: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Malformed(f"{what} is {kind(message)}, not an object")
    role_key = _key(message, fields, "role", "from")
    content_key = _key(message, fields, "content", "value")
    role, content = message.get(role_key), message.get(content_key)
    others = ("role", "content", role_key, content_key)  # of renamed keys, also those of the usual names
    rest = {key: value for key, value in message.items() if key not in others}
    weight = rest.pop(fields.get("weight", "weight"), None)
    calls: Any = rest.pop("tool_calls", None) or rest.pop(
        "function_call", None
    )  # OpenAI's, and its older one
    if isinstance(role, str):
        if role in CALLS:
            role, calls, content = "assistant", parsed(content, what), None
        role = ALIASES.get(role, role)
    if role not in ROLES:
        raise Malformed(f"{what} has the role {role!r}, not one of {', '.join(ROLES)}")
    what = f"{what} ({role})"
    calls = _calls(calls, what)
    if calls and role != "assistant":
        raise Malformed(f"{what} calls tools, which only assistant turns can do")
    content = _content(content, what, may_lack=bool(calls))
    if role == "assistant" and not content.strip() and not calls:
        raise Malformed(f"{what} is blank")
    if weight not in (None, 0, 1):
        raise Malformed(f"{what} has the weight {weight!r}: give 0 (no loss) or 1 (loss)")
    parsed_message = {"role": role, "content": content, **filled(rest, what)}
    if weight is not None:
        parsed_message["weight"] = int(weight)
    return {**parsed_message, "tool_calls": calls} if calls else parsed_message


def _key(message: Mapping[str, Any], fields: Mapping[str, str], name: str, sharegpt: str) -> str:
    if name in fields:
        return fields[name]
    # Not `in`: a column format may give each message both keys, one of them null.
    return name if message.get(name) is not None or message.get(sharegpt) is None else sharegpt


def _content(content: Any, what: str, may_lack: bool) -> str:
    if content is None and may_lack:
        return ""
    if isinstance(content, list):
        return "".join(_part(part, f"part {i} of {what}") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise Malformed(f"{what} has {kind(content)} as content, not a string")
    return text_of(content, what)


def _part(part: Any, what: str) -> str:
    if not isinstance(part, dict):
        raise Malformed(f"{what} is {kind(part)}, not an object")
    if part.get("type", "text") not in TEXTS:
        if part["type"] in PICTURES:
            raise Malformed(f"{what} is of type {part['type']!r}: data.images: {{}} trains on pictures")
        raise Malformed(f"{what} is of type {part['type']!r}: only text and pictures are trained on")
    return text_of(part.get("text"), f"the text of {what}")


def _calls(value: Any, what: str) -> list[dict[str, Any]]:
    """Parse a message's tool calls: each {"type": "function", "function": {"name", "arguments"}, ...}."""
    value = parsed(value, f"tool_calls of {what}") if isinstance(value, str) and value.strip() else value
    if not value:
        return []
    if isinstance(value, dict):  # ShareGPT's single call
        value = [value]
    if not isinstance(value, list):
        raise Malformed(f"tool_calls of {what} is {kind(value)}, not a list")
    return [_call(call, f"tool call {i} of {what}") for i, call in enumerate(value)]


def _call(call: Any, what: str) -> dict[str, Any]:
    call = _function(call, what)
    arguments = _object(call["function"].get("arguments"), f"the arguments of {what}")
    return {**call, "function": {**call["function"], "arguments": {} if arguments is None else arguments}}


def _tool(tool: Any, what: str) -> dict[str, Any]:
    tool = _function(tool, what)
    function = tool["function"]
    if isinstance(function.get("parameters"), str):
        parameters = _object(function["parameters"], f"the parameters of {what}")
        rest = {key: item for key, item in function.items() if key != "parameters"}
        function = rest if parameters is None else {**function, "parameters": parameters}
    return {**tool, "function": function}


def _object(value: Any, what: str) -> dict[str, Any] | None:
    """Return an object that may be written as JSON text; None for a null or a blank text.

    Raises:
        Malformed: it is something else.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    content = parsed(value, what)
    if not isinstance(content, dict):
        raise Malformed(f"{what} are {kind(content)}, not an object")
    checked(content, what)
    if isinstance(value, str):
        content = JsonObject(content)
        content.text = value
    return content


def _function(value: Any, what: str) -> dict[str, Any]:
    """Wrap a tool, or a tool call, in {"type": "function", "function": {"name": ...}}."""
    value = parsed(value, what)
    if not isinstance(value, dict):
        raise Malformed(f"{what} is {kind(value)}, not an object")
    value = filled(value, what)
    if "function" not in value and "name" in value:
        envelope = {key: value[key] for key in ("id", "type") if key in value}
        value = {**envelope, "function": {key: item for key, item in value.items() if key not in envelope}}
    function = value.get("function")
    if isinstance(function, str) and function.lstrip().startswith("{"):
        function = checked(parsed(function, f"the function of {what}"), what)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Malformed(f"{what} names no function")
    return {"type": "function", **value, "function": filled(function, what)}
