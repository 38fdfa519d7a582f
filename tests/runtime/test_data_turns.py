"""Tests of which messages carry loss: by role, by weight, and tool calls with their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.data.formats import parse_chat
from recipec.runtime.data.masking import Inconsistent, Renderer
from recipec.runtime.data.row_counts import SplitReport
from recipec.runtime.data.template import ChatTemplate
from recipec.runtime.errors import UserError
from tests.runtime.chats import CALL, GEMMA4, MARKED, TOOLS, chat, published
from tests.runtime.preparing import prepared

MISTRAL = """
{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set said = messages | rejectattr('role', 'equalto', 'tool') | list %}
{%- for message in said | rejectattr('tool_calls', 'defined') %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == asked[-1] %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- else %}
{{- '[TOOL_RESULTS] {"content": ' + message.content }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""
"""A short template of our own with calls, results and tools as in Mistral's templates of 2024 and 2025.

The other templates come from TRL, which ships none of Mistral's. What the tests below check was also seen
with Mistral Nemo's published template, except for its spaces.
"""

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>", "<|tool_call>", "<tool_call|>", "</s>"),
)


def call(city: str, id: str, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return {
        **{"role": "assistant", "content": "", **more},
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def result(content: str, id: str) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": id, "content": content}


TWICE: list[dict[str, Any]] = [
    {"role": "user", "content": "How is Rome?"},
    call("Rome", "abcdefgh1", reasoning_content="Look it up."),
    result("sunny", "abcdefgh1"),
    {"role": "assistant", "content": "It is sunny in Rome."},
    {"role": "user", "content": "And Bern?"},
    call("Bern", "abcdefgh2"),
    result('{"sky": "rainy"}', "abcdefgh2"),
    {"role": "assistant", "content": "It rains."},
]


def learned(template: str, messages: list[dict[str, Any]], tools: Any, loss_on: Any) -> list[str]:
    text = template if "{" in template else published(template)
    renderer = Renderer(ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}), SPECIAL, loss_on)
    made = renderer.render(messages, tools)
    assert "Tells the weather." in made.text and made.ended
    assert not {"tool_calls", "tools", "tool messages"} & set(made.unused)
    return [made.text[start:end] for start, end in made.spans]


QWEN = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call><|im_end|>'
EMPTY = "<think>\n\n</think>\n\n"
LLAMA = '{{"name": "weather", "parameters": {{"city": "{}"}}}}<|eot_id|>'
GEMMA = '<|tool_call>call:weather{{city:<|"|>{}<|"|>}}<tool_call|><|tool_response>'
OWN = '[TOOL_CALLS] [{{"name": "weather", "arguments": {{"city": "{}"}}, "id": "abcdefgh{}"}}]</s>'
ANSWERS = ("It is sunny in Rome.", "It rains.")


@pytest.mark.parametrize(
    ("template", "calls", "ends", "results"),
    [
        # Qwen 3 drops the first question's reasoning, and writes an empty one only before the last answer.
        ("qwen3", (QWEN.format("Rome"), QWEN.format("Bern")), "<|im_end|>", ("sunny", '{"sky": "rainy"}')),
        ("qwen2_5", (QWEN.format("Rome"), QWEN.format("Bern")), "<|im_end|>", ("sunny", '{"sky": "rainy"}')),
        (
            "llama3_1",
            (LLAMA.format("Rome"), LLAMA.format("Bern")),
            *("<|eot_id|>", ("sunny", '{\\"sky\\": \\"rainy\\"}')),
        ),
        ("gemma4", (GEMMA.format("Rome"), GEMMA.format("Bern")), "<turn|>", ("sunny", '{"sky": "rainy"}')),
        ("gemma4_v5", (GEMMA.format("Rome"), GEMMA.format("Bern")), "<turn|>", ("sunny", '{"sky": "rainy"}')),
        (MISTRAL, (OWN.format("Rome", 1), OWN.format("Bern", 2)), "</s>", ("sunny", '{"sky": "rainy"}')),
    ],
)
def test_tool_calls_carry_loss_and_tool_results_only_if_requested(
    template: str, calls: tuple[str, str], ends: str, results: tuple[str, str]
) -> None:
    first, second = (answer + ends for answer in ANSWERS)
    second = EMPTY + second if template == "qwen3" else second
    assert learned(template, TWICE, TOOLS, "assistant") == [calls[0], first, calls[1], second]
    assert learned(template, TWICE, TOOLS, ("tool", "assistant")) == [
        *(calls[0], results[0], first, calls[1], results[1], second)
    ]
    assert learned(template, TWICE, TOOLS, ("tool",)) == [*results]
    light = [{**TWICE[0]}, {**TWICE[1], "weight": 0}, {**TWICE[2], "weight": 0}, *TWICE[3:]]
    assert learned(template, light, TOOLS, ("assistant", "tool")) == [first, calls[1], results[1], second]


def test_text_and_two_tool_calls_in_one_turn_carry_loss() -> None:
    both = {
        **TWICE[1],
        "content": "I look.",
        "tool_calls": [*TWICE[1]["tool_calls"], *TWICE[5]["tool_calls"]],
    }
    messages = [TWICE[0], both, TWICE[2], TWICE[6], *TWICE[3:5], {"role": "assistant", "content": "Why?"}]
    found = learned("qwen3", messages, TOOLS, "assistant")
    assert found[0] == "I look.\n" + QWEN.format("Rome").replace("<|im_end|>", "\n") + QWEN.format("Bern")


def test_tool_call_rendered_differently_as_last_turn_is_refused() -> None:
    odd = published("qwen3").replace("{{- '}\\n</tool_call>' }}", "{{- ('}' ~ messages | length) }}")
    assert odd != published("qwen3")
    with pytest.raises(Inconsistent, match="message 1 calls tools"):
        learned(odd, CALL, TOOLS, "assistant")


@pytest.mark.parametrize("template", [GEMMA4, MARKED])
@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        (("user",), ["one<turn|>", "three<turn|>"]),
        (("user", "system"), ["Be brief<turn|>", "one<turn|>", "three<turn|>"]),
        (("assistant", "user"), ["one<turn|>", "two<turn|>", "three<turn|>", "four<turn|>"]),
        (("assistant",), ["two<turn|>", "four<turn|>"]),
    ],
)
def test_loss_on_roles_selects_the_turns_with_loss(template: str, loss_on: Any, expected: list[str]) -> None:
    renderer = Renderer(ChatTemplate(template, {"bos_token": "<bos>"}), SPECIAL, loss_on)
    made = renderer.render(chat("one", "two", "three", "four", system="Be brief"))
    assert [made.text[start:end] for start, end in made.spans] == expected


def test_loss_on_all_excludes_weight_0_messages_of_any_role() -> None:
    messages = chat("one", "two", "three", "four")
    messages = [{**message, "weight": weight} for message, weight in zip(messages, (0, 1, 1, 0), strict=True)]
    made = Renderer(ChatTemplate(GEMMA4, {"bos_token": "<bos>"}), SPECIAL, "all").render(messages)
    parts = [made.text[start:end] for start, end in made.spans]
    assert parts == [
        "<bos><|turn>user\n",
        "\n<|turn>model\ntwo<turn|>\n<|turn>user\nthree<turn|>\n<|turn>model\n",
    ]


def test_rows_with_odd_weights_or_roles_are_reported_by_file_and_line(tmp_path: Path) -> None:
    """Try weights in quotes, between 0 and 1 and in lists; and missing, listed and unknown roles."""
    said = {"role": "user", "content": "hello"}
    odd: list[Any] = [
        [said, {"role": "assistant", "content": "fox", "train": "0"}],
        [said, {"role": "assistant", "content": "fox", "train": 0.5}],
        [said, {"role": "assistant", "content": "fox", "train": [0]}],
        [said, {"content": "fox"}],
        [said, {"role": ["assistant"], "content": "fox"}],
        [said, [["assistant", "fox"]]],
        [[said, {"role": "assistant", "content": "fox"}]],
        [said, {"role": "assistant", "content": [["fox"]]}],
        [said, {"role": "assistant", "content": "fox", "train": 2}],
    ]
    good: list[Any] = [
        [said, {"role": "assistant", "content": "fox", "train": weight}] for weight in (1, True, 1.0, None)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in odd + good))
    settings = {"fields": {"weight": "train"}, "max_invalid_ratio": 1.0}
    report = prepared(tmp_path, rows=1, batch=1, **settings).report.train
    assert (report.kept, report.malformed.count) == (4, len(odd))
    assert [f"{one.origin}: {one.reason}" for one in report.malformed.first] == [
        "train.jsonl:1: message 1 (assistant) has the weight '0': give 0 (no loss) or 1 (loss)",
        "train.jsonl:2: message 1 (assistant) has the weight 0.5: give 0 (no loss) or 1 (loss)",
        "train.jsonl:3: message 1 (assistant) has the weight [0]: give 0 (no loss) or 1 (loss)",
        "train.jsonl:4: message 1 has the role None, not one of system, user, assistant, tool",
        "train.jsonl:5: message 1 has the role ['assistant'], not one of system, user, assistant, tool",
    ]
    kept = prepared(tmp_path, rows=1, batch=1, loss_on=("assistant", "user"), **settings).samples
    assert [int((sample.targets[1:] != sample.targets[:-1]).sum()) for sample in kept] == [4] * 4
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"messages": m}) + "\n" for m in odd[3:8] + good[:1])
    )
    report = prepared(tmp_path, rows=1, batch=1, max_invalid_ratio=1.0).report.train
    assert [one.origin for one in report.malformed.first] == [f"train.jsonl:{n}" for n in range(1, 6)]


PLAIN = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>' + message.content + '<|im_end|>' }}
{%- elif message.role == 'assistant' CONDITION %}
{{- '<|turn>' + (message.content or '') }}
{%- for call in message.tool_calls %}{{ call.function.name + ARGUMENTS }}{% endfor %}{{ '<turn|>' }}
{%- elif message.role == 'assistant' %}{{ '<|turn>' + message.content + '<turn|>' }}
{%- else %}{{ '<|tool_response>' + message.content + '<tool_response|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>' }}{% endif %}
"""
JSON = "call.function.arguments | tojson"
TEXT = "call.function.arguments"
PYTHON = "call.function.arguments | string"


@pytest.mark.parametrize("given", [{"city": "Röme", "day": None}, '{"city":"R\\u00f6me",  "day": null}'])
@pytest.mark.parametrize("condition", ["and message.tool_calls", "and message.content is none"])
@pytest.mark.parametrize(
    ("arguments", "as_text"), [(JSON, False), (TEXT, True), (f"'' ~ {TEXT}", True), (PYTHON, True)]
)
def test_template_gets_arguments_and_content_in_the_form_that_it_takes(
    arguments: str, as_text: bool, condition: str, given: Any
) -> None:
    """DeepSeek's templates concatenate the arguments, and R1's asks whether the content is null."""
    template = PLAIN.replace("ARGUMENTS", arguments).replace("CONDITION", condition)
    asked = {"role": "assistant", "content": None}
    asked |= {"tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": given}}]}
    row = parse_chat("a:1", {"messages": [CALL[0], asked, *CALL[2:]]}, {})
    made = Renderer(ChatTemplate(template, {}), SPECIAL, "assistant").render(row.messages or [])
    dumped = json.dumps({"city": "Röme", "day": None}, ensure_ascii=False)
    expected = given if as_text and isinstance(given, str) else dumped
    assert [made.text[start:end] for start, end in made.spans] == [
        f"weather{expected}<turn|>",
        "It is sunny in Rome.<turn|>",
    ]
    forms = (*(["json"] if as_text else []), *(["null"] if "none" in condition else []))
    assert made.adapted == forms


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_deepseek_tool_calls_render_as_in_transformers(name: str) -> None:
    """Compare with transformers' rendering of OpenAI's messages, whose arguments are text."""
    from tests.runtime.chats import tokenizer

    asked = {"role": "assistant", "content": None, "tool_calls": [*TWICE[1]["tool_calls"]]}
    asked["tool_calls"] = [
        {**call, "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
        for call in asked["tool_calls"]
    ]
    messages = [TWICE[0], asked, TWICE[2], TWICE[3]]
    using = tokenizer(published(name))
    row = parse_chat("a:1", {"messages": messages}, {})
    made = ChatTemplate(published(name), using.special_tokens_map)
    rendered = using.apply_chat_template(messages, tokenize=False)
    assert made.render(row.messages or []) == rendered and '{"city":"Rome"}' in rendered


SAID = {**TWICE[1], "content": "I look."}
SAID.pop("reasoning_content")
SILENT = {**SAID, "content": ""}


@pytest.mark.parametrize("spelled", [[SAID], [{"role": "assistant", "content": "I look."}, SILENT]])
def test_gemma4_text_before_a_tool_call_is_learned_in_its_place(spelled: list[dict[str, Any]]) -> None:
    """Gemma 4's template writes a message's text after the result; OpenAI's traces have it in the call."""
    messages = [TWICE[0], *spelled, *TWICE[2:]]
    found = learned("gemma4_v5", messages, TOOLS, "assistant")
    assert "".join(found[:-3]) == "I look." + GEMMA.format("Rome")
    assert found[-3:] == [f"{ANSWERS[0]}<turn|>", GEMMA.format("Bern"), f"{ANSWERS[1]}<turn|>"]
    assert learned("gemma4_v5", messages[: 1 + len(spelled)], TOOLS, "assistant")[-1].endswith(
        GEMMA.format("Rome")
    )


def test_template_without_text_before_calls_is_refused_with_a_way_out(tmp_path: Path) -> None:
    messages = [TWICE[0], SAID, *TWICE[2:4]]
    (tmp_path / "train.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 4)
    settings: dict[str, Any] = {"max_length": 512, "chat_template": published("gemma4_v4")}
    with pytest.raises(UserError, match=r"message 1 has text and tool calls.* text after the calls") as e:
        prepared(tmp_path, rows=1, batch=1, **settings)
    code = (e.value.help or "").partition("where calls.py is\n")[2]
    (tmp_path / "calls.py").write_text(code + "\n")
    assert prepared(tmp_path, 1, 1, **settings, transform="calls.py:only").report.train.kept == 4
    template = ChatTemplate(published("deepseek_r1_distill"), {})
    with pytest.raises(Inconsistent, match=r"message 1 has text and tool calls.* does not write both"):
        Renderer(template, SPECIAL, "assistant").render(messages)


def test_report_counts_the_forms_of_tool_calls(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        (json.dumps({"messages": [TWICE[0], SAID, *TWICE[2:4]]}) + "\n") * 4
    )
    template = published("gemma4_v5")
    report = prepared(tmp_path, 1, 1, max_length=512, chat_template=template).report.train
    assert report.adapted == {"apart": 4} and SplitReport.from_dict(report.to_dict()) == report
    assert "4 samples: the chat template writes the text of a message after its tool calls, so" in "\n".join(
        report.notes()
    )
