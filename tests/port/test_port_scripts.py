"""Test what is read from Python scripts and notebooks, and its places."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lowering.hardware import from_name
from recipec.port.port import Asked, Ported, port
from recipec.port.python_source import MAX_BYTES

HEAD = """\
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from unsloth import FastLanguageModel, is_bfloat16_supported
from unsloth.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only

rows = load_dataset("some/rows", split="train")
"""
UNSLOTH = """\
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-8B", max_seq_length=4096)
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=2 * 32)
"""
SFT = """\
SFTTrainer("Qwen/Qwen3-8B", SFTConfig(packing=True, gradient_accumulation_steps=4), train_dataset=rows)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ported(text: str, name: str = "train.py", **asked: Any) -> Ported:
    Path(name).write_text(text, encoding="utf-8")
    return port([Path(name)], Asked(from_name("v5p-8"), **asked))


def value(made: Ported, path: str) -> Any:
    assert made.ledger is not None, made.diagnostics
    return made.ledger.value(path)


USUAL = ("W0407", "W0504", "W0308", "W0408", "N0227")


def codes(made: Ported) -> list[str]:
    return [each.code for each in made.diagnostics if each.code not in USUAL]


def notebook(*cells: str | list[str]) -> str:
    made = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": cell} for cell in cells]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def test_unsloth_script_gets_unsloth_defaults() -> None:
    run = "SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(max_steps=9, learning_rate=1e-4))\n"
    made = ported(HEAD + UNSLOTH + run)
    assert made.title == "Unsloth" and made.whole
    expected = {
        "model.id": "Qwen/Qwen3-8B",
        "lora.rank": 32,
        "lora.alpha": 64,
        "lora.dropout": 0.0,
        "model.quantization": "nf4",
        "lora.dtype": "float32",
        "data.max_length": 4096,
        "train.global_batch_size": 8,
        "train.steps": 9,
        "train.optimizer.learning_rate": 1e-4,
        "train.optimizer.weight_decay": 0.001,
        "train.schedule.warmup_ratio": 0.1,
        "train.seed": 3407,
    }
    assert {path: value(made, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("model", "also", "kind"),
    [
        ("Qwen3-8B", ["embed_tokens", "lm_head"], "exact"),
        ("Qwen3-0.6B", ["embed_tokens"], "approximated"),  # its head is its embedding
    ],
)
def test_unsloth_trains_embedding_and_head_among_its_targets_whole(
    model: str, also: list[str], kind: str
) -> None:
    targets = "target_modules=['q_proj', 'v_proj', 'embed_tokens', 'lm_head'], r=32"
    run = "SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(max_steps=9))\n"
    made = ported(HEAD + UNSLOTH.replace("Qwen3-8B", model).replace("r=32", targets) + run)
    assert value(made, "lora.targets") == ["q_proj", "v_proj"]
    assert value(made, "lora.modules_to_save") == also
    (row,) = [row for row in made.rows if row.key == "lora_target_modules"]
    assert row.verdict.value == kind


SEEING = """\
from unsloth import FastVisionModel
from unsloth.trainer import UnslothVisionDataCollator

QUESTION = "Which formula is this?"

model, processor = FastVisionModel.from_pretrained("unsloth/Qwen3-VL-8B-Instruct", load_in_4bit=False)
model = FastVisionModel.get_peft_model(
    model,
    finetune_vision_layers=True,
    finetune_mlp_modules=False,
    r=16,
    lora_alpha=32,
)


def as_messages(row):
    asked = [{"type": "text", "text": QUESTION}, {"type": "image", "image": row["image"]}]
    answer = [{"type": "text", "text": f"${row['text']}$"}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


trainer = SFTTrainer(
    model=model,
    processing_class=processor,
    data_collator=UnslothVisionDataCollator(
        model,
        processor,
        resize=768,
        train_on_responses_only=True,
        instruction_part="<|im_start|>user",
        response_part="<|im_start|>assistant",
    ),
    train_dataset=[as_messages(row) for row in rows],
    args=SFTConfig(
        max_steps=60,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=2e-4,
        max_length=2048,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    ),
)
trainer.train()
"""


def test_unsloth_script_with_pictures_trains_the_tower_that_it_trains() -> None:
    """Its collator turns pictures on; a comprehension over the rows makes the conversations."""
    made = ported(HEAD + SEEING)
    assert made.whole and made.title == "Unsloth"
    expected = {
        "model.id": "Qwen/Qwen3-VL-8B-Instruct",
        "lora.vision": True,
        "lora.targets": ["q_proj", "k_proj", "v_proj", "o_proj", "qkv", "proj"],
        "data.images.longest_side": 768,
        "data.format": "chat",
        "data.loss_on": "assistant",
    }
    assert {path: value(made, path) for path in expected} == expected
    row = {"image": {"bytes": b"png"}, "text": "x"}
    question, answer = converted(made, row)["messages"]
    assert question["content"] == [
        {"type": "text", "text": "Which formula is this?"},
        {"type": "image", "image": row["image"]},
    ]
    assert answer == {"role": "assistant", "content": [{"type": "text", "text": "$x$"}]}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("finetune_vision_layers=True", "finetune_vision_layers=False", {"lora.vision": None}),
        (
            "finetune_mlp_modules=False",
            "finetune_language_layers=False",
            {"lora.vision": True, "lora.targets": [r"visual\.blocks\.\d+\..+"]},
        ),
        ("resize=768", 'resize="max"', {"data.images": {}}),
        ("        resize=768,\n", "", {"data.images.longest_side": 512}),
        ("train_on_responses_only=True", "train_on_responses_only=False", {"data.loss_on": "all"}),
    ],
)
def test_switches_of_unsloth_for_pictures(old: str, new: str, expected: dict[str, Any]) -> None:
    made = ported(HEAD + SEEING.replace(old, new))
    assert made.whole, made.diagnostics
    assert {path: value(made, path) for path in expected} == expected


def test_pictures_of_unsloth_may_stand_in_a_column_too() -> None:
    rows = SEEING.replace('return {"messages"', 'return {"images": [row["image"]], "messages"')
    made = ported(HEAD + rows)
    assert made.whole, made.diagnostics
    row = {"image": {"bytes": b"png"}, "text": "x"}
    assert [*converted(made, row)] == ["messages"]


def test_rows_that_unsloth_trains_on_with_pictures_are_conversations() -> None:
    """Its collator reads messages, whatever column of text the trainer would read."""
    rows = SEEING.replace("[as_messages(row) for row in rows]", "rows")
    made = ported(HEAD + rows.replace("max_steps=60", 'max_steps=60, dataset_text_field=""'))
    assert made.whole, made.diagnostics
    assert (value(made, "data.format"), value(made, "data.loss_on")) == ("chat", "assistant")


def test_report_gives_line_and_column_of_argument_value() -> None:
    made = ported(HEAD + 'SFTTrainer("Qwen/Qwen3-8B", train_dataset=rows, args=SFTConfig(\n    seed=7,\n))\n')
    (row,) = [row for row in made.rows if row.key == "seed"]
    assert (row.line, row.column, row.value) == (HEAD.count("\n") + 2, 10, 7)


def test_notebook_keys_have_positions_in_the_ipynb_file() -> None:
    cells = ["%%bash\npip install 'x", ["!pip install trl \\\n", "  -q\n", "import os\n"], HEAD]
    text = notebook(*cells, ['é = "\\u00e9\\t"\n', SFT.replace("packing=True", "packing=True, seed=5")])
    made = ported(text, "run.ipynb")
    (row,) = [row for row in made.rows if row.key == "seed"]
    assert row.line is not None and row.column is not None
    assert text.splitlines()[row.line - 1][row.column - 1 :].startswith("5, ")


def test_target_modules_may_be_a_set() -> None:
    lora = 'LoraConfig(target_modules={"v_proj", "q_proj"})'
    made = ported(f'{HEAD}SFTTrainer("Qwen/Qwen3-8B", train_dataset=rows, peft_config={lora})\n')
    assert set(value(made, "lora.targets")) == {"q_proj", "v_proj"}


FOLLOWED = """\
import argparse
from dataclasses import dataclass, field

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=3e-5)
parser.add_argument("--packed", action="store_true")
args = parser.parse_args()


@dataclass
class Extra:
    rows: int = field(default=2)
    name: str = "run"


extra = Extra(rows=4)
common = dict(seed=11, per_device_train_batch_size=extra.rows)
version = 3


def main(epochs=2, *, decay=0.1):
    settings = SFTConfig(
        **common,
        learning_rate=args.learning_rate,
        packing=args.packed,
        num_train_epochs=epochs + 1,
        weight_decay=decay if is_bfloat16_supported() else 0.0,
        gradient_accumulation_steps=8 // 4,
        run_name=f"{extra.name}-{version}",
    )
    settings.max_length = 512
    setattr(settings, "logging_steps", [7, 8].pop())
    if epochs > 5:
        settings.seed = 99
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", torch_dtype=torch.bfloat16)
    SFTTrainer(model=model, args=settings, train_dataset=rows)


if __name__ == "__main__":
    main()
"""


def test_script_values_are_resolved_through_variables_and_functions() -> None:
    made = ported(HEAD + FOLLOWED)
    expected = {
        "train.seed": 11,
        "train.global_batch_size": 8,
        "train.optimizer.learning_rate": 3e-5,
        "train.optimizer.weight_decay": 0.1,
        "train.epochs": 3,
        "data.packing": False,
        "data.max_length": 512,
        "train.log.every": 8,
        "model.dtype": "bfloat16",
        "lora": None,
    }
    assert {path: value(made, path) for path in expected} == expected
    assert next(row.value for row in made.rows if row.key == "run_name") == "run-3"


@pytest.mark.parametrize(
    "before, given, why",
    [
        ("import os\n", 'int(os.environ["SEED"])', "os.environ['SEED']"),
        ("seed = 1\nif input():\n    seed = 2\n", "seed", "the condition `input()`"),
        ("seed = 1\nfor each in open('seeds'):\n    seed = 2\n", "seed", "the "),
        ("seed = 1\ntry:\n    seed = int(input())\nexcept ValueError:\n    pass\n", "seed", "input()"),
        ("seed = len(rows)\n", "seed + 1", "len(rows)"),
        ("", "nowhere", "nowhere"),
        ("seed = 'a' * 10 ** 9\n", "len(seed)", "'a' * 10 ** 9"),
        ("seed = [1]\nif input():\n    seed.append(2)\n", "seed[0]", "the condition `input()`"),
        ("seed = 1\nfor each in (2, 3):\n    if each > 2:\n        break\n    seed = each\n", "seed", "the "),
        ("seed = {'a': 1}\nseed[input()] = 2\n", "seed['a']", "seed['a']"),
        ("seed = 1\nmatch input():\n    case 'a':\n        seed = 2\n", "seed", "the match"),
        ("seed = 1\ndef f():\n    global seed\n    seed = 2\nf()\n", "seed", "`seed`, which"),
        ("seed = 7\nwhile input():\n    seed *= seed\n", "seed", "the "),
    ],
)
def test_unresolvable_value_is_refused_with_cause_and_can_be_set(before: str, given: str, why: str) -> None:
    made = ported(HEAD + before + SFT.replace("packing=True", f"packing=True, seed={given}"))
    (found,) = [each for each in made.diagnostics if each.code == "E1174"]
    assert found.path == "seed" and why in found.message, found.message
    text = HEAD + before + SFT.replace("packing=True", f"packing=True, seed={given}")
    assert value(ported(text, sets=("seed=5",)), "train.seed") == 5


def test_qlora_settings_combine_bitsandbytes_and_lora_configs() -> None:
    made = ported(
        HEAD
        + """\
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", quantization_config=quantized)
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(gradient_accumulation_steps=4), peft_config=lora)
"""
    )
    paths = ("lora.rank", "lora.alpha", "lora.dropout", "model.quantization", "lora.targets")
    assert [value(made, path) for path in paths] == [4, 8, 0.0, "nf4", ["q_proj", "v_proj"]]
    assert not any(row.verdict.value == "unsupported" for row in made.rows)


RUN = 'SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(dataset_text_field="text"))\n'
CHAT = """\
def chat(examples):
    texts = []
    for talk in examples["talks"]:
        texts.append(tokenizer.apply_chat_template(talk, tokenize=False).removeprefix("<s>"))
    return {"text": texts}

rows = standardize_sharegpt(rows).map(chat, batched=True)
"""
TEMPLATE = """\
PROMPT = "Q: {}\\nA: {answer}"
END = tokenizer.eos_token
rows = rows.map(lambda row: {"text": PROMPT.format(row["question"], answer=row["reply"]) + END})
"""
PAIRS = """\
def talk(row):
    asked = {"role": "user", "content": row["ask"]}
    return {"messages": [asked, {"role": "assistant", "content": row["say"]}]}

rows = rows.map(talk)
"""


TOKENS = """\
def tokens(row):
    made = tokenizer(f"{row['title']}: {row['body']}", truncation=True, max_length=64)
    made["labels"] = made["input_ids"].copy()
    return made

rows = rows.map(tokens)
"""


def converted(made: Ported, row: dict[str, Any]) -> Any:
    """Return what the file next to the recipe makes of a row."""
    assert made.ledger is not None
    names: dict[str, Any] = {}
    exec(made.ledger.files["convert.py"], names)
    return names[str(value(made, "data.transform")).rpartition(":")[2]](row)


def test_apply_chat_template_on_column_becomes_chat_format() -> None:
    after = 'trainer = train_on_responses_only(trainer, instruction_part="a", response_part="b")\n'
    made = ported(HEAD + UNSLOTH + CHAT + "trainer = " + RUN + after)
    paths = ("data.format", "data.fields", "data.loss_on", "data.transform")
    assert [value(made, path) for path in paths] == ["chat", {"messages": "talks"}, "assistant", None]
    assert "response_part" not in [row.key for row in made.rows]
    for part in (
        "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n",
        "<|start|>assistant<|channel|>final<|message|>",
    ):
        made = ported(HEAD + UNSLOTH + CHAT + "trainer = " + RUN + after.replace('"b"', f'"{part}"'))
        (row,) = (row for row in made.rows if row.key == "response_part")
        assert made.whole and row.verdict.value == "unsupported" and "thoughts" in row.note


def test_text_template_function_becomes_transform_file() -> None:
    made = ported(HEAD + UNSLOTH + TEMPLATE + RUN)
    assert (value(made, "data.format"), value(made, "data.loss_on")) == ("text", "all")
    assert converted(made, {"question": "why?", "reply": "so"}) == {"text": "Q: why?\nA: so"}


def test_function_that_builds_messages_becomes_chat_transform() -> None:
    made = ported(HEAD + UNSLOTH + PAIRS + RUN)
    assert value(made, "data.format") == "chat"
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    assert converted(made, {"ask": "why?", "say": "so"}) == {"messages": turns}


def test_tokenizing_function_becomes_text_format_and_max_length() -> None:
    run = "Trainer(model, TrainingArguments(gradient_accumulation_steps=4), train_dataset=rows)\n"
    load = 'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")\n'
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-8B")\n'
    made = ported(HEAD + load + tokenizer + TOKENS + run)
    assert made.title == "Trainer"
    paths = ("data.format", "data.max_length", "train.optimizer.learning_rate", "data.packing")
    assert [value(made, path) for path in paths] == ["text", 64, 5e-5, False]
    assert converted(made, {"title": "a", "body": "b"}) == {"text": "a: b"}
    verdicts = {row.key: row.verdict.value for row in made.rows}
    assert verdicts["add_special_tokens"] == "approximated"  # the recipe's texts end with the eos_token
    other = tokenizer.replace('8B"', '8B-Base", add_eos_token=True')
    made = ported(HEAD + load + other + TOKENS + run)
    assert value(made, "model.tokenizer") == "Qwen/Qwen3-8B-Base"
    verdicts = {row.key: row.verdict.value for row in made.rows}
    assert verdicts["add_special_tokens"] == "exact"


def test_function_that_builds_answer_pairs_becomes_preference_data() -> None:
    text = """\
def pair(row):
    row["prompt"] = f"Q: {row['ask']}"
    row["chosen"] = row["good"] + tokenizer.eos_token
    row["rejected"] = row["bad"]
    return row

DPOTrainer(model=model, train_dataset=rows.map(pair), args=DPOConfig(beta=0.2, max_length=256))
"""
    made = ported(HEAD + UNSLOTH + text)
    assert [value(made, path) for path in ("train.objective", "train.beta", "data.format")] == [
        "dpo",
        0.2,
        "preference",
    ]
    row = converted(made, {"ask": "why?", "good": "so", "bad": "no"})
    assert row == {"prompt": "Q: why?", "chosen": "so", "rejected": "no"}


@pytest.mark.parametrize(
    "function",
    [
        'return {"text": row["text"].lower()}',
        'if row["x"]:\n        return {"text": row["a"]}\n    return {"text": row["b"]}',
        'for m in row["messages"]:\n        m["content"] = m["thinking"]\n    return row',
        'row["text"] = "a"\n    while row["x"]:\n        row["text"] = "b"\n    return row',
        'm = tokenizer(row["text"])\n    m["labels"] = mask(m["input_ids"])\n    return m',
    ],
)
def test_unsupported_row_function_becomes_a_commented_stub(function: str) -> None:
    text = f"def change(row):\n    {function}\n\nrows = rows.map(change)\n"
    made = ported(HEAD + UNSLOTH + text + RUN)
    assert codes(made) == ["W1178"] and made.whole
    assert value(made, "data.transform") == "convert.py:change"
    with pytest.raises(NotImplementedError):
        converted(made, {})
    assert made.ledger is not None and f"#     {function.splitlines()[0]}" in made.ledger.files["convert.py"]


def test_steps_of_a_chain_stand_in_the_file_in_their_order() -> None:
    text = """\
def keep(row):
    return len(row["ask"]) > 3

def clean(row):
    return {"say": row["say"].strip()}

def talk(row):
    return {"text": "Q: " + row["ask"] + " A: " + row["say"]}

rows = rows.map(lambda row: {"ask": row["title"] + "?"}).filter(keep).map(clean).map(talk)
"""
    made = ported(HEAD + UNSLOTH + text + RUN)
    assert codes(made) == ["W1178", "W1178"] and value(made, "data.format") == "text"
    assert made.ledger is not None
    file = made.ledger.files["convert.py"]
    assert all(f"#     {line}" in file for line in ("return len(row", 'return {"say": row["say"].strip()}'))
    for name, body in (
        ("keep", 'return len(row["ask"]) > 3'),
        ("clean", 'return {**row, "say": row["say"].strip()}'),
    ):
        file = file.replace(f'raise NotImplementedError("write {name} here")', body)
    made.ledger.files["convert.py"] = file
    assert converted(made, {"title": "why", "say": " so "}) == {"text": "Q: why? A: so"}
    assert converted(made, {"title": "a", "say": " so "}) is None


def test_a_filter_keeps_what_the_steps_around_it_make() -> None:
    chosen = "rows = rows.filter(lambda row: row['score'] > 3)\n"
    made = ported(HEAD + UNSLOTH + chosen + CHAT + RUN)
    assert (value(made, "data.format"), value(made, "data.fields")) == ("chat", {"messages": "talks"})
    after = ported(HEAD + UNSLOTH + PAIRS + "rows = rows.filter(lambda row: row['score'] > 3)\n" + RUN)
    assert value(after, "data.format") == "chat"
    assert after.ledger is not None
    file = after.ledger.files["convert.py"]
    after.ledger.files["convert.py"] = re.sub("raise NotImplementedError.*", "return row['score'] > 3", file)
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    made_row = converted(after, {"ask": "why?", "say": "so", "score": 4})
    assert made_row["messages"] == turns and converted(after, {"ask": "", "say": "", "score": 1}) is None


def test_a_revision_of_a_data_set_is_told_of() -> None:
    made = ported(f"{HEAD}rows = load_dataset('a/b', revision='v1', split='train')\n{SFT}")
    assert value(made, "data.train") == ["hf://a/b"]
    (row,) = (row for row in made.rows if row.key == "datasets[0].revision")
    assert row.verdict.value == "unsupported"


@pytest.mark.parametrize(
    ("calls", "key", "verdict"),
    [
        (".shuffle(seed=1)", "shuffle", "exact"),
        (".select(range(50)).shuffle()", "shuffle", "exact"),
        (".shuffle(seed=1).select(range(50))", "dataset_shuffle", "unsupported"),
    ],
)
def test_a_shuffle_matters_where_it_selects_rows(calls: str, key: str, verdict: str) -> None:
    made = ported(f"{HEAD}rows = rows{calls}\n{SFT}")
    assert {row.key: row.verdict.value for row in made.rows if "shuffle" in row.key} == {key: verdict}
    run = 'from trl import KTOTrainer\nKTOTrainer("Qwen/Qwen3-8B", train_dataset=rows)\n'
    made = ported(f"{HEAD}rows = rows{calls}\n{run}")  # KTO pairs each row with the one before it
    assert [row.verdict.value for row in made.rows if row.key == key] == ["unsupported"]


LOADED = """\
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-8B")
"""
GIVEN = "SFTTrainer(model, SFTConfig(packing=True), train_dataset=rows, processing_class=tokenizer)\n"
RESIZED = "model.resize_token_embeddings(len(tokenizer))\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("for p in model.parameters(): p.requires_grad = False", "requires_grad"),
        ("model.lm_head.requires_grad_(False)", "requires_grad"),
        ("model.requires_grad_(False)\nmodel = get_peft_model(model, LoraConfig())", None),
        ("model = get_peft_model(model, LoraConfig())\nmodel.lm_head.requires_grad_()", "requires_grad"),
        ("model.config.use_cache = False\nmodel.config.pad_token_id = tokenizer.pad_token_id", None),
        ("model.config.use_cache = False\nmodel.config.attention_dropout = 0.1", "model_config"),
    ],
)
def test_what_a_script_does_to_the_model_is_told(text: str, told: str | None) -> None:
    made = ported(HEAD + LOADED + text + "\n" + GIVEN)
    assert made.whole
    assert [row.key for row in made.rows if row.verdict.value == "unsupported"] == [told] * bool(told)


def test_an_unknown_tokenizer_is_the_models_if_both_have_one_name() -> None:
    loaded = LOADED.replace('"Qwen/Qwen3-8B"', "NAME")
    made = ported(f"{HEAD}NAME = input()\n{loaded}{GIVEN}", sets=("model_name_or_path=Qwen/Qwen3-8B",))
    assert made.whole and value(made, "model.tokenizer") is None


SECRETS = ("hf_" + "a1B2" * 6, "my-own-secret-word")


def test_secrets_are_never_copied() -> None:
    text = HEAD + UNSLOTH.replace("max_seq", f'token="{SECRETS[1]}", max_seq')
    text += f'from huggingface_hub import login\nlogin("{SECRETS[1]}")\nwandb_key = "{SECRETS[1]}"\n'
    call = f'use(api_key="{SECRETS[1]}", other="{SECRETS[0]}")'
    text += f"def change(row):\n    key = {call}\n    return key\n\nrows = rows.map(change)\n"
    made = ported(text + RUN.replace('"text")', f'"text", hub_token="{SECRETS[0]}", seed=input())'))
    lines = [each.span.text for each in made.diagnostics if each.span]
    shown = made.text + json.dumps(made.to_dict()) + "".join(lines)
    assert "E1174" in codes(made) and "change" in shown
    assert not any(secret in shown for secret in SECRETS)


def test_malformed_or_huge_script_gives_a_diagnostic() -> None:
    for text, code in (
        ("\0", "E1179"),
        ('print "x"\n', "E1179"),
        ("(" * 5000, "E1179"),
        ("x = " + "-" * 90_000 + "1", "E1179"),
        ("", "E1175"),
        ("x = [1]\n" + "x = [x, x]\n" * 60 + SFT.replace("packing=True", "packing=x"), "E1174"),
        ("def f(x):\n    return f(f(x))\nf(1)\n", "E1175"),
    ):
        assert code in codes(ported(text)), text[:40]
    for text, code in (("[" * 9000, "E0015"), ("{", "E1105"), ("[]", "E1179"), (notebook("x = ("), "E1179")):
        assert codes(ported(text, "run.ipynb")) == [code], text[:40]
    with Path("huge.ipynb").open("wb") as file:
        file.truncate(100 << 20)
    assert MAX_BYTES < 100 << 20
    assert [each.code for each in port([Path("huge.ipynb")], Asked(from_name("v5p-8"))).diagnostics] == [
        "E0003"
    ]


def unsloth(trainer: str, arguments: str, model: str = UNSLOTH) -> str:
    return f"{model}{trainer}Trainer(model=model, train_dataset=rows, args={trainer}Config({arguments}))\n"


def adapted(arguments: str) -> str:
    return UNSLOTH.replace("r=32", f"target_modules=['q_proj', 'v_proj'], {arguments}, r=32") + RUN


def loaded(load: str, train: str = "rows") -> str:
    return f"rows = {load}\n" + SFT.replace("=rows", f"={train}")


def seeded(text: str) -> str:
    return f"import os\n{text}\n{SFT.replace('packing=True', 'seed=n')}"


def stopping(given: str, after: str) -> str:
    """Return a run that evaluates and stops early."""
    return (
        "from transformers import EarlyStoppingCallback\n"
        "parts = rows.train_test_split(test_size=0.1, seed=3)\npatience = 4\n"
        "args = SFTConfig(eval_strategy='steps', eval_steps=50, load_best_model_at_end=True)\n"
        "trainer = SFTTrainer('Qwen/Qwen3-8B', args, train_dataset=parts['train'], eval_dataset=parts['test']"
        f"{given})\n{after}trainer.train()\n"
    )


PARTS = [{"path": "hf://a/b", "split": "train[:50%]", "config": "en"}]
PAD = "{'additional_special_tokens': ['<x>'], 'pad_token': '<p>'}"
STOPS = "train.early_stopping"
SIMPO = """\
from trl.experimental.cpo import CPOConfig, CPOTrainer
args = CPOConfig(loss_type="simpo", cpo_alpha=0.0, simpo_gamma=0.7, beta=2.0, max_length=256)
CPOTrainer(model=model, train_dataset=load_dataset("our/pairs", split="train"), args=args)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (unsloth("SFT", ""), {"data.max_length": 4096}),
        (unsloth("SFT", "max_length=512"), {"data.max_length": 512}),
        (unsloth("SFT", "max_seq_length=1024"), {"data.max_length": 1024}),
        # TRL's default, which Unsloth takes for nothing said
        (unsloth("SFT", "max_length=1024"), {"data.max_length": 4096}),
        (
            unsloth("SFT", "max_length=8192", UNSLOTH.replace(", max_seq_length=4096", "")),
            {"data.max_length": 2048},
        ),
        (unsloth("DPO", ""), {"data.max_length": 1024}),
        (unsloth("DPO", "max_length=8192"), {"data.max_length": 4096}),
        (UNSLOTH + SIMPO, {"train.objective": "cpo", "train.loss_type": "simpo", "train.simpo_gamma": 0.7}),
        (adapted("layers_to_transform=[0, 1]"), {"lora.layers": [0, 1]}),
        (adapted("rank_pattern={'q_proj': 8}"), {"lora.rank_pattern": {"q_proj": 8}}),
        (adapted("exclude_modules=['v_proj']"), {"lora.targets": ["q_proj"]}),
        (adapted("finetune_last_n_layers=4"), {"lora.layers": "32-35"}),
        (loaded('load_dataset("a/b", "en", split="train[:50%]")'), {"data.train": PARTS}),
        (loaded('load_dataset("a/b", "en")', 'rows["train[:50%]"]'), {"data.train": PARTS}),
        (
            loaded('load_dataset("a/b", "en", split="train[:50%]").train_test_split(0.1)', 'rows["train"]'),
            {"data.train": PARTS, "data.eval_fraction": 0.1},
        ),
        (loaded("Dataset.from_json('a.json')"), {"data.train": ["a.json"]}),
        (loaded("datasets.Dataset.from_csv(path_or_paths='a.csv', sep=',')"), {"data.train": ["a.csv"]}),
        (
            loaded("load_dataset('json', data_files='a.json', num_proc=4)['train']"),
            {"data.train": ["a.json"]},
        ),
        (loaded("rows.rename_column('conversations', 'messages')"), {"data.format": "chat"}),
        (loaded("rows.map(lambda row: {'messages': row['conversations']})"), {"data.format": "chat"}),
        (
            f"{LOADED}tokenizer.add_tokens(['<x>'])\ntokenizer.add_tokens('<y>')\n{RESIZED}{GIVEN}",
            {"model.add_tokens": {"<x>": None, "<y>": None}},
        ),
        (f"{LOADED}n = tokenizer.add_special_tokens({PAD})\n{GIVEN}", {"model.add_tokens": {"<x>": None}}),
        (
            LOADED.replace(
                'Tokenizer.from_pretrained("Qwen/Qwen3-8B', 'Tokenizer.from_pretrained("Qwen/Qwen3-4B'
            )
            + GIVEN,
            {"model.tokenizer": "Qwen/Qwen3-4B"},
        ),
        (LOADED + GIVEN, {"model.tokenizer": None, "model.add_tokens": None}),
        (seeded("n = int(os.getenv('SEED', '7'))"), {"train.seed": 7}),
        (seeded("n = int(os.environ.get('SEED', 3) or 1)"), {"train.seed": 3}),
        (
            seeded("def env(name, usual):\n    return int(os.getenv(name, usual))\nn = env('SEED', 5)"),
            {"train.seed": 5},
        ),
        (
            stopping(", callbacks=[EarlyStoppingCallback(patience, early_stopping_threshold=0.01)]", ""),
            {f"{STOPS}.patience": 4, f"{STOPS}.min_delta": 0.01, "checkpoint.keep_best": True},
        ),
        (
            stopping("", "trainer.add_callback(EarlyStoppingCallback())\n"),
            {f"{STOPS}.patience": 1, f"{STOPS}.min_delta": None},
        ),
        (stopping(", callbacks=[Printed()]", ""), {f"{STOPS}.patience": None, "checkpoint.keep_best": True}),
    ],
)
def test_calls_of_a_script_give_recipe_values(text: str, expected: dict[str, Any]) -> None:
    made = ported("\ufeff" + HEAD + text)  # a script may begin with a byte-order mark
    assert {path: value(made, path) for path in expected} == expected


RUN_OF_DPO = "DPOTrainer(model, {}, args=DPOConfig(beta=0.2), train_dataset=rows)\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (loaded("load_dataset('json', data_files='a.json', field='data')"), ("E1174", "dataset_name")),
        (loaded("Dataset.from_csv('a.csv', delimiter=';')"), ("E1174", "dataset_name")),
        (loaded("Dataset.from_json()"), ("E1174", "dataset_name")),
        (loaded("rows.rename_column('messages', 'talks')"), ("W1168", "dataset_name")),
        (f"{LOADED}tokenizer.add_tokens(read())\n{GIVEN}", ("E1174", "add_tokens")),
        (f"{LOADED}if input():\n  tokenizer.add_tokens(['<x>'])\n{GIVEN}", ("E1174", "add_tokens")),
        (
            f"{LOADED}model, tokenizer = setup_chat_format(model, tokenizer)\n{GIVEN}",
            ("W1168", "dataset_name"),
        ),
        (
            LOADED + RUN_OF_DPO.format('AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B-Base")'),
            ("E1180", "ref_model"),
        ),
        (LOADED + RUN_OF_DPO.format("deepcopy(model)"), None),
        (seeded("n = os.getenv('SEED')"), ("E1174", "seed")),
        (seeded("n = os.environ['SEED']"), ("E1174", "seed")),
    ],
)
def test_what_a_script_does_not_say_is_named(text: str, expected: tuple[str, str] | None) -> None:
    found = [(each.code, each.path) for each in ported(HEAD + text).diagnostics if each.code not in USUAL]
    assert found[-1:] == [expected] * bool(expected)


@pytest.mark.parametrize(
    "path",
    [
        "os.path.join(os.path.dirname(__file__), 'a.jsonl')",
        "os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'scripts', 'a.jsonl')",
        "str(Path(__file__).resolve().parent / 'a.jsonl')",
        "Path(__file__).parent.parent / 'scripts' / 'a.jsonl'",
    ],
)
def test_files_are_found_next_to_the_script(path: str) -> None:
    Path("scripts").mkdir()
    imports = "import os\nfrom pathlib import Path\n"
    rows = f"rows = load_dataset('json', data_files={path}, split='train')\n"
    (place,) = value(ported(f"{HEAD}{imports}{rows}{SFT}", "scripts/train.py"), "data.train")
    assert os.path.normpath(place) == "scripts/a.jsonl"


def test_the_only_function_that_trains_is_read_although_nothing_calls_it() -> None:
    trains = "    model = 'Qwen/Qwen3-8B'\n    " + SFT.replace('"Qwen/Qwen3-8B"', "model")
    made = ported(f"{HEAD}def train(rate, data=rows):\n{trains}")
    assert made.whole and value(made, "data.packing") is True
    unknown = trains.replace("packing=True", "learning_rate=rate")
    made = ported(f"{HEAD}class Run:\n  def train(self, rate):\n{unknown.replace('    ', '      ')}")
    (found,) = (each for each in made.diagnostics if each.code == "E1174")
    assert found.path == "learning_rate" and "`rate`, which train is given" in found.message
    assert ported(f"{HEAD}def train(rate):\n{unknown}", sets=("learning_rate=2e-4",)).whole
    assert codes(ported(f"{HEAD}def one():\n{trains}def two():\n{trains}")) == ["E1175"]
    called = f"{HEAD}def one():\n{trains}def two():\n{trains.replace('True', 'False')}two()\n"
    assert value(ported(called), "data.packing") is False


def test_adapters_that_a_script_loads_are_named_as_such() -> None:
    text = "from peft import PeftModel\nbase = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B')\n"
    text += (
        "model = PeftModel.from_pretrained(base, 'first')\nSFTTrainer(model, SFTConfig(), train_dataset=rows)"
    )
    (found,) = ported(HEAD + text).diagnostics
    assert found.code == "E1175" and "adapters" in found.message and "start_from" in (found.help or "")


PARSED = """\
import os
import sys
from dataclasses import dataclass, field

import transformers
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
from trl import get_peft_config, get_quantization_config
"""
TRL_PARSED = f"""\
{PARSED}

@dataclass
class Extra(ScriptArguments):
    name: str = "none"


def main(script_args, training_args, model_args):
    quantization = get_quantization_config(model_args)
    arguments = dict(revision=model_args.model_revision, quantization_config=quantization)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, **arguments)
    rows = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=rows[script_args.dataset_train_split],
        eval_dataset=rows[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    ).train()


parser = TrlParser((Extra, SFTConfig, ModelConfig))
main(*parser.parse_args_and_config())
"""
OWN_PARSED = f"""\
{PARSED}

@dataclass
class ModelArguments:
    model: str = field(metadata={{"help": "the base"}})
    rank: int = field(default=8)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    longest: int = field(default=512)
    optim: str = field(default="adafactor")


parser = HfArgumentParser((ModelArguments, TrainingArguments))
if len(sys.argv) == 2 and sys.argv[1].endswith(".yaml"):
    model_args, training_args = parser.parse_yaml_file(os.path.abspath(sys.argv[1]))
else:
    model_args, training_args = parser.parse_args_into_dataclasses()
SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(model_args.model),
    args=training_args,
    train_dataset=load_dataset("some/rows", split="train"),
    peft_config=LoraConfig(r=model_args.rank, lora_alpha=2 * model_args.rank, target_modules="all-linear"),
    max_seq_length=training_args.longest,
)
"""


def with_arguments(script: str, text: str, name: str = "config.yaml") -> Ported:
    Path("train.py").write_text(script, encoding="utf-8")
    Path(name).write_text(text, encoding="utf-8")
    return port([Path("train.py"), Path(name)], Asked(from_name("v5p-8"), devices=1))


def test_parsed_arguments_come_from_the_file_that_is_named_with_the_script() -> None:
    text = """\
model_name_or_path: Qwen/Qwen3-8B
use_peft: true
lora_r: 32
load_in_4bit: true
dataset_name: some/rows
name: mine
learning_rate: 2.0e-4
eval_strategy: steps
logging_step: 4
"""
    made = with_arguments(TRL_PARSED, text)
    expected = {
        "model.id": "Qwen/Qwen3-8B",
        "lora.rank": 32,
        "lora.alpha": 32,
        "model.quantization": "nf4",
        "data.train": ["hf://some/rows"],
        "data.eval": [{"path": "hf://some/rows", "split": "test"}],
        "train.optimizer.learning_rate": 2e-4,
    }
    assert {path: value(made, path) for path in expected} == expected
    rows = {row.line: (row.key, row.verdict.value) for row in made.rows if row.file == "config.yaml"}
    assert sorted(line for line in rows if line) == list(range(1, 10))
    assert rows[3] == ("lora_r", "exact") and rows[6] == ("arguments.name", "exact")
    assert rows[9] == ("arguments.logging_step", "unsupported") and "W1114" in codes(made)


def test_parsed_classes_of_the_script_have_their_own_fields_and_defaults() -> None:
    made = with_arguments(OWN_PARSED, "model: Qwen/Qwen3-8B\nrank: 4\nlearning_rate: 3e-4\noutput_dir: out\n")
    expected = {
        "model.id": "Qwen/Qwen3-8B",
        "lora.rank": 4,
        "lora.alpha": 8,
        "data.max_length": 512,
        "train.optimizer.learning_rate": 3e-4,
        "train.optimizer.name": "adafactor",
    }
    assert {path: value(made, path) for path in expected} == expected


def test_argument_of_a_function_that_is_not_followed_is_used_by_the_script() -> None:
    script = OWN_PARSED.replace(
        'split="train")', 'split="train").filter(lambda r: len(r["a"]) > model_args.least)'
    )
    script = script.replace("    rank: int", "    least: int = 3\n    most: int = 9\n    rank: int")
    made = with_arguments(script, "model: Qwen/Qwen3-8B\nlearning_rate: 3e-4\nleast: 4\nmost: 5\n")
    notes = {row.key: row.note for row in made.rows}
    assert notes["arguments.least"] == "an argument of the script, which uses it"
    assert notes["arguments.most"] == "an argument that the script does not use"


@pytest.mark.parametrize(
    "text", ["- 1\n", "a: [\n", "1: 2\n", "model: {a: [1, {b: 2}]}\nx.y: 3\n", "", "env: 3\n"]
)
def test_odd_files_of_arguments_are_refused_without_a_traceback(text: str) -> None:
    for script in (TRL_PARSED, OWN_PARSED):
        made = with_arguments(script, text)
        assert not made.whole and any(each.severity == "error" for each in made.diagnostics)


HELPED = f"""\
{PARSED}
from alignment import get_dataset, get_model, get_tokenizer
from trl import setup_chat_format

parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
rows = get_dataset(script_args)
tokenizer = get_tokenizer(model_args, training_args)
model = get_model(model_args, training_args)
if tokenizer.chat_template is None:
    model, tokenizer = setup_chat_format(model, tokenizer, format="chatml")
SFTTrainer(
    model=model,
    args=training_args,
    train_dataset=rows[script_args.dataset_train_split],
    processing_class=tokenizer,
    peft_config=get_peft_config(model_args),
)
"""
MIXTURE = """\
dataset_mixture:
  datasets:
  - {id: some/rows, split: train, columns: [messages], weight: 0.5}
learning_rate: 1.0e-5
model_name_or_path: MODEL
"""


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("Qwen/Qwen3-8B", None),  # it has a template
        ("Qwen/Qwen3-8B-Base", None),  # it has a template and the tokens
        ("meta-llama/Llama-3.1-8B", {"<|im_start|>": None, "<|im_end|>": None}),
    ],
)
def test_chat_format_is_set_up_for_a_tokenizer_without_a_template(model: str, tokens: Any) -> None:
    made = with_arguments(HELPED, MIXTURE.replace("MODEL", model))
    assert value(made, "model.id") == model
    assert value(made, "data.train") == [{"path": "hf://some/rows", "split": "train[:50%]"}]
    assert value(made, "model.add_tokens") == tokens
    template = value(made, "data.chat_template")
    assert (template is not None and "<|im_start|>assistant" in template) == (tokens is not None)


def test_chat_format_that_the_script_always_sets_up_has_its_template_and_tokens() -> None:
    script = f"""\
{HEAD}
from trl import setup_chat_format

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-7B")
model, tokenizer = setup_chat_format(model, tokenizer)
SFTTrainer(model, SFTConfig(), train_dataset=rows, processing_class=tokenizer)
"""
    made = ported(script)
    assert "<|im_start|>assistant" in value(made, "data.chat_template")
    assert value(made, "model.add_tokens") is None  # Qwen has both
    script = script.replace("(model, tokenizer)\n", "(tokenizer=tokenizer, model=model)\n")
    made = ported(script.replace("Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B"))
    assert list(value(made, "model.add_tokens")) == ["<|im_start|>", "<|im_end|>"] and made.whole


TWO = f"""\
{HEAD}
config = SFTConfig(seed=1)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
first = SFTTrainer(model, config, train_dataset=rows)
first.train()
config.seed = 2
other = load_dataset("other/pairs", split="train")
second = SFTTrainer("Qwen/Qwen3-4B", config, train_dataset=other)
third = DPOTrainer(model, args=DPOConfig(), train_dataset=other)
"""


def test_trainer_of_a_script_with_several_is_chosen_by_its_number() -> None:
    made = ported(TWO)
    (error,) = made.diagnostics
    assert error.code == "E1176" and error.help is not None
    choices = re.findall(r"--trainer (\d): (\w+)", error.help)
    assert choices == [("1", "SFTTrainer"), ("2", "SFTTrainer"), ("3", "DPOTrainer")]
    runs = [ported(TWO, trainer=number) for number in (1, 2)]
    assert [(value(run, "model.id"), value(run, "train.seed")) for run in runs] == [
        ("Qwen/Qwen3-8B", 1),
        ("Qwen/Qwen3-4B", 2),
    ]
    assert codes(ported(TWO, trainer=4)) == ["E1176"]


def test_trainer_that_continues_the_model_of_another_needs_its_result() -> None:
    made = ported(TWO, trainer=3)
    assert not made.whole
    assert [(each.code, each.path) for each in made.diagnostics if each.severity == "error"] == [
        ("E1174", "model_name_or_path")
    ]
    made = ported(TWO, trainer=3, sets=("model_name_or_path=Qwen/Qwen3-8B",))
    assert made.whole and value(made, "train.objective") == "dpo"


def framed(text: str) -> Ported:
    return ported(f"{HEAD}import json\nimport pandas as pd\nfrom datasets import Dataset\n{text}\n{SFT}")


@pytest.mark.parametrize(
    "text",
    [
        'frame = pd.read_json("data/rows.jsonl", lines=True)\nrows = Dataset.from_pandas(frame)',
        'frame = pd.read_json("data/rows.jsonl", orient="records", lines=True)[["text"]]\n'
        "rows = Dataset.from_pandas(frame.reset_index(drop=True), preserve_index=False)",
        'rows = Dataset.from_list(pd.read_json("data/rows.jsonl", lines=True).to_dict(orient="records"))',
        'with open("data/rows.jsonl") as file:\n    rows = Dataset.from_list(json.load(file))',
        'with open("data/rows.jsonl") as file:\n    rows = Dataset.from_list([json.loads(x) for x in file])',
        'rows = Dataset.from_list([json.loads(x.strip()) for x in open("data/rows.jsonl")])',
    ],
)
def test_rows_that_pandas_or_json_read_from_a_file_are_that_file(text: str) -> None:
    assert value(framed(text), "data.train") == ["data/rows.jsonl"]


@pytest.mark.parametrize(
    "text",
    [
        'frame = pd.read_json("rows.jsonl", nrows=9)\nrows = Dataset.from_pandas(frame)',
        'frame = pd.read_csv("rows.csv")\nframe["text"] = frame["a"]\nrows = Dataset.from_pandas(frame)',
        'frame = pd.read_csv("rows.csv")\nframe.dropna(inplace=True)\nrows = Dataset.from_pandas(frame)',
        'frame = pd.read_csv("rows.csv")\nframe.columns = ["text"]\nrows = Dataset.from_pandas(frame)',
        'rows = Dataset.from_pandas(pd.read_csv("rows.csv").sample(frac=0.5))',
        'data = json.load(open("rows.json"))\ndata.pop()\nrows = Dataset.from_list(data)',
        'rows = Dataset.from_list([json.loads(x)["row"] for x in open("rows.jsonl")])',
        'rows = Dataset.from_list([json.loads(x) for x in open("rows.jsonl") if "a" in x])',
        'rows = Dataset.from_list(json.load(open("rows.json"))["rows"])',
    ],
)
def test_rows_that_python_changes_before_they_are_a_data_set_are_unknown(text: str) -> None:
    made = framed(text)
    assert "E1174" in codes(made) and not made.whole


@pytest.mark.parametrize("run", ["SFTTrainer", "DPOTrainer", "KTOTrainer"])
def test_help_for_rows_that_are_named_elsewhere_works_as_it_stands(run: str) -> None:
    text = f"""\
import sys
from trl import {run}

{run}("Qwen/Qwen3-8B", train_dataset=read(sys.argv[1]))
"""
    (error,) = [each for each in ported(text).diagnostics if each.severity == "error"]
    assert error.code == "E1174" and error.help is not None
    option, sample = error.help.split("--set ")[-1].split(", a file with lines such as\n")
    path = Path(option.partition("=")[2])
    path.parent.mkdir()
    path.write_text(f"{sample.strip()}\n", encoding="utf-8")
    made = ported(text, sets=(option,))
    assert made.whole and value(made, "data.train") == [str(path)]
    assert not {"E1174", "W1168"}.intersection(codes(made))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ('f"{config["name"]}-x"', "run-x"),
        ('f"{ config["name"] }-{version}"', "run-3"),
        ("f'{\"\\n\".join([config['name'], 'b'])}'", "run\nb"),
        ('f"{f"{config["name"]}" + "y"}"', "runy"),
        ('f"""{config["name"]}{{}}"""', "run{}"),
        ('"{" + f"{config["name"]}"  # f"{', "{run"),
    ],
)
def test_f_strings_of_newer_python_are_read_by_every_python(written: str, name: str) -> None:
    values = f'config = {{"name": "run"}}\nversion = 3\nname = {written}\n'
    run = 'SFTTrainer("Qwen/Qwen3-8B", SFTConfig(run_name=name, seed=5), train_dataset=rows)\n'
    made = ported(HEAD + values + run)
    rows = {row.key: row for row in made.rows}
    assert rows["run_name"].value == name and rows["seed"].line == HEAD.count("\n") + 4


def test_f_string_that_no_python_reads_is_an_error_at_its_place() -> None:
    made = ported(f'{HEAD}x = {{"a": 1}}\ny = f"{{x["a"]}}"\nz = f"{{x["}}"\n')
    assert codes(made) == ["E1179"]
