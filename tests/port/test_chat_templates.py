"""Compare port/data/chat_templates.json and dialects.json with their sources, and test the templates."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path

import pytest

from recipec.compiler.catalog import find
from recipec.port.keys import DATA
from recipec.port.meaning import templates
from recipec.port.scripts import chat_templates, dialects
from recipec.port.scripts.dialects import Package
from recipec.port.tool_names import TEMPLATES, known, written_by
from recipec.runtime.data.template import ChatTemplate
from tests.port import record_model_templates, wheels
from tests.port.record_swift_templates import OUTPUT, SYSTEM, TALK

RECORDED = json.loads(OUTPUT.read_text(encoding="utf-8"))


@pytest.mark.e2e
def test_chat_templates_json_matches_its_sources() -> None:
    made = chat_templates.text(chat_templates.catalog(wheels.fetch()))
    assert TEMPLATES.read_text(encoding="utf-8") == made, (
        "run: python -m recipec.port.scripts.chat_templates build/dialects"
    )


@pytest.mark.e2e
def test_dialects_json_matches_its_sources() -> None:
    made = dialects.text(dialects.catalog(wheels.fetch()))
    assert DATA.read_text(encoding="utf-8") == made, (
        "run: python -m recipec.port.scripts.dialects build/dialects"
    )


def test_swift_templates_match_recorded_texts_and_loss_spans() -> None:
    assert RECORDED.keys() == templates.named("swift").keys()
    for name, recorded in RECORDED.items():
        made = templates.of("swift", name, None).sets["data.chat_template"]
        template = ChatTemplate(made, {"bos_token": "<bos>", "eos_token": "<eos>"})
        for talk, parts in zip(([*TALK], [SYSTEM, *TALK]), recorded, strict=False):
            text, spans = template.render_marked(talk)
            assert text == "".join(parts), name
            learned = [any(start <= at < end for start, end in spans) for at in range(len(text))]
            runs = groupby(zip(text, learned, strict=True), lambda pair: pair[1])
            assert ["".join(letter for letter, _ in run) for _, run in runs] == parts, name
        if len(recorded) == 1:  # it asserts that there is no system message
            with pytest.raises(ValueError, match="no system message"):
                template.render([SYSTEM, *TALK])


PUBLISHED = json.loads(record_model_templates.OUTPUT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("id", PUBLISHED)
def test_named_template_is_the_models_own_only_if_it_writes_the_same(id: str) -> None:
    model = find(id, Path())
    for tool, read in (("axolotl", templates.axolotl), ("unsloth", templates.unsloth)):
        for name, row in written_by(tool).items():
            if not isinstance(row, str):
                jinja = templates.of(tool, name, None).sets["data.chat_template"]
                if not read(name, model).sets:
                    assert record_model_templates.texts(jinja) == PUBLISHED[id], name


@pytest.mark.e2e
def test_tools_files_of_own_templates_write_the_published_text() -> None:
    files = {"axolotl": chat_templates.axolotl_texts, "unsloth": chat_templates.unsloth_texts}
    for tool, texts in files.items():
        package = Package(tool, wheels.fetch())
        for name, jinja in texts(package).items():
            for id, published in PUBLISHED.items():
                if re.fullmatch(known(tool, "own").get(name, "-"), id):
                    assert record_model_templates.texts(jinja) == published, (tool, name, id)


def test_template_name_gives_a_tokenizer_a_template_or_a_reason() -> None:
    qwen, llama = (find(name, Path()) for name in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.2-1B"))
    dated = templates.unsloth("llama-3.2", llama).sets["data.chat_template"]
    assert "Today Date: 26 July 2024" in dated
    assert "Today Date" not in templates.axolotl("llama3", llama).sets["data.chat_template"]
    first = find("meta-llama/Meta-Llama-3-8B", Path())
    assert templates.axolotl("llama3", first).sets == {
        "model.tokenizer": "meta-llama/Meta-Llama-3-8B-Instruct"
    }
    assert templates.axolotl("qwen3", qwen).sets == {}
    assert not templates.axolotl("qwen3", find("Qwen/Qwen3-4B-Instruct-2507", Path())).known
    assert "not tokens of Qwen 3 8B" in templates.unsloth("llama-3", qwen).note
    assert "not tokens of Qwen 3 8B" in templates.unsloth("llama-3.1", qwen).note
    assert not templates.unsloth("gpt-oss", qwen).known
    found = templates.of("swift", "glm5_2", qwen)
    assert templates.unknown("the template", "glm5_2", found) == (
        "recipec cannot write out the template `glm5_2`: GLM5_2Template writes it with its own code"
    )
    assert templates.unknown("the template", "none", templates.of("swift", "none", qwen)).endswith(
        "the template `none`"
    )
    beginning = [
        templates.of("swift", "phi3", model).sets["data.chat_template"].count("bos_token")
        for model in (qwen, llama)
    ]
    assert beginning == [0, 1]  # where the tokenizer itself begins texts with it


@pytest.mark.parametrize(
    ("tool", "name", "text"),
    [
        ("axolotl", "alpaca", "<s>Short.\n\n### Instruction:\nHi\n\n### Response:\n[Yes</s>]"),
        (
            "axolotl",
            "nemotron_h",
            "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n[Yes<|im_end|>]\n",
        ),
        ("unsloth", "vicuna", "<s>Short. USER: Hi ASSISTANT: [Yes</s>]"),
        ("unsloth", "phi-3", "<|system|>\nShort.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n[Yes<|end|>]\n"),
        ("oumi", "gpt2", "Short.</s>Hi</s>[Yes</s>]"),
    ],
)
def test_jinja_templates_mark_assistant_answers_as_learned(tool: str, name: str, text: str) -> None:
    read = templates.unsloth(name, None) if tool == "unsloth" else templates.of(tool, name, None)
    made = read.sets["data.chat_template"]
    marked = made.replace("{%- generation -%}", "[").replace("{%- endgeneration -%}", "]")
    talk = [
        {"role": r, "content": c} for r, c in (("system", "Short."), ("user", "Hi"), ("assistant", "Yes"))
    ]
    assert ChatTemplate(marked, {"bos_token": "<s>", "eos_token": "</s>"}).render(talk) == text


def test_porting_tools_page_counts_templates(root: Path) -> None:
    page = (root / "docs" / "coming-from.md").read_text(encoding="utf-8")
    titles = {
        "llamafactory": "LLaMA-Factory",
        "swift": "ms-swift",
        "unsloth": "Unsloth",
        "axolotl": "Axolotl",
        "open_instruct": "open-instruct",
    }
    for tool, entry in json.loads(TEMPLATES.read_text(encoding="utf-8")).items():
        name = f"{titles.get(tool, tool)} {entry['version']}"
        assert f"| {name} | {len(written_by(tool))} | {len(templates.named(tool))} |" in page
