"""Test data sets that other tools stream: they become windows here if the run's length is given in steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipec.port.ledger import Ledger, Verdict
from tests.port import test_port_llamafactory, test_port_scripts
from tests.port.dialects import base, codes, finding, ported, verdict

BASES = {tool: base(tool) for tool in ("axolotl", "llamafactory", "swift", "trl")}
BASES["axolotl"].pop("num_epochs")


def port(tool: str, folder: Path, **changes: Any) -> Ledger:
    others = {"dataset_info": test_port_llamafactory.INFO} if tool == "llamafactory" else {}
    script = "sft" if tool == "trl" else None
    return ported(tool, folder, {**BASES[tool], **changes}, script=script, **others)


@pytest.mark.parametrize(
    ("tool", "switch", "buffer", "size"),
    [
        ("axolotl", "streaming", "streaming_multipack_buffer_size", 10000),
        ("llamafactory", "streaming", "buffer_size", 16384),
        ("swift", "streaming", "shuffle_buffer_size", 1000),
        ("trl", "dataset_streaming", None, 1000),
    ],
)
def test_streaming_with_max_steps_becomes_stream_window(
    tmp_path: Path, tool: str, switch: str, buffer: str | None, size: int
) -> None:
    made = port(tool, tmp_path, **{switch: True, "max_steps": 50})
    said = [("W1168", "dataset_name")] if tool == "trl" else []  # the format is a guess
    assert codes(made) == said and made.value("train.steps") == 50
    assert made.value("data.stream_window") == size and verdict(made, switch) is Verdict.APPROXIMATED
    if buffer is not None:
        told = port(tool, tmp_path, **{switch: True, "max_steps": 50, buffer: 77})
        assert told.value("data.stream_window") == 77 and finding(told, buffer).recipe == (
            "data.stream_window",
        )
        idle = port(tool, tmp_path, **{buffer: 77})
        assert idle.value("data.stream_window") is None and verdict(idle, buffer) is Verdict.UNUSED
    endless = port(tool, tmp_path, **{switch: True})
    assert endless.value("data.stream_window") is None and codes(endless) == said
    assert "no number of steps" in finding(endless, switch).note
    off = port(tool, tmp_path, **{switch: False})
    assert off.value("data.stream_window") is None and verdict(off, switch) is Verdict.EXACT


def test_held_out_share_prevents_stream_window(tmp_path: Path) -> None:
    made = port("llamafactory", tmp_path, streaming=True, max_steps=9, val_size=0.1)
    assert made.value("data.eval_fraction") == 0.1 and made.value("data.stream_window") is None
    assert "requires counting" in finding(made, "streaming").note


def test_trl_stream_is_shuffled_only_with_shuffle_dataset(tmp_path: Path) -> None:
    plain = port("trl", tmp_path, dataset_streaming=True, max_steps=9)
    mixed = port("trl", tmp_path, dataset_streaming=True, max_steps=9, shuffle_dataset=True, seed=4)
    assert plain.value("data.shuffle_seed", 0) is None and mixed.value("data.shuffle_seed") == 4


def test_axolotl_pretraining_dataset_becomes_streamed_text(tmp_path: Path) -> None:
    texts = [{"path": "our/texts", "name": "en", "split": "train", "text_column": "body", "type": "pretrain"}]
    given = {"datasets": None, "pretraining_dataset": texts, "max_steps": 9}
    made = port("axolotl", tmp_path, **given, pretraining_sample_concatenation=True)
    assert codes(made) == []
    assert made.value("data.train") == [{"path": "hf://our/texts", "split": "train", "config": "en"}]
    assert made.value("data.format") == "text" and made.value("data.fields") == {"text": "body"}
    assert made.value("data.loss_on") == "all" and made.value("data.packing") is True
    assert made.value("data.stream_window") == 10000 and made.value("data.overlong") == "truncate"
    assert port("axolotl", tmp_path, **given).value("data.packing") is False
    assert port("axolotl", tmp_path, **given, sample_packing=True).value("data.overlong") == "split"
    sized = port(
        "axolotl",
        tmp_path,
        datasets=None,
        pretraining_dataset=texts,
        max_steps=9,
        pretrain_multipack_buffer_size=5,
    )
    assert sized.value("data.stream_window") == 5
    wrong = port("axolotl", tmp_path, datasets=None, pretraining_dataset="c4", max_steps=9)
    assert codes(wrong) == [("E1143", "pretraining_dataset")]


@pytest.mark.parametrize(
    ("shuffled", "seed", "size"), [("", None, 1000), (".shuffle(seed=3, buffer_size=500)", 42, 500)]
)
def test_streaming_script_sets_window_and_shuffle_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffled: str, seed: int | None, size: int
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = f'load_dataset("some/rows", split="train", streaming=True){shuffled}'
    made = test_port_scripts.ported(
        "from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
        f'SFTTrainer("Qwen/Qwen3-8B", train_dataset={rows}, args=SFTConfig(max_steps=9))\n'
    )
    assert made.whole
    assert test_port_scripts.value(made, "data.stream_window") == size
    assert test_port_scripts.value(made, "data.shuffle_seed") == seed
