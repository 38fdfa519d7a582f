"""Test a config of Axolotl: the batch, and its data sets with their places, rows, templates and masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipec.port.ledger import Ledger, Verdict
from recipec.port.meaning import datasets
from recipec.runtime.data.sources import choose
from tests.port.dialects import base, codes, finding, ported, spoken, values, verdict

BASE = base("axolotl")


def port(folder: Path, devices: int | None = None, **changes: Any) -> Ledger:
    """Port the base config with other keys; None removes a key."""
    content = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    return ported("axolotl", folder, content, devices=devices)


def test_global_batch_size_counts_data_parallel_gpus(tmp_path: Path) -> None:
    assert port(tmp_path, devices=4).value("train.global_batch_size") == 32
    alone = port(tmp_path)
    assert "--devices" in finding(alone, "--devices").note
    assert port(tmp_path, gradient_accumulation_steps=1).value("train.loss_normalization") == "tokens"
    sharded = port(tmp_path, dp_shard_size=4, tensor_parallel_size=2, fsdp_version=2)
    assert sharded.value("train.global_batch_size") == 32
    assert port(tmp_path, devices=8, tensor_parallel_size=2).value("train.global_batch_size") == 32
    derived = port(tmp_path, gradient_accumulation_steps=None, batch_size=12)
    assert derived.value("train.global_batch_size") == 12
    ray = port(tmp_path, use_ray=True, ray_num_workers=4, tensor_parallel_size=2)
    assert ray.value("train.global_batch_size") == 16
    assert port(tmp_path, use_ray=False, ray_num_workers=4).value("train.global_batch_size") == 8


def convert(text: str, row: dict[str, Any]) -> Any:
    """Return what the file of data.transform makes of a row."""
    namespace: dict[str, Any] = {}
    exec(compile(text, "convert.py", "exec"), namespace)
    return namespace["convert"](row)


def one(folder: Path, **keys: Any) -> Any:
    """Port a config with one data set of these keys."""
    made = port(folder, datasets=[{"path": "our/set", **keys}])
    assert codes(made) == []
    spoken(made)
    return made


def test_unknown_role_names_are_converted(tmp_path: Path) -> None:
    roles = {"user": ["customer"], "assistant": ["agent"]}
    made = one(tmp_path, type="chat_template", roles=roles, message_property_mappings={"content": "said"})
    row = {"messages": [{"role": "customer", "said": "Hi"}, {"role": "agent", "said": "Hello"}]}
    assert convert(made.files["convert.py"], row) == {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    }
    usual = one(tmp_path, type="chat_template", roles={"user": ["human"], "assistant": ["gpt"]})
    assert usual.files == {}


def test_alpaca_type_becomes_prompt_completion_text(tmp_path: Path) -> None:
    made = one(tmp_path, type="alpaca")
    assert values(made, "data.format", "data.loss_on") == ["prompt_completion", "completion"]
    bare = convert(made.files["convert.py"], {"instruction": "Count {x}.", "input": "", "output": "1"})
    assert (
        bare["prompt"].endswith("### Instruction:\nCount {x}.\n\n### Response:\n")
        and bare["completion"] == "1"
    )
    whole = convert(made.files["convert.py"], {"instruction": "Add.", "input": "1 and 2", "output": "3"})
    assert "### Input:\n1 and 2\n\n### Response:\n" in whole["prompt"]
    assert verdict(made, "datasets[0].type") is Verdict.APPROXIMATED


def test_segments_become_a_prompt_and_a_completion(tmp_path: Path) -> None:
    text = one(tmp_path, type="input_output").files["convert.py"]

    def row(*labels: bool) -> dict[str, Any]:
        return {"segments": [{"label": label, "text": str(i)} for i, label in enumerate(labels)]}

    assert convert(text, row(False, False, True, True)) == {"prompt": "01", "completion": "23"}
    assert convert(text, row(True, False)) is None and convert(text, row(False)) is None


def test_sharegpt_is_written_as_axolotl_0_4_did(tmp_path: Path) -> None:
    made = one(tmp_path, type="sharegpt", conversation="chatml")
    assert made.value("data.fields") == {"messages": "conversations", "role": "from", "content": "value"}
    template = made.value("data.chat_template")
    assert "set system = 'You are a helpful assistant.'" in template
    assert "{%- generation -%}{{- message.content + '<|im_end|>\\n' -}}{%- endgeneration -%}" in template
    assert verdict(made, "datasets[0].type") is Verdict.APPROXIMATED
    assert "line break" in (finding(made, "datasets[0].type").note or "")
    file = port(
        tmp_path,
        datasets=[{"path": "a/b", "type": "sharegpt"}, {"path": "a/c", "type": "sharegpt:chat"}],
        chat_template="chatml",
        default_system_message="Be brief.",
    )
    assert codes(file) == [] and file.value("data.train") == ["hf://a/b", "hf://a/c"]
    assert file.value("data.chat_template") == template.replace("You are a helpful assistant.", "Be brief.")
    assert verdict(file, "default_system_message") is Verdict.EXACT
    several = [{"path": path, "type": "sharegpt", "conversation": "chatml"} for path in ("a/b", "a/c")]
    assert verdict(port(tmp_path, datasets=several), "datasets[1].conversation") is Verdict.EXACT
    words = {"field_human": "customer", "field_model": "agent"}
    own = one(tmp_path, type="sharegpt", conversation="chatml", **words)
    talk = [{"from": "customer", "value": "Hi"}, {"from": "agent", "value": "Hello"}]
    assert convert(own.files["convert.py"], {"conversations": talk}) == {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    }
    for keys in ({}, {"conversation": "vicuna_v1.1"}):
        refused = port(tmp_path, datasets=[{"path": "a/b", "type": "sharegpt", **keys}])
        assert codes(refused) == [("E1141", "datasets[0].type")]
        assert "conversations" in (refused.diagnostics[0].help or "")


@pytest.mark.parametrize("text", ["Q: {instruction} A: {output}", "{instruction} {", "{} {instruction}"])
def test_formats_that_axolotl_cannot_fill_in_are_refused(tmp_path: Path, text: str) -> None:
    assert codes(port(tmp_path, datasets=[{"path": "a/b", "type": {"format": text}}])) == [
        ("E1145", "datasets[0].type")
    ]
    braces = {"format": "{{}} {instruction} {input}", "no_input_format": "{instruction}"}
    assert codes(port(tmp_path, datasets=[{"path": "a/b", "type": braces}])) == []


def test_mixed_dataset_types_get_separate_settings(tmp_path: Path) -> None:
    sets = [
        {"path": "a/b", "type": "chat_template", "field_messages": "talk"},
        {"path": "c/d", "type": "alpaca", "split": "x"},
        {"path": "e.jsonl", "type": "completion", "field": "body"},
        {"path": "f/g", "type": "chat_template", "roles_to_train": ["assistant", "user"]},
        {"path": "h/i", "type": "gpteacher"},
    ]
    held = [{"path": "j/k", "type": "alpaca"}, {"path": "l/m", "type": "chat_template"}]
    made = port(tmp_path, datasets=sets, test_datasets=held)
    assert codes(made) == []
    spoken(made)
    plain = {"format": "prompt_completion", "transform": "convert.py:convert"}
    assert made.value("data.train") == [
        {"path": "hf://a/b", "fields": {"messages": "talk"}},
        {"path": "hf://c/d", "split": "x", **plain},
        {"path": "e.jsonl", "format": "text", "fields": {"text": "body"}, "overlong": "split"},
        {"path": "hf://f/g", "loss_on": ["assistant", "user"]},
        {"path": "hf://h/i", **plain, "transform": "convert_2.py:convert"},
    ]
    assert made.value("data.eval") == [{"path": "hf://j/k", **plain}, "hf://l/m"]
    keys = ("data.format", "data.fields", "data.transform", "data.loss_on")
    assert values(made, *keys) == ["chat", None, None, None]
    assert sorted(made.files) == ["convert.py", "convert_2.py"]
    whole = port(tmp_path, datasets=sets, train_on_inputs=True)
    assert whole.value("data.loss_on") == "all" and "loss_on" not in str(whole.value("data.train"))
    texts = port(tmp_path, datasets=[sets[2], sets[1]])
    assert values(texts, "data.format", "data.loss_on") == ["text", None]


@pytest.mark.parametrize(
    ("given", "files", "path"),
    [
        ("our/set", None, "hf://our/set"),
        ("./rows", None, "./rows"),
        ("rows.json.gz", None, "rows.json.gz"),
        ("gcs://bucket/rows.jsonl", None, "gs://bucket/rows.jsonl"),
        ("json", "rows.jsonl", "rows.jsonl"),
        ("json", ["a.jsonl", "b.jsonl"], None),
        ("our/set", "part.jsonl", "hf://datasets/our/set/part.jsonl"),
        ("s3://bucket/rows.jsonl", None, None),
        ("a b", None, None),
    ],
)
def test_dataset_path_is_converted_or_noted(given: str, files: Any, path: str | None) -> None:
    found = datasets.place(given, files)
    assert found.path == path and bool(found.note) is (path is None)


def test_datasets_with_different_chat_templates_keep_them_per_source(tmp_path: Path) -> None:
    def sets(*names: str | None) -> list[dict[str, Any]]:
        made = [{"path": f"our/{n}", "type": "chat_template"} for n in range(len(names))]
        return [
            one if name is None else {**one, "chat_template": name}
            for one, name in zip(made, names, strict=True)
        ]

    mixed = port(tmp_path, chat_template="chatml", datasets=sets(None, "llama3", "chatml"))
    assert codes(mixed) == []
    spoken(mixed)
    first, second, third = mixed.value("data.train")
    assert first == "hf://our/0" and third == "hf://our/2"
    assert "<|im_start|>" in str(mixed.value("data.chat_template"))
    assert second["path"] == "hf://our/1" and "<|start_header_id|>" in second["chat_template"]
    plain = port(tmp_path, datasets=sets(None, "llama3"))
    assert plain.value("data.chat_template") is None and "chat_template" in plain.value("data.train")[1]
    alike = port(tmp_path, datasets=sets("llama3", "llama3"))
    assert alike.value("data.train") == ["hf://our/0", "hf://our/1"]
    assert "<|start_header_id|>" in str(alike.value("data.chat_template"))
    unknown = port(tmp_path, datasets=sets(None, "nothing"))
    assert codes(unknown) == [("E1147", "datasets[1].chat_template")]
    odd = port(tmp_path, chat_template="chatml", datasets=sets(None, "tokenizer_default"))
    assert codes(odd) == [("E1147", "datasets[1].chat_template")]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("chatml.intel", {"question": "Hi.", "chosen": "Yo.", "rejected": "No."}),
        ("chatml.argilla", {"instruction": "Hi.", "chosen_response": "Yo.", "rejected_response": "No."}),
        (
            "llama3.ultra",
            {"prompt": "Hi.", "chosen": [{}, {"content": "Yo."}], "rejected": [{}, {"content": "No."}]},
        ),
    ],
)
def test_types_of_pairs_become_messages(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    made = port(tmp_path, rl="dpo", datasets=[{"path": "our/pairs", "type": name}])
    asked = [{"role": "user", "content": "Hi."}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("Yo.", "No."))
    found = {"prompt": asked, "chosen": chosen, "rejected": rejected}
    assert convert(made.files["convert.py"], row) == found
    found["prompt"] = [{"role": "system", "content": "Short."}, *asked]
    assert convert(made.files["convert.py"], {**row, "system": "Short."}) == found


def test_custom_dataset_type_becomes_a_transform(tmp_path: Path) -> None:
    kind = {
        "field_instruction": "question",
        "field_output": "answer",
        "format": "Q: {instruction}\n{input}\nA: ",
        "no_input_format": "Q: {instruction}\nA: ",
        "system_prompt": "Be kind.",
        "system_format": "[{system}] ",
    }
    made = one(tmp_path, type=kind)
    row = {"question": "Why?", "answer": "Because."}
    text = made.files["convert.py"]
    assert convert(text, row) == {"prompt": "[Be kind.] Q: Why?\nA: ", "completion": "Because."}
    assert convert(text, {**row, "system": "Be brief.", "input": "Now."})["prompt"] == (
        "[Be brief.] Q: Why?\nNow.\nA: "
    )


def test_end_of_turn_that_axolotl_adds_as_a_token_is_an_error_until_it_is_added(tmp_path: Path) -> None:
    own = {"base_model": "meta-llama/Meta-Llama-3-8B", "special_tokens": {"eos_token": "<|im_end|>"}}
    (error,) = [d for d in port(tmp_path, **own, tokens=["<note>"]).diagnostics if d.code == "E1180"]
    assert "`<|im_end|>`, which ends an answer, a token of Llama 3 8B" in error.message
    assert error.help == """--set 'tokens=["<note>", "<|im_end|>"]'"""
    assert "E1180" not in dict(codes(port(tmp_path, **own, tokens=["<note>", "<|im_end|>"])))
    assert "E1180" not in dict(codes(port(tmp_path, **{**own, "base_model": "Qwen/Qwen3-8B-Base"})))


def test_default_of_evaluation_is_none_and_has_no_interval(tmp_path: Path) -> None:
    found = finding(port(tmp_path, val_set_size=0.1), "eval_strategy")
    assert found.note == "Axolotl's default is no; recipec evaluates every 100 steps and at the end"


@pytest.mark.parametrize(
    ("optimizer", "given", "help"), [("sgd", "momentum", "momentum=0.9"), ("optimi_adamw", "eps", "eps=1e-8")]
)
def test_help_for_an_argument_of_the_optimizer_has_a_usual_value(
    tmp_path: Path, optimizer: str, given: str, help: str
) -> None:
    refused = port(tmp_path, optimizer=optimizer, optim_args={given: "abc"})
    assert [d.help for d in refused.diagnostics if d.code == "E1160"] == [f"optim_args: {help}"]
    assert "E1160" not in dict(codes(port(tmp_path, optimizer=optimizer, optim_args=help)))


@pytest.mark.parametrize(("rows", "size"), [(10, 3), (1000, 50), (997, 100), (7, 6), (30_011, 1)])
def test_a_number_of_rows_at_hand_is_held_out_as_a_share(tmp_path: Path, rows: int, size: int) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n' * rows, encoding="utf-8")
    data = [{"path": "rows.jsonl", "type": "chat_template"}]
    ledger = ported("axolotl", tmp_path, {**base("axolotl"), "datasets": data, "val_set_size": size})
    assert choose(rows, ledger.value("data.eval_fraction"), 42).sum() == size
