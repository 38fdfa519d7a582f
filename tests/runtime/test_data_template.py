"""Tests of chat templates in their sandbox, and of tokenizers that fit a model."""

from __future__ import annotations

import datetime
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils as reference

from recipec.runtime.data.template import ChatTemplate, Misplaced, TemplateRefusal
from recipec.runtime.data.tokenizer import chat_template, load_tokenizer
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, ModelSettings
from tests.runtime.chats import CALL, GEMMA4, TOOLS, chat, published, tokenizer

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


def test_trl_templates_render_as_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "datetime", Fixed)
    rendered = marked = refused = 0
    for name in names()[::3]:
        source = published(name)
        template = ChatTemplate(source, VARIABLES)
        for messages, tools in CONVERSATIONS:
            try:
                texts, marks = reference.render_jinja_template(
                    conversations=[template.calls.messages(messages)],
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
                conversations=[template.calls.messages(messages[:2])],
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


def load(folder: Path, **settings: Any) -> Any:
    model = ModelSettings(id="x", family="gemma4", tokenizer=settings.pop("tokenizer", None))
    return load_tokenizer(
        folder, model, DataSettings(train=("x",), max_length=8, packing=False, **settings), folder
    )


def test_tokenizer_loads_only_if_it_fits_the_embeddings(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 400}}')
    assert load(tmp_path).encode("hello") == tokenizer().encode("hello")
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    with pytest.raises(UserError, match=r"token ids up to \d+, and the model has 300 embeddings"):
        load(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"vocab_size": 400}')
    with pytest.raises(UserError, match="cannot be loaded"):
        load(other)
    (tmp_path / "config.json").unlink()
    assert load(tmp_path, tokenizer=str(tmp_path)).is_fast


def test_special_tokens_beyond_the_embeddings_are_accepted(tmp_path: Path) -> None:
    grown = load_copy(tmp_path)
    size = len(grown)
    grown.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    grown.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
    assert load(tmp_path).convert_tokens_to_ids("<image_soft_token>") == size


def load_copy(folder: Path) -> Any:
    tokenizer().save_pretrained(folder)
    return load(folder)


def test_tokenizer_without_chat_template_needs_data_chat_template(tmp_path: Path) -> None:
    plain = load_copy(tmp_path)
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.jinja"):
        file.unlink()
    with pytest.raises(UserError, match="has no chat template") as error:
        load(tmp_path)
    assert "data.chat_template" in (error.value.help or "")
    assert load(tmp_path, chat_template=GEMMA4).is_fast


def test_tokenizer_without_a_default_template_is_refused(tmp_path: Path) -> None:
    several = load_copy(tmp_path)
    several.chat_template = {"rag": GEMMA4, "tool_use": GEMMA4}
    data = DataSettings(train=("train.jsonl",), packing=False, max_length=96)
    with pytest.raises(UserError, match="no default chat template") as error:
        chat_template(several, data, tmp_path)
    assert "data.chat_template" in (error.value.help or "")
