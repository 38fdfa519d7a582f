"""Tests of which characters and tokens carry loss, with the templates of real models."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from recipec.runtime.data.encoding import Encoder, coding, show, token_range
from recipec.runtime.data.formats import ParsedSample
from recipec.runtime.data.masking import Inconsistent, Renderer
from recipec.runtime.data.row_counts import SplitReport
from recipec.runtime.data.samples import Sample, Samples
from recipec.runtime.data.template import ChatTemplate
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings
from tests.runtime.chats import CALL, GEMMA4, MARKED, TOOLS, chat, published, renderer_of, tokenizer

TWO = chat("Hello", "Hi there", "And now?", "Good bye", system="Be brief.")


def targets(template: str, messages: list, loss_on: str = "assistant") -> list[str]:
    rendered = renderer_of(tokenizer(), template, loss_on).render(messages)
    return [rendered.text[start:end] for start, end in rendered.spans]


def encoded(
    rows: list[ParsedSample], template: str, using: Any = None, **settings: Any
) -> tuple[Samples, SplitReport]:
    using = using or tokenizer()
    data = DataSettings(train=(), **{"packing": False, "max_length": 512, "overlong": "error", **settings})
    return Encoder(coding(using, template, data, None)).encode(rows, 0)


def sample(template: str, messages: list, loss_on: str = "assistant") -> Sample:
    (made,), _ = encoded([ParsedSample("x:1", messages)], template, loss_on=loss_on)
    return made


def test_gemma4_answers_and_end_of_turn_tokens_carry_loss() -> None:
    made = sample(GEMMA4, TWO)
    text = tokenizer().decode(made.tokens)
    assert text == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHello<turn|>\n<|turn>model\nHi there<turn|>\n"
        "<|turn>user\nAnd now?<turn|>\n<|turn>model\nGood bye<turn|>\n"
    )
    assert tokenizer().decode(made.tokens[made.targets]) == "Hi there<turn|>Good bye<turn|>"
    # One <bos>, which the template writes.
    assert list(made.tokens).count(tokenizer().bos_token_id) == 1


def test_loss_on_last_assistant_covers_only_the_last_answer() -> None:
    assert targets(GEMMA4, TWO, "last_assistant") == ["Good bye<turn|>"]
    assert targets(MARKED, TWO, "last_assistant") == ["Good bye<turn|>"]


@pytest.mark.parametrize("template", [MARKED, "gemma3_training", "qwen3_training", "qwen2_5_training"])
def test_generation_marker_targets_match_transformers(template: str) -> None:
    template = template if "{" in template else published(template)
    messages = chat("Hello", "Hi there, the fox", "And now?", "  Good bye ")
    made = sample(template, messages)
    reference = tokenizer().apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert made.tokens.tolist() == reference["input_ids"]
    assert made.targets.tolist() == [bool(x) for x in reference["assistant_masks"]]


def test_unmarked_template_gives_the_targets_of_a_marked_one() -> None:
    plain = sample(GEMMA4, TWO)
    marked = sample(MARKED, TWO)
    assert plain.tokens.tolist() == marked.tokens.tolist()
    assert plain.targets.tolist() == marked.targets.tolist()


def test_gpt_oss_puts_loss_on_last_turn_channels_and_earlier_text() -> None:
    """Only the last turn ends as in generation. A generation prompt names no channel."""
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")

    def spans(messages: list, tools: Any = None, loss_on: str = "assistant") -> tuple[list[str], bool]:
        template = ChatTemplate(published("gptoss"), {"eos_token": "<|return|>"})
        found = Renderer(template, special, loss_on).render(messages, tools)
        assert found.ended
        return [found.text[start:end] for start, end in found.spans], found.substituted

    last = "<|channel|>final<|message|>Good bye<|return|>"
    assert spans(TWO) == (["Hi there<|end|>", last], True)
    assert spans(TWO, loss_on="last_assistant") == ([last], False)
    thought = [*TWO[:-1], {**TWO[-1], "thinking": "Leave."}]
    analysis = "<|channel|>analysis<|message|>Leave.<|end|><|start|>assistant"
    assert spans(thought, loss_on="last_assistant") == ([analysis + last], False)
    calls, substituted = spans(CALL, TOOLS)
    assert calls[0].startswith(" to=functions.") and calls[0].endswith("<|call|>") and not substituted


def test_targets_of_turns_with_stripped_reasoning_use_substitution() -> None:
    messages = chat("Hello", "<think>\nhm\n</think>\n\nHi there", "And now?", "Good bye")
    renderer = renderer_of(tokenizer(), published("qwen3"), "assistant")
    rendered = renderer.render(messages)
    assert rendered.substituted
    # Qwen 3 removes the first turn's reasoning, and writes an empty one into the last turn.
    assert "hm" not in rendered.text
    assert [rendered.text[a:b] for a, b in rendered.spans] == [
        "Hi there<|im_end|>",
        "<think>\n\n</think>\n\nGood bye<|im_end|>",
    ]
    assert not renderer_of(tokenizer(), published("qwen3"), "last_assistant").render(messages).substituted


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # The generation prompt does not begin the turn; or the turn is written twice, changed, or not ended.
        (
            "{% for m in messages %}{{ m.content + m.content + '<turn|>' }}{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}",
            "writes message 1 2 times",
        ),
        (
            "{% for m in messages %}{{ m.content | upper + '<turn|>' }}{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}",
            "writes message 1 0 times",
        ),
        (
            "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}",
            "no end-of-turn token after message 1",
        ),
        (
            "{% for m in messages %}{{ m.content | length ~ m.content + '<turn|>' }}{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}",
            "depends on the message's text",
        ),
        (MARKED.replace("message['content'] + '<turn|>' }}{% end", "'' }}{% end"), "enclose nothing"),
    ],
)
def test_template_with_ambiguous_targets_is_refused(template: str, reason: str) -> None:
    with pytest.raises(Inconsistent, match=reason):
        targets(template, chat("Hello", "Hi there", "x", "y"))


def test_template_without_an_end_of_turn_token_is_reported() -> None:
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    rendered = renderer_of(tokenizer(), plain, "assistant").render(chat("Hello", "Hi there"))
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["Hi there\n"] and not rendered.ended
    report = SplitReport(unended=3)
    assert "not taught to stop" in report.notes()[0]


def test_token_across_a_target_boundary_is_refused() -> None:
    text = "abc the fox"
    encoding = tokenizer().backend_tokenizer.encode(text, add_special_tokens=False)
    assert encoding.offsets[-2:] == [(3, 7), (7, 11)]
    assert token_range(encoding, (3, 7), text) == (len(encoding) - 2, len(encoding) - 1)
    for span in ((4, 7), (3, 6), (5, 6), (0, 5)):
        with pytest.raises(Inconsistent, match="' the' belongs partly"):
            token_range(encoding, span, text)


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_token_that_includes_the_prompt_space_drops_the_row(trim_offsets: bool) -> None:
    # " the" is one token. The prompt ends in the space, so that half of the token belongs to the prompt.
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<turn|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    swallowing = tokenizer(GEMMA4, trim_offsets)
    assert len(swallowing.encode(" the", add_special_tokens=False)) == 1
    rows = [ParsedSample("x:1", chat("Hello", "the fox")), ParsedSample("x:2", chat("Hello", "Zebra"))]
    made, report = encoded(rows, template, swallowing)
    assert [(p.origin, p.reason) for p in report.inconsistent.first] == [
        ("x:1", "the token of ' the' belongs partly to a turn's targets")
    ]
    assert swallowing.decode(made[0].tokens[made[0].targets]) == "Zebra<turn|>"


def test_all_bytes_of_multi_byte_characters_carry_loss() -> None:
    made = sample(GEMMA4, chat("Grüße 🎉", "Ωμέγα 🎉 ok"))
    assert tokenizer().decode(made.tokens[made.targets]) == "Ωμέγα 🎉 ok<turn|>"


def test_only_the_answer_carries_loss_if_it_repeats_the_prompt() -> None:
    assert targets(GEMMA4, chat("model\nHi", "model\nHi")) == ["model\nHi<turn|>"]
    assert (
        targets(published("qwen3"), chat("substitute", "substitute", "a", "substitute"))[0]
        == "substitute<|im_end|>"
    )


THOUGHT = {"role": "assistant", "content": "Hi", "reasoning_content": "They greet."}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "unused"),
    [
        ("gemma4", CALL, TOOLS, ()),
        (
            "llama3",
            [*chat("a"), {"role": "user", "content": "b", "name": "Bo", "id": "7"}],
            TOOLS,
            ("name", "tools"),
        ),
        ("qwen2_5", [*chat("Hello"), THOUGHT], None, ("reasoning_content",)),
        # Dropping the reasoning of earlier turns is intended. Dropping that of all turns is reported.
        ("qwen3", [*chat("Hello"), THOUGHT, *chat("And?"), THOUGHT], None, ()),
        ("qwen3", [*chat("Hello"), THOUGHT, *chat("And?", "Hi")], None, ("reasoning_content",)),
        # A tool's name appears in its call. Ids, numbers and empty values are not reported.
        (
            "qwen2_5",
            [*chat("a"), {"role": "tool", "content": "b", "name": "look", "tool_call_id": "x"}],
            None,
            (),
        ),
        ("qwen2_5", [{"role": "user", "content": "a", "images": ["a.png"]}], None, ("images",)),
    ],
)
def test_keys_and_tools_that_a_template_ignores_are_listed_as_unused(
    template: str, messages: list, tools: Any, unused: tuple[str, ...]
) -> None:
    assert renderer_of(tokenizer(), published(template), "all").render(messages, tools).unused == unused


def call(city: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city, **more}}}


TWICE = [
    *CALL[:1],
    {"role": "assistant", "content": "", "tool_calls": [call("Rome"), call("Bern")]},
    *CALL[2:],
]
SYSTEMS = [{"role": "system", "content": "Be brief."}, *chat("Hello", "Hi", system="Be kind.")]
LINES = chat('  First\n\n\tsecond "line"  \n', "Grüße:\n  code\n", "And\nmore", "ok  \n")
QUOTED = [
    *CALL[:1],
    {"role": "assistant", "content": "", "tool_calls": [call('"Rome"\nü', days=3, now=True)]},
]
INFO = [
    *chat("Hello"),
    {"role": "assistant", "content": "Hi", "why": "They greet, so I do the same.", "id": "a b"},
]


@pytest.mark.parametrize(
    ("template", "messages", "tools", "unused", "texts"),
    [
        ("gptoss", TWICE, TOOLS, ("tool_calls",), ()),
        ("qwen3", TWICE, TOOLS, (), ()),
        # The calls are alike, so that finding their strings proves nothing.
        (
            "gptoss",
            [*TWICE[:1], {**TWICE[1], "tool_calls": [call("Rome")] * 2}, *CALL[2:]],
            TOOLS,
            ("tool_calls",),
            (),
        ),
        ("deepseek_r1_distill", SYSTEMS, None, ("system messages",), ()),
        ("llama3", SYSTEMS, None, (), ()),
        *(
            (name, LINES, None, (), ())
            for name in ("gemma4", "qwen3", "llama3_1", "phi3", "deepseek_r1_distill")
        ),
        *((name, QUOTED, TOOLS, (), ()) for name in ("gemma4", "qwen3", "gptoss", "glm4moe", "llama3_1")),
        ("qwen3", INFO, None, (), ("why",)),
        (
            "qwen3",
            [*chat("Hello"), THOUGHT, *chat("And?"), THOUGHT | {"reasoning_content": "More."}],
            None,
            (),
            ("reasoning of earlier turns",),
        ),
        (
            "deepseek_r1_distill",
            chat("Hello", "<think>\nThey greet.\n</think>\n\nHi"),
            None,
            ("reasoning",),
            (),
        ),
    ],
)
def test_strings_that_a_template_does_not_write_are_listed(
    template: str, messages: list, tools: Any, unused: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    made = renderer_of(tokenizer(), published(template), "all").render(messages, tools)
    assert (made.unused, made.texts) == (unused, texts)


def test_a_content_of_which_whole_lines_are_left_out_is_unused() -> None:
    cut = GEMMA4.replace("message['content'] | trim", "message['content'].split('\n')[-1]")
    assert renderer_of(tokenizer(), cut, "all").render(chat("One\ntwo", "three")).unused == ("user messages",)
    shout = GEMMA4.replace("| trim", "| upper")  # in another form
    assert renderer_of(tokenizer(), shout, "all").render(chat("One\ntwo", "three")).unused == ()


def test_text_ends_once_if_the_tokenizer_ends_every_text() -> None:
    from tokenizers import processors

    ending = copy.deepcopy(tokenizer())
    ids = [("<bos>", ending.bos_token_id), ("<eos>", ending.eos_token_id)]
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=ids
    )
    rows = [ParsedSample("x:1", completion=text) for text in ("Hello", "Hello<eos>", "<bos>Hello")]
    made, _ = encoded(rows, GEMMA4, ending)
    expected = tokenizer()("Hello<eos>").input_ids
    assert [sample.tokens.tolist() for sample in made] == [expected] * 3
    assert expected[0] == ending.bos_token_id and made[0].targets.tolist() == [False] + [True] * (
        len(expected) - 1
    )


def test_messages_that_a_template_skips_are_listed_as_unused() -> None:
    skipping = GEMMA4.replace("in messages", "in messages if message['role'] != 'system'")
    rendered = renderer_of(tokenizer(), skipping, "all").render(TWO)
    assert "Be brief" not in rendered.text and rendered.unused == ("system messages",)
    assert renderer_of(tokenizer(), GEMMA4, "all").render(TWO).unused == ()


def test_row_whose_assistant_turn_renders_empty_is_dropped_with_a_reason() -> None:
    rows = [ParsedSample("x:1", CALL[:2], tools=TOOLS), ParsedSample("x:2", [*chat("Hello"), THOUGHT])]
    made, report = encoded(rows, GEMMA4)
    assert [made.origin(0), report.kept, report.masked.count] == ["x:2", 1, 1]
    reason = "the chat template writes no part of an assistant's turn: it does not use tool_calls, tools"
    assert report.masked.first[0].reason == reason
    assert (report.unused, report.incomplete.first[0].origin) == ({"reasoning_content": 1}, "x:2")
    assert SplitReport.from_dict(report.to_dict()) == report


def test_separately_marked_end_of_sequence_is_kept_as_a_span() -> None:
    ended = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ended += "\n{% generation %}<eos>{% endgeneration %}"
    answer = [{"role": "assistant", "content": "Hi there"}]
    spans = Renderer(ChatTemplate(ended, {}), ("<eos>",), "assistant").render(answer, None).spans
    assert len(spans) == 2


@pytest.mark.parametrize("template", [GEMMA4, MARKED, published("qwen3")])
def test_a_turn_of_weight_0_carries_no_loss(template: str) -> None:
    light, plain = (chat("Hello", "Hi there", "And?", "Good bye") for _ in range(2))
    light[1]["weight"] = 0
    for loss_on in ("assistant", "last_assistant", "all"):
        learned = "".join(targets(template, light, loss_on))
        assert "Hi there" not in learned and "Good bye" in learned
        assert ("And?" in learned) == (loss_on == "all")
    light[1]["weight"] = 1
    assert targets(template, light) == targets(template, plain)
    light[1]["weight"] = light[3]["weight"] = 0
    assert targets(template, light) == []
    assert encoded([ParsedSample("x:1", light)], template)[1].masked.first[0].reason == "no token is a target"


def test_weight_0_turn_of_a_completion_carries_no_loss() -> None:
    light = chat("Hello", "Hi there", "And?", "Good bye")
    light[1]["weight"] = 0
    rendered = renderer_of(tokenizer(), GEMMA4, "completion").render(light, completion_start=1)
    written = [rendered.text[start:end] for start, end in rendered.spans]
    assert written == ["\n<|turn>user\nAnd?<turn|>\n<|turn>model\nGood bye<turn|>\n"]


def test_refusal_reason_names_the_system_message_if_it_is_the_cause() -> None:
    _, report = encoded([ParsedSample("x:1", TWO), ParsedSample("x:2", TWO[:1])], published("gemma"))
    first, second = report.malformed.first
    assert first.reason.endswith("; it accepts the rest without the system message")
    assert "without" not in second.reason


def test_loss_on_completion_covers_text_after_the_generation_prompt() -> None:
    renderer = renderer_of(tokenizer(), GEMMA4, "completion")
    rendered = renderer.render(TWO, completion_start=2)
    ((start, end),) = rendered.spans
    assert rendered.text[start:end] == (
        "Hi there<turn|>\n<|turn>user\nAnd now?<turn|>\n<|turn>model\nGood bye<turn|>\n"
    )
    assert rendered.ended
    prompting = GEMMA4.replace("'<|turn>model\\n' }}{%- endif", "'<|turn>model\\n<think>' }}{%- endif")
    renderer = renderer_of(tokenizer(), prompting, "completion")
    last = renderer.render(TWO, completion_start=4)
    assert last.substituted and [last.text[a:b] for a, b in last.spans] == ["Good bye<turn|>"]
    with pytest.raises(Inconsistent, match="does not begin the whole"):
        renderer.render(TWO, completion_start=2)


def test_plain_text_whose_prompt_and_completion_share_a_token_is_reported() -> None:
    rows = [
        ParsedSample("x:1", prompt="hello ", completion="the fox"),
        ParsedSample("x:2", prompt="hello", completion=" the fox"),
    ]
    made, report = encoded(rows, GEMMA4, format="prompt_completion", loss_on="completion")
    (problem,) = report.inconsistent.first
    assert problem.origin == "x:1" and "have a token in common, ' the'" in problem.reason
    assert tokenizer().decode(made[0].tokens) == "<bos>hello the fox<eos>"
    assert tokenizer().decode(made[0].tokens[made[0].targets]) == " the fox<eos>"


def test_token_range_covers_all_byte_fallback_tokens_of_a_character() -> None:
    """Use a tokenizer with byte fallback, which writes four tokens for one character."""
    from tokenizers import Tokenizer, models

    pieces = ["<unk>", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    encoding = backend.encode("a🎉🎉a")
    assert len(encoding) == 10
    assert token_range(encoding, (1, 2), "a🎉🎉a") == (1, 5)
    assert token_range(encoding, (2, 4), "a🎉🎉a") == (5, 10)


def test_unusable_rows_are_counted_by_reason() -> None:
    rows = [
        ParsedSample("x:1", completion="  "),
        ParsedSample("x:2", completion="the fox"),
        ParsedSample("x:3", completion="the fox " * 40),
    ]
    made, report = encoded(rows, GEMMA4, format="text", loss_on="all", max_length=20, overlong="drop")
    assert (len(made), report.empty.count, report.overlong.count) == (1, 1, 1)
    assert made.origin(0) == "x:2"
    # The template strips everything that the assistant writes.
    blank = "{% for m in messages %}{{ m.role }}{% generation %}{{ ' ' if m.role == 'assistant' }}"
    blank += "{% endgeneration %}{% endfor %}"
    first = ParsedSample("x:4", [{"role": "assistant", "content": "a"}])
    _, report = encoded([first], blank.replace("{{ m.role }}", ""), loss_on="assistant")
    assert report.masked.count == 1 and report.masked.first[0].reason.startswith(
        "the chat template writes no part"
    )


def test_plain_text_needs_an_end_of_sequence_token() -> None:
    endless = copy.deepcopy(tokenizer())
    endless.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        encoded([ParsedSample("x:1", completion="the fox")], GEMMA4, endless, format="text", loss_on="all")


def test_shown_sample_marks_trained_pieces_and_truncation() -> None:
    data = DataSettings(
        train=(),
        max_length=12,
        format="prompt_completion",
        loss_on="completion",
        overlong="truncate",
        packing=False,
    )
    encoder = Encoder(coding(tokenizer(), GEMMA4, data, None))
    (shown,) = show(encoder, ParsedSample("x:1", prompt="hello 🎉", completion=" the fox"))
    assert not shown.truncated
    assert shown.pieces == [("<bos>hello 🎉", False), (" the fox<eos>", True)]
    (cut,) = show(encoder, ParsedSample("x:2", prompt="hello", completion=" the fox" * 20))
    assert cut.truncated and cut.tokens == 12
    assert "".join(text for text, _ in cut.pieces) == tokenizer().decode(
        tokenizer().encode("hello" + " the fox" * 20)[:12]
    )
    assert show(encoder, ParsedSample("x:3", prompt="hello ", completion="the fox")) == []
