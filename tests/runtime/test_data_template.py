"""Tests that chat templates render as in transformers."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.data.template import ChatTemplate, Misplaced, TemplateRefusal
from recipec.runtime.errors import UserError
from tests.runtime.chats import chat, published, tokenizer
from tests.runtime.tool_calls import CALL, TOOLS

VARIABLES = {"bos_token": "<bos>", "eos_token": "<eos>"}
CONVERSATIONS: list[tuple[list[dict[str, Any]], Any]] = [
    (chat("Hello", "Hi there", "And now?", "<think>\nhm\n</think>\n\nGood bye"), None),
    (chat("Hello", "Hi there", system="Be brief."), None),
    (CALL, TOOLS),
]


class Fixed(datetime.datetime):
    """A clock fixed at the date of the project's templates."""

    @classmethod
    def now(cls, tz: Any = None) -> Fixed:
        return cls(2024, 7, 26)


def names() -> list[str]:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return sorted(path.stem for path in (Path(spec.origin).parent / "chat_templates").glob("*.jinja"))


def test_trl_templates_render_as_in_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.utils import chat_template_utils as reference

    monkeypatch.setattr(reference, "datetime", Fixed)
    rendered = marked = refused = 0
    for name in names()[::3]:
        source = published(name)
        template = ChatTemplate(source, VARIABLES)
        for messages, tools in CONVERSATIONS:
            try:
                texts, marks = reference.render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=source,
                    return_assistant_tokens_mask=template.marked,
                    **VARIABLES,
                )
            except Exception:
                refused += 1
                with pytest.raises(TemplateRefusal):
                    template.render(messages, tools)
                continue
            expected = [tuple(mark) for mark in marks[0]] if template.marked else []
            assert template.render_marked(messages, tools) == (texts[0], expected), name
            prompt, _ = reference.render_jinja_template(
                conversations=[messages[:2]],
                tools=tools,
                chat_template=source,
                add_generation_prompt=True,
                **VARIABLES,
            )
            assert template.render(messages[:2], tools, add_generation_prompt=True) == prompt[0], name
            rendered += 1
            marked += bool(expected)
    assert rendered > 50 and marked > 15 and refused > 3


def test_template_date_is_fixed() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {})
    assert template.render([]) == "26 Jul 2024"


def test_invalid_jinja_template_is_refused_with_its_line_number() -> None:
    with pytest.raises(UserError, match="not valid Jinja: line 2"):
        ChatTemplate("{% if x %}\n{% endfor %}", {})


def test_generation_markers_in_a_macro_are_refused() -> None:
    source = (
        "{% macro turn(m) %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.marked
    with pytest.raises(Misplaced):
        template.render_marked(chat("Hello", "Hi"))
    assert template.render(chat("Hello", "Hi")) == "user: Helloassistant: Hi"


def test_template_cannot_escape_the_sandbox() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}"):
        with pytest.raises(TemplateRefusal):
            ChatTemplate(source, {}).render(chat("Hello"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{% set all = namespace(x='a') %}{% for i in range(60) %}{% set all.x = all.x + all.x %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 10 ** 10 ** 10 }}",
    ],
)
def test_template_rendering_time_and_output_are_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a template's time, its output, and what a few characters expand to."""
    monkeypatch.setattr("recipec.runtime.data.template.RENDER_SECONDS", 0.5)
    with pytest.raises(TemplateRefusal):
        ChatTemplate(source, {}).render(chat("Hello"))


@pytest.mark.parametrize("source", ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ (" * 3000])
def test_deeply_nested_template_is_refused(source: str) -> None:
    with pytest.raises(UserError, match="the chat template"):
        ChatTemplate(source, {})


def test_template_arithmetic_and_repetition_work() -> None:
    source = "{{ '-' * 3 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ [1] * 2 }}{{ 4 ** 0.5 }}"
    assert ChatTemplate(source, {}).render([]) == "---121024[1, 1]2.0"


def test_special_tokens_are_template_variables() -> None:
    assert ChatTemplate("{{ bos_token }}", tokenizer().special_tokens_map).render([]) == "<bos>"
