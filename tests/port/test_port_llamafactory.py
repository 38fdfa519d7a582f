"""Test LLaMA-Factory's keys and what they mean in a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lowering.hardware import from_name
from recipec.port.dialects.llamafactory import target_modules
from recipec.port.keys import keys_of
from recipec.port.ledger import Ledger, Verdict
from recipec.port.meaning import adapters
from recipec.port.meaning.model_names import resolve
from recipec.port.port import Asked
from recipec.port.port import port as port_files
from recipec.port.read import read
from recipec.port.recognize import role_of
from recipec.runtime.data.formats import PARSERS, ParsedSample
from tests.port.dialects import base, beside, codes, finding, ported, spoken, values

BASE = base("llamafactory")
INFO = beside("llamafactory")["dataset_info"]


def port(
    folder: Path, info: dict[str, Any] | None = INFO, devices: int | None = None, **changes: Any
) -> Ledger:
    """Port the base config with other keys; None removes a key."""
    content = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    if info is None:
        return ported("llamafactory", folder, content, devices=devices)
    return ported("llamafactory", folder, content, devices=devices, dataset_info=info)


def test_plain_llamafactory_run_sets_recipe_values(tmp_path: Path) -> None:
    made = port(tmp_path)
    spoken(made)
    assert codes(made) == []
    assert values(made, "lora.rank", "lora.alpha", "lora.dropout") == [8, 16, 0.0]
    assert len(made.value("lora.targets")) == 7 and made.value("lora.layers") == "all"
    assert values(made, "train.global_batch_size", "train.micro_batch_size") == [8, 2]
    assert made.value("data.train") == ["hf://our/letters"]
    assert values(made, "data.max_length", "data.overlong", "data.packing") == [2048, "truncate", False]
    assert values(made, "train.optimizer.weight_decay", "train.optimizer.max_grad_norm") == [0.0, 1.0]
    assert values(made, "remat.policy", "train.seed", "data.loss_on") == [None, 42, "assistant"]


def test_split_special_tokens_makes_control_tokens_of_the_data_text(tmp_path: Path) -> None:
    made = port(tmp_path, split_special_tokens=True)
    spoken(made)
    assert made.value("data.special_tokens") == "text"
    # LLaMA-Factory also splits the control tokens that its template writes.
    assert finding(made, "split_special_tokens").verdict is Verdict.APPROXIMATED
    off = port(tmp_path, split_special_tokens=False)
    assert finding(off, "split_special_tokens").verdict is Verdict.EXACT
    assert off.value("data.special_tokens") is None


def test_process_count_multiplies_global_batch_size(tmp_path: Path) -> None:
    config = {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16"}
    made = ported("llamafactory", tmp_path, BASE, accelerate=config, dataset_info=INFO)
    spoken(made)
    assert made.value("train.global_batch_size") == 32
    assert port(tmp_path, devices=2).value("train.global_batch_size") == 16
    assert port(tmp_path, ray_num_workers=4).value("train.global_batch_size") == 32


def test_dataset_names_are_looked_up_in_dataset_info(tmp_path: Path) -> None:
    made = port(tmp_path, dataset="talks", dataset_dir="sets")
    spoken(made)
    assert made.value("data.train") == ["sets/talks.json"]
    assert made.value("data.fields") == {"messages": "turns", "role": "from", "content": "value"}
    assert made.files == {}
    inline = port(tmp_path, None, dataset_dir={"letters": {"hf_hub_url": "a/b", "subset": "c", "split": "d"}})
    spoken(inline)
    assert inline.value("data.train") == [{"path": "hf://a/b", "split": "d", "config": "c"}]
    online = port(tmp_path, None, dataset="our/set", dataset_dir="ONLINE")
    assert online.value("data.train") == ["hf://our/set"]


def test_comments_in_dataset_info_are_no_data_sets(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"_comment": ["ours"], **INFO}))
    (tmp_path / "run.yaml").write_text(json.dumps({**BASE, "do_train": True}))
    made = port_files([tmp_path / "run.yaml", tmp_path / "dataset_info.json"], Asked(from_name("v5p-8")))
    assert made.whole and [row.verdict for row in made.rows if row.key.startswith("_comment")] == [
        Verdict.UNUSED
    ]
    (tmp_path / "dataset_info.json").write_text(json.dumps({"_comment": ["ours"]}))
    source, _ = read(tmp_path / "dataset_info.json")
    assert source is not None and role_of(source) is None


def test_dpo_and_orpo_settings_and_pairs_are_ported(tmp_path: Path) -> None:
    made = port(tmp_path, stage="dpo", dataset="ranked", pref_beta=0.3)
    spoken(made)
    assert values(made, "train.objective", "train.beta", "data.format") == ["dpo", 0.3, "preference"]
    namespace: dict[str, Any] = {}
    exec(made.files["convert.py"], namespace)
    assert namespace["convert"]({"question": "Q", "better": "A", "worse": "B"}) == {
        "prompt": [{"role": "user", "content": "Q"}],
        "chosen": [{"role": "assistant", "content": "A"}],
        "rejected": [{"role": "assistant", "content": "B"}],
    }
    assert port(tmp_path, stage="dpo", dataset="ranked", pref_loss="orpo").value("train.objective") == "orpo"


def test_missing_dataset_info_error_gives_the_command(tmp_path: Path) -> None:
    made = port(tmp_path, None)
    (diagnostic,) = made.diagnostics
    assert diagnostic.code == "E1151" and diagnostic.help == "recipe port config.yaml data/dataset_info.json"
    assert "did you mean `letters`" in str(port(tmp_path, dataset="letter").diagnostics[0].help)


def test_shipped_datasets_are_known_without_dataset_info(tmp_path: Path) -> None:
    made = port(tmp_path, None, dataset="identity,alpaca_en", max_samples=7)
    assert codes(made) == []
    paths = ["data/identity.json", "hf://llamafactory/alpaca_en"]
    assert made.value("data.train") == [{"path": path, "limit": 7} for path in paths]
    where = "data/identity.json is LLaMA-Factory's own: get it from its repository at v0.9.5"
    assert finding(made, "dataset").note == where
    talks = port(tmp_path, None, dataset="ultrachat_200k")
    assert talks.value("data.train") == [{"path": "hf://HuggingFaceH4/ultrachat_200k", "split": "train_sft"}]
    assert talks.value("data.fields") == {"messages": "messages", "role": "role", "content": "content"}
    assert "turns do not alternate" in finding(talks, "dataset").note
    assert codes(port(tmp_path, None, dataset="mllm_demo")) == [("E1150", "dataset")]
    assert codes(port(tmp_path, None, dataset="identity", dataset_dir="REMOTE:our/sets")) == [
        ("E1151", "dataset")
    ]
    assert codes(port(tmp_path, dataset="identity")) == [("E1151", "dataset")]  # its own file lacks it


def test_every_shipped_dataset_is_ported_or_refused_with_known_code(tmp_path: Path) -> None:
    refused: dict[str, list[str]] = {}
    for name, (_, entry) in keys_of("llamafactory", "datasets").items():
        columns = entry.get("columns", {})
        text = columns.keys() == {"prompt"}
        judged = "dpo" if entry.get("ranking") else "kto" if "kto_tag" in columns else "sft"
        stage = "pt" if text else judged
        made = port(tmp_path, None, dataset=name, stage=stage, model_name_or_path="our/model", template=None)
        for code, _ in codes(made):
            refused.setdefault(code, []).append(name)
    assert refused.keys() == {"E1143", "E1150"}
    assert refused["E1143"] == ["deepctrl"]  # which is on ModelScope alone


def test_v1_config_knows_shipped_demo_datasets(tmp_path: Path) -> None:
    made = ported(
        "llamafactory_v1", tmp_path, {"model": "Qwen/Qwen3-8B", "train_dataset": "data/v1_sft_demo.yaml"}
    )
    rows = {"path": "data/alpaca_en_demo.json", "limit": 500}
    assert codes(made) == [] and made.value("data.train") == ["data/identity.json", rows]


@pytest.mark.parametrize("names", ["letters,talks", "talks,letters"])
def test_mixed_instruction_and_conversation_rows_parse_as_when_separate(tmp_path: Path, names: str) -> None:
    asked = {"instruction": "Translate.", "input": "Haus", "output": "house"}
    talk = {"turns": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    both = port(tmp_path, dataset=names)
    spoken(both)
    assert codes(both) == [] and len(both.value("data.train")) == 2
    for name, row in (("letters", asked), ("talks", talk)):
        alone = read_row(port(tmp_path, dataset=name), row)
        assert alone.messages and read_row(both, row) == alone
    with pytest.raises(ValueError, match="both"):
        read_row(both, {**asked, **talk})


def read_row(made: Ledger, row: dict[str, Any]) -> ParsedSample:
    """Return a row as training reads it: transformed, then parsed."""
    lines = made.lines
    fields = lines["data.fields"].value if "data.fields" in lines else {}
    if "convert.py" in made.files:
        namespace: dict[str, Any] = {}
        exec(made.files["convert.py"], namespace)
        row = namespace["convert"](row)
    return PARSERS[made.value("data.format")]("row 1", row, fields)


@pytest.mark.parametrize(
    ("name", "given", "adapted", "beyond"),
    [
        ("Qwen/Qwen3-8B", ["all"], 7 * 36, ()),
        ("google/gemma-4-31B", ["all"], 410, ()),
        (
            "google/gemma-4-E2B",
            ["all"],
            205,
            ("per_layer_input_gate", "per_layer_projection", "per_layer_model"),
        ),
    ],
)
def test_lora_targets_adapt_only_language_model_projections(
    name: str, given: Any, adapted: int, beyond: Any
) -> None:
    model = resolve(name, Path()).model
    assert model is not None
    found = adapters.choose(model, target_modules(model, given))
    assert len(found.sites) == adapted and not found.vision
    assert len(found.beyond) == len(beyond)


def test_end_of_turn_that_llamafactory_adds_as_a_token_is_an_error_until_it_is_added(tmp_path: Path) -> None:
    llama = {"model_name_or_path": "meta-llama/Meta-Llama-3-8B", "template": "chatml"}
    (error,) = [d for d in port(tmp_path, **llama).diagnostics if "`<|im_end|>`" in d.message]
    assert error.code == "E1180" and error.help == "--set 'add_special_tokens=<|im_end|>'"
    mended = port(tmp_path, **llama, add_special_tokens="<|im_end|>")
    assert "E1180" not in dict(codes(mended)) and mended.value("model.add_tokens") == {"<|im_end|>": None}
    known = port(tmp_path, model_name_or_path="Qwen/Qwen3-8B-Base", template="chatml")
    assert "E1180" not in dict(codes(known)) and "im_end" in known.value("data.chat_template")
