"""Test the core with a tiny tool: recognition, references, the mesh, the recipe, the report's counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipec.port.keys import tools
from recipec.port.ledger import Verdict
from recipec.port.port import Ported
from recipec.port.recognize import LEAST_MARKS, UNREAD
from recipec.spec.commented_recipe import HEAD, Line, recipe_text
from recipec.spec.load import load
from tests.port.conftest import CONFIG, Port

ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_x: 1}\n"
)


def codes(made: Ported) -> list[str]:
    """Return the codes, without the note that every run on a whole v5p-8 has."""
    return [diagnostic.code for diagnostic in made.diagnostics if diagnostic.code != "N0227"]


def verdicts(made: Ported) -> dict[str, Verdict]:
    return {row.key: row.verdict for row in made.rows}


def value(made: Ported, path: str) -> Any:
    assert made.ledger is not None
    return made.ledger.value(path)


def keys(data: Any, path: str = "") -> list[str]:
    """Return a file's keys, found in another way than by the product: an empty section, and a list of plain
    values, are one."""
    if isinstance(data, dict) and data:
        return [key for name, below in data.items() for key in keys(below, f"{path}.{name}".lstrip("."))]
    if isinstance(data, list) and any(isinstance(item, dict | list) for item in data):
        return [key for number, item in enumerate(data) for key in keys(item, f"{path}[{number}]")]
    return [path]


def test_ported_recipe_passes_checks_and_is_deterministic(ported: Port, tmp_path: Path) -> None:
    made = ported()
    assert made.whole and made.program is not None and codes(made) == []
    (tmp_path / "recipe.yaml").write_text(made.text)
    recipe = load(tmp_path / "recipe.yaml").recipe
    assert recipe is not None and recipe.model.id == "Qwen/Qwen3-8B" and recipe.lora is not None
    assert (recipe.mesh.axes, recipe.train.global_batch_size) == ({"fsdp": 4, "tp": 1}, 8)
    assert made.text == ported().text, "the same each time"


@pytest.mark.parametrize(
    ("folder", "help"),
    [
        ("../models/Qwen3-4B/", "--set fake_model=Qwen/Qwen3-4B, if"),
        ("/root/models/Qwen/Qwen2___5-7B-Instruct", "--set fake_model=Qwen/Qwen2.5-7B-Instruct, if"),
        ("models/Qwen/Qwen3-1___7B", "--set fake_model=Qwen/Qwen3-1.7B, if"),
        ("./our-own", "--set fake_model=OWNER/NAME, its id on the hub"),
        ("our/own", "--add-model adds it "),
    ],
)
def test_a_model_in_a_folder_elsewhere_is_named_by_its_id(ported: Port, folder: str, help: str) -> None:
    made = ported(CONFIG.replace("Qwen/Qwen3-8B", folder))
    assert not made.whole and made.diagnostics[0].code in ("E0801", "E0802")
    assert (made.diagnostics[0].help or "").startswith(help)
    if "if" in help:
        assert ported(CONFIG.replace("Qwen/Qwen3-8B", help.split("=")[1].removesuffix(", if"))).whole


def test_every_key_is_in_the_report_once(ported: Port) -> None:
    text = (
        CONFIG
        + "optim: {rate: 1e-4, kind: x, more: {}}\nnoise:\nodd: [1, 2]\nodder:\n  - {a: 1}\n  - [2]\n  - 3\n"
    )
    made = ported(text, {"accelerate.yaml": ACCELERATE})
    for file, content in (("config.yaml", text), ("accelerate.yaml", ACCELERATE)):
        expected = keys(yaml.safe_load(content))
        assert [row.key for row in made.rows if row.file == file] == expected
    assert (
        verdicts(made)["odder[1]"] is Verdict.UNSUPPORTED
        and verdicts(made)["optim.more"] is Verdict.APPROXIMATED
    )
    told = made.to_dict()
    assert sum(told["counts"].values()) == len(told["keys"]) == len(made.rows)
    assert all(row.line and row.column for row in made.rows if row.file)


def test_references_are_resolved_or_refused(ported: Port) -> None:
    made = ported(
        "root: Qwen\nfake_model: ${root}/${names.size}\nnames: {size: Qwen3-8B, up: '${..fake_rank}'}\n"
        "fake_rank: ${names.rank}\nfake_rows: 4\nsets: [{path: 'hf://some/set'}]\n".replace(
            "${names.rank}", "16"
        )
    )
    assert value(made, "model.id") == "Qwen/Qwen3-8B"
    assert verdicts(made)["root"] is Verdict.EXACT and verdicts(made)["names.up"] is Verdict.UNSUPPORTED
    made = ported(CONFIG.replace("Qwen/Qwen3-8B", '"${fake_model}"'))
    assert codes(made) == ["E1108"] and not made.text and made.diagnostics[0].path == "fake_model"
    made = ported(CONFIG.replace("Qwen/Qwen3-8B", '"{{ model }}"'), partial=True)
    assert made.text.startswith(f"{HEAD}\n# PARTIAL") and verdicts(made)["fake_model"] is Verdict.UNSUPPORTED
    assert "E1106" in codes(made) and not made.whole
    assert ported(CONFIG + 'chat_template: "{{ messages }}"\nregex: "^a$B"\n').whole, (
        "these are meant literally"
    )


def test_mesh_keeps_global_batch_size(ported: Port) -> None:
    def arranged(
        rows: int, micro: int = 1, machine: str = "v5p-8", model: str = "Qwen/Qwen3-8B"
    ) -> tuple[int, ...]:
        text = CONFIG.replace("fake_rows: 8", f"fake_rows: {rows}\nfake_micro: {micro}").replace(
            "Qwen/Qwen3-8B", model
        )
        made = ported(text, machine=machine)
        axes = value(made, "mesh.axes")
        batch = value(made, "train.global_batch_size"), value(made, "train.micro_batch_size")
        assert math.prod(axes.values()) == made.program.accelerator.devices if made.program else True
        return (axes["fsdp"], axes["tp"], *batch)

    assert arranged(8) == (4, 1, 8, 1)
    assert arranged(8, micro=4) == (4, 1, 8, 2)
    assert arranged(12, micro=2) == (4, 1, 12, 1), "2 x 4 does not divide 12"
    assert arranged(6) == (2, 2, 6, 1), "fsdp as far as the rows go, tp the rest"
    assert arranged(1) == (1, 4, 1, 1)
    assert arranged(16, machine="v6e-8") == (8, 1, 16, 1)
    assert arranged(8, machine="cpu-1") == (1, 1, 8, 1)


def test_recipe_check_errors_point_at_the_source_config(ported: Port) -> None:
    made = ported(CONFIG.replace("fake_rank: 16", "fake_rank: 0"))
    found = next(d for d in made.diagnostics if d.code == "E0105")
    assert found.span is not None and (found.span.file, found.span.line) == ("config.yaml", 2)
    assert not made.whole and made.missing


def test_multi_host_port_requires_checkpoint_bucket(ported: Port) -> None:
    made = ported(machine="v5p-16")
    assert codes(made) == ["E1301"] and not made.whole
    assert made.diagnostics[0].span.file == "config.yaml"
    assert made.diagnostics[0].help.startswith("--set output_dir=gs://")
    made = ported(f"{CONFIG}output_dir: gs://ours/run/\n", machine="v5p-16")
    assert made.whole and value(made, "mesh.axes") == {"fsdp": 8, "tp": 1}
    assert value(made, "checkpoint.directory") == "gs://ours/run"


def test_set_option_overrides_config_keys(ported: Port) -> None:
    made = ported(sets=("fake_rank=32", "sets[0].path=hf://other/set"))
    assert value(made, "lora.rank") == 32 and value(made, "data.train") == [{"path": "hf://other/set"}]
    assert made.rows[1].file == "config.yaml" and made.whole
    assert codes(ported(sets=("fake_rank",))) == ["E0030"]
    assert codes(ported(sets=("fake_rank.x=1",))) == ["E0031"]


def test_recipe_text_has_schema_order_and_inline_or_preceding_comments() -> None:
    long = "so much is to be said of this that it does not fit behind the value, and stands above it, wrapped"
    lines = {
        "train.optimizer.weight_decay": Line(0.0, "the tool's default"),
        "train.optimizer.name": Line("adamw"),
        "train.schedule.name": Line("cosine"),
        "train.schedule.warmup_ratio": Line(0.1),
        "train.epochs": Line(1, long),
        "data.train": Line([{"path": "hf://a/b", "split": "train[:5%]"}]),
        "lora.targets": Line(["q_proj"]),
        "name": Line("yes"),
        "recipe": Line(1),
        "checkpoint.keep": Line(2),
        "train.optimizer.learning_rate": Line(1e-5),
    }
    assert recipe_text(lines, ["Ported.", "", "More."]) == (
        f"{HEAD}\n"
        '# Ported.\n#\n# More.\nrecipe: 1\nname: "yes"\n\nlora:\n  targets: [q_proj]\n\ndata:\n'
        '  train: [{path: "hf://a/b", split: "train[:5%]"}]\n\ntrain:\n'
        "  # so much is to be said of this that it does not fit behind the value, and stands above it,\n"
        "  # wrapped\n"
        "  epochs: 1\n  optimizer:\n    name: adamw\n    learning_rate: 1.0e-05\n"
        "    weight_decay: 0.0  # the tool's default\n  schedule: {name: cosine, warmup_ratio: 0.1}\n\n"
        "checkpoint: {keep: 2}\n"
    )


@pytest.mark.parametrize("token", ["hf_abcdefghijklmnopqrstuvwx", "ghp_abcdefghijklmnopqrstuvwx"])
@pytest.mark.parametrize(
    ("config", "sets", "refused"),
    [
        (CONFIG.replace("Qwen/Qwen3-8B", "TOKEN"), (), "fake_model"),
        (CONFIG.replace("rank: 16", "rank: TOKEN"), (), "fake_rank"),
        (CONFIG.replace("hf://some", "./TOKEN"), (), "sets[0].path"),
        (CONFIG, ("fake_model=TOKEN",), "fake_model"),
        (CONFIG + "TOKEN: 1\nmore: {TOKEN: x}\n", (), ""),
        (CONFIG + "TOKEN: 1\nTOKEN: 1\n", ("TOKEN=1",), ""),
    ],
)
def test_token_like_values_are_never_shown_or_written(
    config: str, sets: tuple[str, ...], refused: str, token: str, ported: Port
) -> None:
    given = tuple(each.replace("TOKEN", token) for each in sets)
    for partial in (False, True):
        made = ported(config.replace("TOKEN", token), sets=given, partial=partial)
        assert token not in json.dumps(made.to_dict()) and token not in made.text and made.rows
        assert [d.path for d in made.diagnostics if d.code == "E0702"] == [refused] * bool(refused)


def test_unresolvable_reference_is_an_error_only_if_it_has_effect(ported: Port) -> None:
    made = ported(CONFIG + "optim: {rate: $RATE}\nnote: ${oc.env:HOME}\n")
    assert codes(made) == ["E1107", "W1114"] and made.diagnostics[0].path == "optim.rate"
    assert set(verdicts(made)) >= {"fake_model", "optim.rate", "note"}, "every key has its line all the same"
    made = ported(files={"launch.yaml": ACCELERATE.replace("8", "$GPUS")})
    (row,) = (row for row in made.rows if row.key == "num_processes")
    assert made.whole and row.verdict is Verdict.EXACT and "`$GPUS` from the environment" in row.note


def test_data_outside_of_recipe_folder_gets_a_path_inside_it(ported: Port, tmp_path: Path) -> None:
    given = ["/data/chats.json", "~/chats.json", "../more.jsonl", f"{tmp_path}/here.jsonl", "there.jsonl"]
    made = ported(CONFIG.replace("  - path: hf://some/set\n", "".join(f"  - path: {at}\n" for at in given)))
    placed = ["data/chats.json", "data/chats-2.json", "data/more.jsonl", "here.jsonl", "there.jsonl"]
    assert value(made, "data.train") == [{"path": path} for path in placed]
    assert set(codes(made)) == {"W0401"} and made.whole
    assert "put a copy of /data/chats.json next to the recipe, as data/chats.json" in made.rows[3].note


@pytest.mark.parametrize(
    "text", ["{% x %}\nline\n", "a\n\n  b\nc", "a\nb\n\n", " a\nb ", "a\tb\nc", "#a\nb", "-\n-", "é\x85\nö\n"]
)
def test_multi_line_texts_survive_writing_and_loading(text: str, tmp_path: Path) -> None:
    lines = {
        "name": Line("x"),
        "data.chat_template": Line(text, "of the tool"),
        "data.train": Line(["a.jsonl"]),
    }
    written = recipe_text(lines, ["Ported."])
    (tmp_path / "recipe.yaml").write_text(written, encoding="utf-8")
    assert load(tmp_path / "recipe.yaml").raw["data"]["chat_template"] == text
    assert yaml.safe_load(written)["data"] == {"chat_template": text, "train": ["a.jsonl"]}


def test_supported_tools_have_no_key_that_identifies_another_tool() -> None:
    names = {name for tool in tools().values() for section in tool["sections"].values() for name in section}
    marks = {mark for other in UNREAD.values() for mark in other.marks}
    assert marks.isdisjoint(names) and all(len(other.marks) >= LEAST_MARKS for other in UNREAD.values())


def test_a_long_comment_stands_once_in_a_recipe() -> None:
    note = "recipec draws other random numbers than the tool does"
    lines = {
        "data.shuffle_seed": Line(1, f"{note}; the order differs"),
        "train.seed": Line(1, note),
        "train.epochs": Line(2, "the tool's default"),
        "checkpoint.keep": Line(2, "the tool's default"),
    }
    text = recipe_text(lines, [])
    assert text.count(note) == 1 and text.count("the tool's default") == 2
