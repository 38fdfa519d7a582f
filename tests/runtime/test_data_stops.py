"""Tests of the tokens that end an answer: found in the data, and added to generation_config.json."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from recipec.runtime.data.encoding import Encoder, coding
from recipec.runtime.data.formats import ParsedSample
from recipec.runtime.data.prepare import Tokenizing, prepare
from recipec.runtime.data.row_counts import SplitReport
from recipec.runtime.data.stops import end_tokens, with_stops, with_stops_for_adapter
from recipec.runtime.settings import DataSettings, Source, TrainSettings
from tests.runtime.chats import CALL, GEMMA4, MARKED, TOOLS, chat, published, tokenizer, write
from tests.runtime.preparing import prepared

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
SPELLED = CHATML.replace("<|im_", "<|it_")
"""The same with turn markers that are no tokens."""

TWO = chat("Hello", "Hi there", "And now?", "Good bye", system="Be brief.")
NAMES = {name: number for name, number in tokenizer().get_vocab().items() if name.startswith("<")}


def report(template: str | None, rows: list[ParsedSample], using: Any = None, **settings: Any) -> SplitReport:
    data = DataSettings(train=(), **{"packing": False, "max_length": 512, "overlong": "truncate", **settings})
    return Encoder(coding(using or tokenizer(), template, data, None)).encode(rows, 0)[1]


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize(
    ("template", "end"),
    [
        *((GEMMA4, "<turn|>"), (MARKED, "<turn|>"), (CHATML, "<|im_end|>")),
        # As in Cohere's templates: a token ends the answer's text, and another one the turn.
        (CHATML.replace("<|im_end|>", "<end_of_turn><|im_end|>"), "<|im_end|>"),
    ],
)
def test_last_learned_token_of_an_answer_is_its_end(template: str, end: str, loss_on: str) -> None:
    rows = [ParsedSample("x:1", TWO), ParsedSample("x:2", chat("Hello", "Hi"))]
    made = report(template, rows, loss_on=loss_on)
    assert (made.ends, made.spelled_ends, made.unended) == ({str(NAMES[end]): 2}, {}, 0)


def test_end_of_a_published_template_is_that_of_its_last_turn() -> None:
    """gpt-oss ends earlier turns, and its analysis, with another token, which must not stop an answer."""
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    other = copy.deepcopy(tokenizer())
    other.add_special_tokens({"extra_special_tokens": list(special), "eos_token": "<|return|>"})
    rows = [ParsedSample("x:1", [*TWO[:-1], {**TWO[-1], "thinking": "Leave."}])]
    made = report(published("gptoss"), rows, other)
    assert made.ends == {str(other.convert_tokens_to_ids("<|return|>")): 1}
    tools = [ParsedSample("x:1", CALL[:2], tools=TOOLS), ParsedSample("x:2", CALL, tools=TOOLS)]
    assert report(published("gptoss"), tools, other, max_length=2048).ends == {
        str(other.convert_tokens_to_ids("<|call|>")): 1,
        str(other.convert_tokens_to_ids("<|return|>")): 1,
    }


def test_end_of_several_tokens_is_a_warning_with_the_way_out() -> None:
    rows = [ParsedSample("x:1", TWO), ParsedSample("x:2", chat("it_end", "it_end|>"))]
    made = report(SPELLED, rows)
    assert (made.ends, made.spelled_ends, made.unended) == ({}, {"<|it_end|>": 2}, 2)
    (note,) = [note for note in made.notes() if "several tokens" in note]
    assert note.startswith("warning: 2 samples") and 'model: {add_tokens: {"<|it_end|>": null}}' in note
    assert not any("not taught to stop" in note for note in made.notes())
    # The way out: one token, which need not be special.
    for token in (AddedToken("<|it_end|>", special=True), AddedToken("<|it_end|>", normalized=False)):
        grown = copy.deepcopy(tokenizer())
        grown.add_tokens([token], special_tokens=token.special)
        made = report(SPELLED, rows, grown)
        assert made.ends == {str(grown.convert_tokens_to_ids("<|it_end|>")): 2}
        assert not made.spelled_ends and not made.unended


def test_answer_without_an_end_is_no_stop() -> None:
    bare = CHATML.replace("<|im_end|>", "")
    made = report(bare, [ParsedSample("x:1", chat("Hello", "Hi"))])
    assert (made.ends, made.spelled_ends, made.unended) == ({}, {}, 1)
    assert any("not taught to stop" in note for note in made.notes())


def test_plain_text_ends_with_the_end_of_sequence_and_cut_rows_do_not_count() -> None:
    rows = [ParsedSample("x:1", completion="the fox"), ParsedSample("x:2", completion="the fox " * 90)]
    made = report(None, rows, max_length=24)
    assert made.truncated == 1 and made.ends == {str(NAMES["<eos>"]): 1}
    whole = [ParsedSample("x:1", chat("Hello", "Hi")), ParsedSample("x:2", chat("Hello", "the fox " * 90))]
    made = report(CHATML, whole, max_length=40)
    assert made.truncated == 1 and made.ends == {str(NAMES["<|im_end|>"]): 1}


def test_ends_of_all_sources_and_of_cached_data_are_those_of_the_run(tmp_path: Path) -> None:
    write(tmp_path / "chats.jsonl", [TWO])
    write(tmp_path / "others.jsonl", [TWO])
    (tmp_path / "texts.jsonl").write_text('{"text": "the fox"}\n')
    sources = (
        Source("chats.jsonl", chat_template=CHATML),
        Source("others.jsonl", chat_template=GEMMA4),
        Source("texts.jsonl", format="text"),
    )
    expected = sorted(NAMES[name] for name in ("<|im_end|>", "<turn|>", "<eos>"))
    assert sorted(prepared(tmp_path, train=sources).ends) == expected
    data = DataSettings(train=sources, packing=False, max_length=96)
    settings = TrainSettings(epochs=1, steps=None, global_batch_size=1, micro_batch_size=1)
    kept = Tokenizing(cache=tmp_path / "cache")
    first, second = (prepare(data, settings, 1, tokenizer(), tmp_path, tokenizing=kept) for _ in range(2))
    assert len(list((tmp_path / "cache" / "data").iterdir())) == 1
    assert sorted(first.ends) == sorted(second.ends) == expected
    assert SplitReport.from_dict(json.loads(json.dumps(first.report.train.to_dict()))) == first.report.train


def test_stops_are_added_to_the_end_tokens_of_the_base() -> None:
    base = {"do_sample": True, "eos_token_id": 7, "pad_token_id": 0, "temperature": 0.6}
    content = json.dumps(base).encode()
    added = json.loads(with_stops(content, {}, [9, 7]) or b"")
    assert added == {**base, "eos_token_id": [7, 9]} and [*added] == [*base]
    assert json.loads(with_stops(b'{"eos_token_id": [1, 106]}', {}, [50]) or b"")["eos_token_id"] == [
        1,
        106,
        50,
    ]


@pytest.mark.parametrize("content", [b'{"eos_token_id": [1, 9],   "x": 1}', b"not JSON", b"[1]", None])
def test_generation_config_without_a_new_stop_is_unchanged(content: bytes | None) -> None:
    assert with_stops(content, {"eos_token_id": 9}, [9]) == content


def test_base_without_generation_config_keeps_the_tokens_of_its_config() -> None:
    """transformers reads them from config.json only if generation_config.json is missing."""
    config = {"bos_token_id": 2, "eos_token_id": 1, "vocab_size": 99}
    assert json.loads(with_stops(None, config, [9]) or b"") == {"bos_token_id": 2, "eos_token_id": [1, 9]}
    assert json.loads(with_stops(None, {"text_config": config}, [9]) or b"")["eos_token_id"] == [1, 9]
    assert json.loads(with_stops(b'{"top_k": 5}', config, [9]) or b"") == {"top_k": 5, "eos_token_id": [1, 9]}


def test_file_beside_an_adapter_exists_and_limits_no_request() -> None:
    assert json.loads(with_stops_for_adapter(None, {"eos_token_id": 1}, ())) == {"eos_token_id": [1]}
    assert json.loads(with_stops_for_adapter(None, {}, ())) == {}
    base = b'{"eos_token_id": 1, "max_new_tokens": 2048}'
    assert json.loads(with_stops_for_adapter(base, {}, [9])) == {"eos_token_id": [1, 9]}
    assert with_stops_for_adapter(b'{"eos_token_id":  1}', {}, [1]) == b'{"eos_token_id":  1}'
    assert end_tokens({"eos_token_id": None}) == [] and end_tokens({"eos_token_id": 3}) == [3]
