"""Tests of token ids and targets against TRL's SFTTrainer on the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipec.runtime.data.prepare import prepare
from recipec.runtime.settings import DataSettings, TrainSettings
from tests.runtime.chats import CALL, MARKED, TOOLS, chat, published, tokenizer


def ours(folder: Path, rows: list[dict[str, Any]], template: str, **settings: Any) -> list[tuple]:
    """Return the token ids and targets of each row, without packing."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(
        **{
            "packing": False,
            "train": ("rows.jsonl",),
            "max_length": 2048,
            "chat_template": template,
            **settings,
        }
    )
    train = TrainSettings(epochs=1, global_batch_size=1, micro_batch_size=1)
    prepared = prepare(data, train, 1, tokenizer(), folder)
    assert prepared.report.train.kept == len(rows), prepared.report.text()
    return [(sample.tokens.tolist(), sample.targets.tolist()) for sample in prepared.samples]


def theirs(rows: list[dict[str, Any]], template: str, **settings: Any) -> list[tuple]:
    """Return SFTTrainer's token ids and targets, without the first token's label, which its loss ignores."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(output_dir="unused", max_length=2048, bf16=False, report_to=[], **settings)
    # The attributes that _prepare_dataset reads. The trainer's constructor would load a model.
    trainer = SimpleNamespace(
        _tokenizer=tokenizer(), chat_template=template, completion_only_loss=config.completion_only_loss
    )
    made = SFTTrainer._prepare_dataset(
        trainer, Dataset.from_list(rows), tokenizer(), config, False, None, "train"
    )
    return [
        (row["input_ids"], [i > 0 and label != -100 for i, label in enumerate(row["labels"])]) for row in made
    ]


@pytest.mark.parametrize("template", [MARKED, "qwen3_training", "gemma3_training", "llama3_training"])
def test_chats_with_generation_markers_match_trl_tokens_and_targets(tmp_path: Path, template: str) -> None:
    text = template if "{" in template else published(template)
    rows = [
        {"messages": chat("Hello", "Hi there", "And now?", "Good bye", system="Be brief.")},
        {"messages": chat("the fox", " quick  brown\nfox ")},
        {"messages": chat("Grüße", "Ωμέγα 🎉 ok", "x", "y")},
    ]
    assert ours(tmp_path, rows, text) == theirs(rows, text, assistant_only_loss=True)


@pytest.mark.parametrize("template", ["qwen3_training", "glm4moe_training"])
def test_tool_calls_match_trl_tokens_and_targets(tmp_path: Path, template: str) -> None:
    text = published(template)
    rows = [{"messages": CALL, "tools": TOOLS}]
    found = ours(tmp_path, rows, text)
    # Tools are JSON text, because a column of tables would fill each schema's gaps with nulls.
    assert found == theirs([{"messages": CALL, "tools": json.dumps(TOOLS)}], text, assistant_only_loss=True)
    ((tokens, targets),) = found
    learned = tokenizer().decode([t for t, target in zip(tokens, targets, strict=True) if target])
    assert "Rome" in learned and "It is sunny in Rome." in learned and "Tells the weather" not in learned


def test_plain_prompts_and_completions_match_trl_tokens_and_targets(tmp_path: Path) -> None:
    rows = [
        {"prompt": "The quick brown fox", "completion": " says hello to the world."},
        {"prompt": "Grüße 🎉\n", "completion": "Ωμέγα 🎉"},
        {"prompt": "It ends by itself:", "completion": " so<eos>"},
    ]
    expected = theirs(rows, MARKED, completion_only_loss=True)
    assert ours(tmp_path, rows, MARKED, format="prompt_completion", loss_on="completion") == expected
    everything = theirs(rows, MARKED, completion_only_loss=False)
    assert ours(tmp_path, rows, MARKED, format="prompt_completion", loss_on="all") == everything


@pytest.mark.parametrize("template", [MARKED, "gemma4", "qwen3", "llama3"])
def test_message_prompts_and_completions_match_trl_tokens_and_targets(tmp_path: Path, template: str) -> None:
    text = template if "{" in template else published(template)
    whole = chat("Hello", "Hi there", "And now?", "Good bye", system="Be brief.")
    rows = [{"prompt": whole[:2], "completion": whole[2:]}, {"prompt": whole[:4], "completion": whole[4:]}]
    expected = theirs(rows, text, completion_only_loss=True)
    assert ours(tmp_path, rows, text, format="prompt_completion", loss_on="completion") == expected


def test_plain_text_matches_trl_tokens_and_targets(tmp_path: Path) -> None:
    rows = [{"text": "The quick brown fox."}, {"text": "Grüße 🎉 Ωμέγα"}, {"text": "It ends.<eos>"}]
    found = ours(tmp_path, rows, MARKED, format="text", loss_on="all")
    assert found == theirs(rows, MARKED)
    for tokens, targets in found:
        assert tokens[0] == tokenizer().bos_token_id and tokens[-1] == tokenizer().eos_token_id
        assert targets == [False] + [True] * (len(tokens) - 1)


def test_text_that_begins_or_ends_with_added_tokens_gets_no_second_ones(tmp_path: Path) -> None:
    plain = [{"text": "The fox."}, {"text": "Hello to the world."}]
    rows = [{"text": "<bos>The fox."}, {"text": "<bos><bos>Hello to the world.<eos>"}]
    assert ours(tmp_path, rows, MARKED, format="text", loss_on="all") == theirs(plain, MARKED)
    asked = {"prompt": "Hello", "completion": " to the world."}
    (found,) = ours(
        tmp_path, [asked | {"prompt": "<bos>Hello"}], MARKED, format="prompt_completion", loss_on="completion"
    )
    assert [found] == theirs([asked], MARKED, completion_only_loss=True)
