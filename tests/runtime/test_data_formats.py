"""Tests of how rows become conversations, text and preferences, and of why a row is left out."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from recipec.runtime.data.advice import advice
from recipec.runtime.data.columns import Unread
from recipec.runtime.data.formats import PARSERS, ParsedSample, PreferencePair, parse_preference
from recipec.runtime.data.row_values import Malformed
from tests.runtime.chats import chat

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky", "how": {"long": 2}}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What is it?"},
        {
            "from": "function_call",
            "value": '{"name": "look", "arguments": {"at": "sky", "how": {"long": 2}}}',
        },
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "The sky."},
    ],
    "tools": json.dumps([TOOL["function"]]),
}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": "sky", "how": {"long": 2}}'},
                }
            ],
        },
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "The sky."},
    ],
    "tools": [TOOL],
}
PARSED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "blue"},
    {"role": "assistant", "content": "The sky."},
]


def parse(format: str, row: dict[str, Any], **fields: str) -> ParsedSample:
    before = copy.deepcopy(row)
    parsed = PARSERS[format]("a:1", row, fields)
    assert row == before  # parsing does not change a row that a transform or another reader still uses
    return parsed


def reason(format: str, row: Any, **fields: str) -> str:
    with pytest.raises(Malformed) as error:
        if format == "preference":
            parse_preference("a:1", row, fields)
        else:
            PARSERS[format]("a:1", row, fields)
    assert len(str(error.value)) <= 120
    return str(error.value)


@pytest.mark.parametrize("row", [SHAREGPT, OPENAI, {**OPENAI, "tools": json.dumps([TOOL])}])
def test_sharegpt_and_openai_conversations_parse_to_the_same_messages(row: dict[str, Any]) -> None:
    assert parse("chat", row) == ParsedSample("a:1", messages=PARSED, tools=[TOOL])


def test_null_keys_of_messages_and_calls_are_ignored_and_null_arguments_stay() -> None:
    """Null keys count as missing: OpenAI's libraries write them. A null argument is a value."""
    call = {
        "id": None,
        "type": "function",
        "function": {"name": "look", "arguments": {"at": "sky", "by": None}},
    }
    messages = [
        {"role": "user", "content": "a", "name": None, "tool_calls": None, "from": None},
        {"role": "assistant", "content": None, "name": None, "tool_calls": [call], "from": None},
        {"role": "assistant", "content": "b", "name": "n", "tool_calls": [], "from": None},
    ]
    assert parse("chat", {"messages": messages, "tools": None, "conversations": None}).messages == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "look", "arguments": {"at": "sky", "by": None}}}
            ],
        },
        {"role": "assistant", "content": "b", "name": "n"},
    ]


PARAMETERS = {"type": "object", "properties": {"at": {"type": ["string", "null"], "default": None}}}


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS, "strict": None}}],
        [{"type": "function", "function": {"name": "look", "parameters": json.dumps(PARAMETERS)}}],
        [{"name": "look", "parameters": json.dumps(PARAMETERS)}],
        [{"type": "function", "function": json.dumps({"name": "look", "parameters": PARAMETERS})}],
        json.dumps([{"name": "look", "parameters": json.dumps(PARAMETERS)}]),
        [json.dumps({"name": "look", "parameters": PARAMETERS})],
    ],
)
def test_tool_schema_is_an_object_in_every_spelling_and_keeps_its_nulls(tools: Any) -> None:
    expected = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    assert parse("chat", {"messages": chat("a", "b"), "tools": tools}).tools == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"at": null}', {"at": None}),
        ({"at": None}, {"at": None}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ("{}", {}),
    ],
)
def test_arguments_become_an_object(arguments: Any, expected: Any) -> None:
    call = {"function": {"name": "look", "arguments": arguments}}
    row = {"messages": [*chat("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]}
    found = (parse("chat", row).messages or [])[1]["tool_calls"][0]["function"]["arguments"]
    assert found == expected


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
        {"messages": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b", "weight": 1}]},
        {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
)
def test_conversations_are_converted_as_in_trl(row: dict[str, Any]) -> None:
    from trl.data_utils import maybe_convert_to_chatml

    assert parse("chat", row).messages == maybe_convert_to_chatml(copy.deepcopy(row))["messages"]


def test_a_sharegpt_system_column_becomes_the_first_turn() -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert parse("chat", {"conversations": turns, "system": "s"}).messages == chat("a", "b", system="s")
    assert parse("chat", {"conversations": turns, "system": ""}).messages == chat("a", "b")
    # Next to OpenAI's messages, this column may hold anything.
    assert parse("chat", {"messages": chat("a", "b"), "system": "linux"}).messages == chat("a", "b")


def test_renamed_columns_are_read() -> None:
    turns = [{"who": "human", "says": "a"}, {"who": "gpt", "says": "b", "name": "n"}]
    row = parse(
        "chat", {"talk": turns, "uses": [TOOL]}, messages="talk", role="who", content="says", tools="uses"
    )
    assert row.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "name": "n"},
    ]
    assert row.tools == [TOOL]
    said = [
        {"role": role, "content": "raw", "says": text} for role, text in (("user", "a"), ("assistant", "b"))
    ]
    assert parse("chat", {"messages": said}, content="says").messages == chat("a", "b")
    row = parse("instruction", {"q": "a", "a": "b"}, instruction="q", output="a")
    assert row.messages == chat("a", "b")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "x"}, "no 'messages' (it has 'text')"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": "[x"}, "'messages' is a string that is not JSON (Expecting value, character 2)"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["x"]}, "message 0 is a string, not an object"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "message 0 has the role 'robot', not one of system, ",
        ),
        ({"messages": [{"role": "user"}]}, "message 0 (user) has a null as content, not a string"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "message 0 (assistant) is blank"),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "message 0 (user) holds half a surrogate pair",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "part 0 of message 0 (user) is of type 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "message 0 (user) calls tools",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "tool call 0 of message 0 (assistant) names no function",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]}]},
            "the arguments of tool call 0 of message 0 (assistant) is a string that is not JSON "
            "(Expecting value, character 1)",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]},
            "the arguments of tool call 0 of message 0 (assistant) are a list, not an object",
        ),
        (
            {"messages": chat("a", "b"), "tools": {"name": "f"}},
            "'tools' is an object, not a list of JSON schemas",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]},
            "message 0 (assistant) has the weight 0.5: give 0 (no loss) or 1 (loss)",
        ),
        ({"messages": chat("a", "b"), "tools": [{"type": "function"}]}, "tool 0 names no function"),
    ],
)
def test_malformed_chat_row_gives_its_reason(row: dict[str, Any], why: str) -> None:
    assert why in reason("chat", row)


def test_an_instruction_becomes_a_conversation() -> None:
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    assert parse("instruction", row) == ParsedSample(
        "a:1", messages=chat("Add.\n\n1, 2", "3"), completion_start=1
    )
    for blank in ("", " ", None):
        assert parse("instruction", {**row, "input": blank, "system": blank}).messages == chat("Add.", "3")
    whole = parse("instruction", {**row, "system": "s", "history": [["a", "b"], ["c", "d"]]})
    assert whole.messages == chat("a", "b", "c", "d", "Add.\n\n1, 2", "3", system="s")
    assert whole.completion_start == 6


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"instruction": "a"}, "no 'output' (it has 'instruction')"),
        ({"instruction": "a", "output": None}, "'output' is null"),
        ({"instruction": "a", "output": " "}, "'output' is blank"),
        ({"instruction": 3, "output": "b"}, "'instruction' is a number, not a string"),
        ({"instruction": "a", "output": "b", "input": ["c"]}, "'input' is a list, not a string"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "'history' is not a list of pairs"),
    ],
)
def test_malformed_instruction_row_gives_its_reason(row: dict[str, Any], why: str) -> None:
    assert why in reason("instruction", row)


def test_prompt_and_completion_are_read_from_text_or_messages() -> None:
    assert parse("prompt_completion", {"prompt": "a ", "completion": " b"}) == ParsedSample(
        "a:1", prompt="a ", completion=" b"
    )
    row = {"prompt": chat("a", "b", "c"), "completion": [{"from": "gpt", "value": "d"}], "tools": [TOOL]}
    assert parse("prompt_completion", row) == ParsedSample(
        "a:1", messages=chat("a", "b", "c", "d"), completion_start=3, tools=[TOOL]
    )


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a"}, "no 'completion' (it has 'prompt')"),
        (
            {"prompt": chat("a"), "completion": "b"},
            "'prompt' is a list and 'completion' a string: both are text",
        ),
        ({"prompt": chat("a"), "completion": chat("b")}, "no assistant turn"),
        ({"prompt": [3], "completion": chat("a", "b")}, "'prompt' message 0 is a number, not an object"),
        ({"prompt": "a", "completion": "\udfff"}, "'completion' holds half a surrogate pair"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "a judged answer, which KTO trains on"),
    ],
)
def test_malformed_prompt_completion_row_gives_its_reason(row: dict[str, Any], why: str) -> None:
    assert why in reason("prompt_completion", row)


@pytest.mark.parametrize(
    ("label", "liked"),
    [(True, True), (False, False), ("true", True), (" False", False), (1, "1"), ("yes", "'yes'")],
)
def test_unpaired_preference_label_decides_liked_or_is_refused(label: Any, liked: Any) -> None:
    row = {"asked": "a", "completion": " b", "good": label}
    fields = {"prompt": "asked", "label": "good"}
    if isinstance(liked, bool):
        expected = ParsedSample("a:1", prompt="a", completion=" b", liked=liked)
        assert parse("unpaired_preference", row, **fields) == expected
        return
    assert reason("unpaired_preference", row, **fields) == f"'good' is {liked}, and not true or false"
    assert "no 'label'" in reason("unpaired_preference", {"prompt": "a", "completion": " b"})


def test_text_row_is_read_unchanged() -> None:
    assert parse("text", {"text": " a\n"}) == ParsedSample("a:1", completion=" a\n")
    assert reason("text", {"text": ["a"]}) == "'text' is a list, not a string"
    assert reason("text", {"content": "a"}) == "no 'text' (it has 'content')"


LIKED = [*chat("a", "b", "c"), {"role": "assistant", "content": "good"}]
DISLIKED = [*chat("a", "b", "c"), {"role": "assistant", "content": "bad"}]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": LIKED, "rejected": DISLIKED},
        {"chosen": LIKED, "rejected": DISLIKED, "prompt": "a"},  # UltraFeedback's form
        {"chosen": LIKED[3:], "rejected": DISLIKED[3:], "prompt": LIKED[:3]},
        {"chosen": LIKED, "rejected": [*DISLIKED, *chat("d", "e")]},
        {"chosen": "blue", "rejected": "green", "prompt": "The sky is "},
    ],
)
def test_preference_prompts_are_extracted_as_in_trl(row: dict[str, Any]) -> None:
    from trl.data_utils import maybe_extract_prompt

    assert parse_preference("a:1", row, {}) == PreferencePair(
        "a:1", **{k: v for k, v in maybe_extract_prompt(copy.deepcopy(row)).items()}
    )


def test_prompt_repeated_in_chosen_and_rejected_is_removed_from_both() -> None:
    row = parse_preference("a:1", {"prompt": LIKED[:3], "chosen": LIKED, "rejected": DISLIKED}, {})
    assert (row.prompt, row.chosen, row.rejected) == (LIKED[:3], LIKED[3:], DISLIKED[3:])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "a"}, "no 'rejected' (it has 'chosen')"),
        ({"chosen": "a", "rejected": "a", "prompt": "p"}, "'chosen' and 'rejected' are the same"),
        ({"chosen": "a", "rejected": "b"}, "no 'prompt'; chosen and rejected are not whole conversations"),
        ({"chosen": "a", "rejected": LIKED}, "'chosen' is a string and 'rejected' a list: both are text"),
        ({"chosen": chat("a", "b"), "rejected": chat("c", "d")}, "do not begin with the same question"),
        (
            {"chosen": LIKED[-1:], "rejected": chat("b"), "prompt": "p"},
            "'prompt' is not a list of messages, and chosen and rejected do not begin with",
        ),
        (
            {"chosen": LIKED, "rejected": chat("a", "b", "c")[:3]},
            "no assistant turn in 'rejected' after the prompt",
        ),
    ],
)
def test_malformed_preference_row_gives_its_reason(row: dict[str, Any], why: str) -> None:
    assert why in reason("preference", row)


QUESTION = "What does the fox say to the world?"
THOUGHT = "The fox thinks of the world, and says hello."
PLAIN = {"instruction": "a", "output": "b"}


@pytest.mark.parametrize(
    ("format", "row", "kinds"),
    [
        (
            "chat",
            {"messages": chat("a", "b"), "tools": [TOOL], "id": "x", "source": "web"},
            {"values": ("id", "source")},
        ),
        ("chat", {"messages": chat("a", "b"), "system": "s"}, {"parts": ("system",)}),
        ("chat", {"messages": chat("a", "b"), "images": ["a.png"]}, {"parts": ("images",)}),
        ("chat", {"messages": chat("a", "b"), "system": "", "images": [], "documents": None}, {}),
        ("chat", {"conversations": chat("a", "b"), "system": "s"}, {}),
        (
            "chat",
            {"conversations": chat("a", "b"), "system_prompt": "s"},
            {"taken": ("system_prompt as system",)},
        ),
        ("chat", {"conversations": chat("a", "b", system="s"), "system": "t"}, {"parts": ("system",)}),
        # A column that repeats a message is not lost, and one that repeats all of them holds nothing else.
        ("chat", {"messages": chat(QUESTION, "b"), "prompt": QUESTION, "text": f"Ask: {QUESTION}\nb"}, {}),
        ("chat", {"messages": chat("a", "b"), "prompt": QUESTION}, {"texts": ("prompt",)}),
        ("chat", {"messages": chat("a", "b"), "cot": THOUGHT}, {"taken": ("cot as reasoning",)}),
        ("chat", {"messages": chat("a", "b", "c", "d"), "reasoning": THOUGHT}, {"parts": ("reasoning",)}),
        (
            "chat",
            {"messages": chat("a", "b"), "rationale": THOUGHT, "judge_reasoning": THOUGHT},
            {"texts": ("rationale", "judge_reasoning")},
        ),
        ("instruction", {**PLAIN, "system": "s", "tools": "[]"}, {}),
        ("instruction", {**PLAIN, "tools": [TOOL], "reasoning": "on"}, {"values": ("reasoning",)}),
        ("instruction", {**PLAIN, "context": "c"}, {"taken": ("context as input",)}),
        ("instruction", {**PLAIN, "input": "i", "context": QUESTION}, {"texts": ("context",)}),
        ("instruction", {**PLAIN, "input": "", "context": "c"}, {"taken": ("context as input",)}),
        ("instruction", {**PLAIN, "Complex_CoT": "t"}, {"taken": ("Complex_CoT as reasoning",)}),
        (
            "instruction",
            {**PLAIN, "cot": None, "thinking_trajectories": ["t"]},
            {"taken": ("thinking_trajectories as reasoning",)},
        ),
        (
            "instruction",
            {**PLAIN, "deepseek_thinking": THOUGHT, "gemini_cot": THOUGHT},
            {"parts": ("deepseek_thinking", "gemini_cot")},
        ),
        ("instruction", {**PLAIN, "answer": "c", "score": 2}, {"texts": ("answer",), "values": ("score",)}),
        (
            "prompt_completion",
            {"prompt": "a", "completion": "b", "tools": [TOOL], "label": 3},
            {"parts": ("tools",), "values": ("label",)},
        ),
        (
            "prompt_completion",
            {"prompt": "a", "completion": "b", "context": QUESTION},
            {"parts": ("context",)},
        ),
        ("preference", {"chosen": LIKED, "rejected": DISLIKED, "system": "s"}, {"parts": ("system",)}),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c", "tools": [TOOL]},
            {"parts": ("tools",)},
        ),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c", "rationale": THOUGHT},
            {"texts": ("rationale",)},
        ),
        ("text", {"text": "a", "images": ["a.png"]}, {"parts": ("images",)}),
        (
            "text",
            {"text": "a", "summary": "b", "url": "https://a.b/c d"},
            {"texts": ("summary",), "values": ("url",)},
        ),
    ],
)
def test_columns_that_are_not_read_are_listed_by_kind(
    format: str, row: dict[str, Any], kinds: dict[str, tuple[str, ...]]
) -> None:
    parsed = parse_preference("a:1", row, {}) if format == "preference" else PARSERS[format]("a:1", row, {})
    assert parsed.unread == Unread(**kinds)


def test_context_and_reasoning_join_their_messages() -> None:
    row = {"question": "a", "context": "c", "answer": "b", "reasoning": "t"}
    messages = parse("instruction", row, instruction="question", output="answer").messages
    assert messages == [*chat("a\n\nc"), {"role": "assistant", "content": "b", "reasoning_content": "t"}]
    # A column that data.fields names is read alone.
    plain = parse("instruction", row, instruction="question", output="answer", input="input", reasoning="why")
    assert plain.messages == chat("a", "b") and plain.unread.values == ("context", "reasoning")
    row["answer"] = "<think>t</think>b"
    assert parse("instruction", row, instruction="question", output="answer").messages == chat(
        "a\n\nc", row["answer"]
    )


def test_preference_of_texts_with_a_system_column_is_a_conversation() -> None:
    row = {"system": "s", "question": "a", "chosen": "b", "rejected": "c"}
    made = parse_preference("a:1", row, {"prompt": "question"})
    assert (made.prompt, made.chosen, made.rejected) == (
        chat("a", system="s"),
        chat("", "b")[1:],
        chat("", "c")[1:],
    )
    blank = {"system_prompt": "", "prompt": "a", "chosen": "b", "rejected": "c"}
    assert parse_preference("a:1", blank, {}).prompt == chat("a")
    named = parse("chat", {"messages": chat("a", "b"), "sys": "s"}, system="sys")
    assert named.messages == chat("a", "b", system="s") and not any(named.unread)


def test_preference_without_prompt_is_taken_apart_only_if_it_is_a_conversation() -> None:
    human = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Sky?\n\nAssistant:"
    row = parse_preference("a:1", {"chosen": f"{human} It is blue.", "rejected": f"{human} It is green."}, {})
    assert (row.prompt, row.chosen, row.rejected) == (human, " It is blue.", " It is green.")
    marked = "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
    row = parse_preference("a:1", {"chosen": f"{marked}Blue", "rejected": f"{marked}Black"}, {})
    assert (row.prompt, row.chosen) == (marked, "Blue")
    pair = {"question": "Sky?", "chosen": "The answer is blue", "rejected": "The answer is red"}
    assert reason("preference", pair) == (
        "no 'prompt': it may be 'question'; chosen and rejected are not whole conversations"
    )
    assert advice("preference", {}, list(pair)) == "data.fields: {prompt: question}"
    assert parse_preference("a:1", pair, {"prompt": "question"}).prompt == "Sky?"
    answers = {"chosen": chat("a", "b")[1:], "rejected": chat("a", "c")[1:]}
    assert "do not begin with the same question" in reason("preference", answers)


def test_column_mapped_to_instruction_is_not_read_as_input_too() -> None:
    row = parse("instruction", {"input": "a", "output": "b"}, instruction="input")
    assert row.messages == chat("a", "b")


def test_legacy_function_call_is_read_as_a_tool_call() -> None:
    messages = [*chat("a"), {"role": "assistant", "content": None, "function_call": CALL["function"]}]
    assert (parse("chat", {"messages": messages}).messages or [])[1]["tool_calls"] == [CALL]


def test_prompts_end_before_their_answer() -> None:
    """A conversation with its answer is no prompt, and `fields` names another column of the same row."""
    row = {"messages": chat("a", "b"), "problem": "c", "solution": "d"}
    assert "'messages' ends with an answer of the assistant" in reason("prompt", row)
    assert parse("prompt", row, prompt="problem").prompt == "c"
    asked = parse("prompt", {"messages": chat("a"), "prompt": "b"})
    assert asked.messages == chat("a")
