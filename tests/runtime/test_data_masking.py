"""Which characters and tokens carry loss, under templates that real models ship."""

from __future__ import annotations

import pytest

from runtime.data.masking import Inconsistent, Refused, Renderer
from runtime.data.reading import Row
from runtime.data.report import SplitReport
from runtime.data.samples import Sample, make_samples, target_mask
from runtime.errors import UserError
from tests.runtime.chats import GEMMA4, MARKED, chat, published, tokenizer

TWO = chat("Hello", "Hi there", "And now?", "Good bye", system="Be brief.")


def targets(template: str, messages: list, loss_on: str = "assistant") -> list[str]:
    rendered = Renderer(tokenizer(), template, loss_on).render(messages)
    return [rendered.text[start:end] for start, end in rendered.spans]


def sample(template: str, messages: list, loss_on: str = "assistant") -> Sample:
    renderer = Renderer(tokenizer(), template, loss_on)
    (made,) = make_samples([Row("x:1", messages)], renderer, tokenizer(), 512, "error", SplitReport())
    return made


def test_gemma4_the_answers_and_their_end_carry_loss() -> None:
    made = sample(GEMMA4, TWO)
    text = tokenizer().decode(made.tokens)
    assert text == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHello<turn|>\n<|turn>model\nHi there<turn|>\n"
        "<|turn>user\nAnd now?<turn|>\n<|turn>model\nGood bye<turn|>\n"
    )
    assert tokenizer().decode(made.tokens[made.targets]) == "Hi there<turn|>Good bye<turn|>"
    # One <bos>: the template's.
    assert list(made.tokens).count(tokenizer().bos_token_id) == 1


def test_last_assistant() -> None:
    assert targets(GEMMA4, TWO, "last_assistant") == ["Good bye<turn|>"]
    assert targets(MARKED, TWO, "last_assistant") == ["Good bye<turn|>"]


def test_all_but_the_first_token() -> None:
    made = sample(GEMMA4, TWO, "all")
    assert not made.targets[0] and made.targets[1:].all()


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v2", "gemma4_v5"])
def test_published_gemma4(name: str) -> None:
    assert targets(published(name), TWO) == ["Hi there<turn|>", "Good bye<turn|>"]


def test_published_gemma3_folds_the_system_prompt_into_the_first_turn() -> None:
    made = sample(published("gemma3"), TWO)
    assert (
        tokenizer()
        .decode(made.tokens)
        .startswith("<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>")
    )
    assert tokenizer().decode(made.tokens[made.targets]) == "Hi there<end_of_turn>Good bye<end_of_turn>"


@pytest.mark.parametrize("template", [MARKED, "gemma3_training", "qwen3_training", "qwen2_5_training"])
def test_generation_markers_agree_with_transformers(template: str) -> None:
    template = template if "{" in template else published(template)
    messages = chat("Hello", "Hi there, the fox", "And now?", "  Good bye ")
    made = sample(template, messages)
    reference = tokenizer().apply_chat_template(
        messages,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert made.tokens.tolist() == reference["input_ids"]
    assert made.targets.tolist() == [bool(x) for x in reference["assistant_masks"]]


def test_prefixes_agree_with_markers() -> None:
    plain = sample(GEMMA4, TWO)
    marked = sample(MARKED, TWO)
    assert plain.tokens.tolist() == marked.tokens.tolist()
    assert plain.targets.tolist() == marked.targets.tolist()


def test_stripped_reasoning_of_earlier_turns_is_found_by_substitution() -> None:
    messages = chat("Hello", "<think>\nhm\n</think>\n\nHi there", "And now?", "Good bye")
    renderer = Renderer(tokenizer(), published("qwen3"), "assistant")
    rendered = renderer.render(messages)
    assert rendered.substituted
    # Qwen 3 strips what the first turn thought, and gives the last an empty thought to write.
    assert "hm" not in rendered.text
    assert [rendered.text[a:b] for a, b in rendered.spans] == [
        "Hi there<|im_end|>",
        "<think>\n\n</think>\n\nGood bye<|im_end|>",
    ]
    assert not Renderer(tokenizer(), published("qwen3"), "last_assistant").render(messages).substituted


def test_a_generation_prompt_that_the_turn_does_not_begin_with() -> None:
    prompting = GEMMA4.replace("'<|turn>model\\n' }}{%- endif", "'<|turn>model\\n<think>' }}{%- endif")
    assert prompting != GEMMA4
    rendered = Renderer(tokenizer(), prompting, "assistant").render(TWO)
    assert rendered.substituted
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["Hi there<turn|>", "Good bye<turn|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # The generation prompt does not begin the turn, and the turn is written twice, changed, or not ended.
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
            "depends on what the message says",
        ),
        (MARKED.replace("message['content'] + '<turn|>' }}{% end", "'' }}{% end"), "enclose nothing"),
    ],
)
def test_what_cannot_be_told_is_refused(template: str, reason: str) -> None:
    with pytest.raises(Inconsistent, match=reason):
        targets(template, chat("Hello", "Hi there", "x", "y"))


def test_a_template_that_refuses_a_conversation() -> None:
    with pytest.raises(Refused, match="alternate"):
        targets(published("gemma3"), [*chat("a"), *chat("b", "c")])


def test_a_template_that_is_not_jinja() -> None:
    with pytest.raises(UserError, match="not valid Jinja: line 2"):
        Renderer(tokenizer(), "{% if x %}\n{% endfor %}", "assistant")


def test_a_template_that_never_ends_a_turn_is_reported() -> None:
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    rendered = Renderer(tokenizer(), plain, "assistant").render(chat("Hello", "Hi there"))
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["Hi there\n"] and not rendered.ended
    report = SplitReport(unended=3)
    assert "not taught to stop" in report.notes()[0]


def test_a_token_across_the_border_is_refused_not_guessed() -> None:
    assert target_mask("abcdef", [(2, 4)], [(0, 2), (2, 3), (3, 4), (4, 6)]).tolist() == [
        False,
        True,
        True,
        False,
    ]
    with pytest.raises(Inconsistent, match="'bc' belongs partly"):
        target_mask("abcdef", [(2, 4)], [(0, 1), (1, 3), (3, 4), (4, 6)])


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_white_space_that_a_token_swallows_is_seen(trim_offsets: bool) -> None:
    # " the" is one token; the prompt ends in the space, so the token is half prompt.
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '<turn|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    swallowing = tokenizer(GEMMA4, trim_offsets)
    assert len(swallowing.encode(" the", add_special_tokens=False)) == 1
    report = SplitReport()
    renderer = Renderer(swallowing, template, "assistant")
    rows = [Row("x:1", chat("Hello", "the fox")), Row("x:2", chat("Hello", "Zebra"))]
    made = make_samples(rows, renderer, swallowing, 512, "error", report)
    assert [(p.origin, p.reason) for p in report.inconsistent.first] == [
        ("x:1", "the token of ' the' belongs partly to a turn's targets")
    ]
    assert swallowing.decode(made[0].tokens[made[0].targets]) == "Zebra<turn|>"


def test_letters_of_several_bytes() -> None:
    made = sample(GEMMA4, chat("Grüße 🎉", "Ωμέγα 🎉 ok"))
    assert tokenizer().decode(made.tokens[made.targets]) == "Ωμέγα 🎉 ok<turn|>"


def test_a_turn_that_repeats_the_prompt() -> None:
    assert targets(GEMMA4, chat("model\nHi", "model\nHi")) == ["model\nHi<turn|>"]
    assert (
        targets(published("qwen3"), chat("substitute", "substitute", "a", "substitute"))[0]
        == "substitute<|im_end|>"
    )
