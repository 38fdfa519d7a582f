"""Axolotl's data set types with the keys that they read: columns, messages, roles, preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.port.dialects import axolotl_types as types
from compiler.port.dialects.axolotl_types import Kind
from compiler.port.keys import Keys
from compiler.port.meaning import conversion
from runtime.data.messages import ALIASES, ROLES


def kind(keys: Keys, objective: str) -> Kind | None:
    """The kind of a data set's rows, None after an error.

    Args:
        keys: of the data set.
        objective: "sft", "dpo" or "orpo".
    """
    given = keys.value("type")
    if objective != "sft":
        return _preference(keys, given)
    if isinstance(given, dict):
        _told(keys, "type", given)
        return types.user_defined(given)
    if given is None:
        message = "a data set has no `type`, which says what its rows are"
        keys.refuse("type" if keys.stands("type") else "path", "E1141", message, "type: chat_template")
        return None
    name = str(given)
    if name == "chat_template":
        return _chat(keys)
    if name == "completion":
        field = keys.text("field")
        keys.same("field")
        return Kind("text", {"text": field} if field not in (None, "text") else {}, note=types.PIECES)
    style = keys.text("conversation")
    if name == "alpaca_chat" and style in types.STYLES:
        keys.same("conversation")
        name = f"alpaca:{style}"
    found = types.plain(name)
    if found is None:
        _unknown(keys, name)
    return found


def _unknown(keys: Keys, name: str) -> None:
    why = next((why for known, why in types.UNPORTED.items() if name.partition(".")[0] == known), "")
    message = (
        f"the data set type `{name}` is not taken over: {why}" if why else f"unknown data set type `{name}`"
    )
    help = "type: chat_template, with field_messages and message_property_mappings for columns of other names"
    keys.refuse("type", "E1141", message, help)


def _told(keys: Keys, key: str, given: Mapping[str, Any]) -> None:
    """A mapping's own keys are spoken of with it."""
    for name in given:
        keys.said.add(f"{key}.{name}")


def _chat(keys: Keys) -> Kind:
    mapping, role, content = _mapping(keys)
    conversation = keys.text("field_messages") or "messages"
    tools = keys.text("field_tools") or "tools"
    fields = {
        name: given
        for name, given in (
            ("messages", conversation),
            ("role", role),
            ("content", content),
            ("tools", tools),
        )
        if name != given
    }
    words = _words(keys)
    for name in ("field_messages", "field_tools", "message_field_role", "message_field_content"):
        keys.same(name, {"data.fields": fields} if fields and keys.given(name) else None)
    _beside(keys, mapping, {} if words else fields)
    if words is None:
        return Kind("chat", fields)
    tags = conversion.Tagged(conversation, role, content, words)
    return Kind("chat", transform=conversion.tagged(tags))


def _mapping(keys: Keys) -> tuple[dict[str, Any], str, str]:
    mapping = keys.mapping("message_property_mappings")
    role = str(mapping.get("role") or keys.text("message_field_role") or "role")
    content = str(mapping.get("content") or keys.text("message_field_content") or "content")
    return mapping, role, content


def _words(keys: Keys) -> dict[str, str] | None:
    """Roles that the data calls by words that are not known here; None when all are."""
    given = keys.mapping("roles")
    words = {
        str(word): str(role)
        for role, names in given.items()
        for word in (names if isinstance(names, list) else [names])
    }
    keys.same("roles", note="the same roles by other words")
    usual = {**ALIASES, **{role: role for role in ROLES}}
    return None if all(usual.get(word) == role for word, role in words.items()) else words


def _beside(keys: Keys, mapping: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    """What chat_template reads of messages beside their role and content."""
    others = [name for name, given in mapping.items() if name not in ("role", "content") and name != given]
    if others:
        keys.say(
            "message_property_mappings", {}, f"{', '.join(others)}: messages keep their other keys' own names"
        )
    keys.same("message_property_mappings", {"data.fields": fields} if fields and mapping else None)
    for name in ("field_thinking", "template_thinking_key"):
        keys.unless(name, ("reasoning_content",), "messages keep their other keys' own names")
    for name in ("message_field_training", "message_field_training_detail"):
        keys.unless(name, (), "messages cannot be chosen one by one: all turns of the assistant are learnt")
    keys.unless("split_thinking", (False,), "reasoning stays in the content of its message")
    keys.unless("drop_system_message", (False,), "system messages stay")
    keys.unless("input_format", (), "the template is Jinja here")


def _preference(keys: Keys, given: Any) -> Kind | None:
    """Two answers to one prompt."""
    name = "" if isinstance(given, dict) else str(given)
    if name in (
        "chat_template.default",
        "chat_template",
        "chat_template.argilla",
        "chat_template.argilla_chat",
    ):
        chosen, rejected = keys.text("field_chosen") or "chosen", keys.text("field_rejected") or "rejected"
        conversation = keys.text("field_messages") or "messages"
        _, role, content = _mapping(keys)
        words = _words(keys)
        for key in ("field_messages", "field_chosen", "field_rejected"):
            keys.same(key)
        for key in ("message_property_mappings", "message_field_role", "message_field_content"):
            keys.same(key)
        if "argilla" in name and words is None:
            pairs = (("chosen", chosen), ("rejected", rejected), ("role", role), ("content", content))
            return Kind("preference", {here: there for here, there in pairs if here != there})
        tags = conversion.Tagged(conversation, role, content, words, None, chosen, rejected)
        return Kind("preference", transform=conversion.tagged(tags))
    if name in ("passthrough", "passthrough.default"):
        return Kind("preference")
    if isinstance(given, dict):
        _told(keys, "type", given)
        return _own_preference(given)
    _unknown(keys, name or "none")
    return None


def _own_preference(given: Mapping[str, Any]) -> Kind:
    """A preference type that the file defines; its formats are written into the rows."""
    names = {name: str(given.get(f"field_{name}") or name) for name in ("prompt", "chosen", "rejected")}
    plain = all(
        str(given.get(f"{name}_format") or f"{{{name}}}") in (f"{{{name}}}", f"{{{names[name]}}}")
        for name in names
    )
    fields = {name: there for name, there in names.items() if name != there}
    note = (
        ""
        if plain
        else "prompt_format, chosen_format and rejected_format are not written around the texts here"
    )
    if given.get("field_system"):
        note = "; ".join(
            part for part in (note, "the system message is not written before the prompt") if part
        )
    return Kind("preference", fields, note=note)
