"""Test `recipe port --to`: recipes as configs of GPU tools, and the way back."""

from __future__ import annotations

import json
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.port.keys import keys_of, tools
from recipec.port.tools import WRITTEN
from recipec.runtime.training.objectives import OBJECTIVES

ROOT = Path(__file__).parents[2]
TOOLS = [*WRITTEN]
CARRIED = ["exact", "approximated", "defaulted"]

WHOLE = """\
recipe: 1
name: variant
model: {id: MODEL, attention: splash}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
data: {train: [{path: "hf://some/rows", split: "train[:90%]"}], max_length: 512, overlong: truncate}
train:
  steps: 100
  global_batch_size: 8
  optimizer: {learning_rate: 2.0e-4, b2: 0.95, eps: 1.0e-7, weight_decay: 0.1, max_grad_norm: 0.5}
  schedule: {name: cosine, warmup_steps: 10}
  seed: 3
"""
LORA = "lora: {rank: 16, alpha: 8, dropout: 0.0}\n"


def recipe(model: str = "Qwen/Qwen3-8B", lora: str = LORA) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(WHOLE.replace("MODEL", model) + lora)
    return made


def write(data: Any) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(data))


VARIANTS = {
    "full": {
        "train.optimizer.master_weights": False,
        "train.schedule": {"name": "linear", "min_lr_ratio": 0.1},
    },
    "lora": {
        "lora.targets": ["q_proj", "v_proj"],
        "lora.rslora": True,
        "train.epochs": 2,
        "train.steps": None,
    },
    "layers": {
        "lora.targets": ["q_proj", r"layers\.(3|5)\.mlp\.up_proj"],
        "train.schedule": {"name": "constant"},
    },
    "nf4": {"model.quantization": "nf4", "data.packing": False, "train.optimizer.max_grad_norm": None},
    "int8": {
        "model.quantization": "int8",
        "train.optimizer": {"name": "lion", "learning_rate": 1e-5, "b2": 0.98},
    },
    "all-tokens": {"lora.rank": 8, "data.loss_on": "all", "data.shuffle_seed": None, "remat.policy": "none"},
    "text": {"lora.rank": 8, "data.format": "text", "data.fields": {"text": "body"}},
    "stream": {"lora.rank": 8, "data.stream_window": 1000, "data.train": ["hf://some/rows"]},
    "sgd": {
        "lora.dropout": 0.1,
        "train.micro_batch_size": 2,
        "data.eval_fraction": 0.1,
        "train.optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "recipes" / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    """Run `recipe port`, and return its exit status, stdout and stderr."""
    result = CliRunner().invoke(app, ["port", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def ported(recipe: str, tool: str, *arguments: str) -> dict[str, Any]:
    """Port to a tool, whose config is config.yaml, and return the report."""
    status, printed, errors = run(
        recipe, "--to", tool, "-o", "config.yaml", "--format", "json", "--force", *arguments
    )
    assert status == 0, printed + errors
    told: dict[str, Any] = json.loads(printed)
    return told


def returned(told: dict[str, Any], tool: str, objective: str) -> dict[str, Any]:
    """Return the recipe that `recipe port` makes of config.yaml, as plain data."""
    beside = [name for name in told["beside"] if not name.endswith(".jinja")]
    script = ["--script", objective] if tool == "trl" else []
    told_by = ["--from", tool, *script]
    status, printed, errors = run("config.yaml", *beside, "-o", "again.yaml", "--force", *told_by)
    assert status == 0, printed + errors
    made: dict[str, Any] = yaml.safe_load(Path("again.yaml").read_text())
    return made


def refused(tool: str, path: str) -> None:
    """Check that the tool cannot express a path of recipe.yaml."""
    status, _, errors = run("recipe.yaml", "--to", tool, "-o", "config.yaml", "--force")
    assert status == 1 and f"config cannot express `{path}`" in errors, errors


def at(data: Any, path: str) -> Any:
    """Return the value at a path in plain data, or None."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def check_keys(tool: str) -> None:
    """Check that the tool knows every key that is written."""
    data = yaml.safe_load(Path("config.yaml").read_text())
    known = {name for section in tools()[tool]["sections"].values() for name in section}
    known |= set(keys_of("accelerate", "launch")) | {"accelerate_config"}
    assert set(data) <= known, sorted(set(data) - known)


def held(recipe: str, tool: str, *arguments: str) -> dict[str, Any]:
    """Port a recipe to a tool and back, and compare every value that the report calls carried."""
    told = ported(recipe, tool, *arguments)
    check_keys(tool)
    data = yaml.safe_load(Path(recipe).read_text())
    again = returned(told, tool, at(data, "train.objective") or "sft")
    compared = 0
    for row in told["keys"]:
        path = row["key"].partition("[")[0]
        if row["verdict"] not in CARRIED or not row["recipe"] or path in LOOSE:
            continue
        if row["verdict"] == "approximated" and path in OTHER:
            continue
        here, there = row["value"], at(again, path)
        if path == "data.train":
            here, there = data["data"]["train"], there
            here, there = [place(one) for one in here], [place(one) for one in there]
        if path == "data.eval":
            continue
        if isinstance(here, float):
            here, there = pytest.approx(here), there
        assert (
            there == here
            or (there is None and here in ("sft", [], {}, "all", False))
            or (here is None and there == 0)
        ), (path, here, there)
        compared += 1
    assert compared > 15, "there is something to compare"
    return told


LOOSE = ("train.micro_batch_size", "lora.targets", "lora.layers", "data.chat_template", "data.fields")
"""What the port back may write in other words, or chooses for its machine."""
OTHER = {
    *("remat.policy", "model.attention", "model.dtype", "lora.dtype", "train.optimizer.master_weights"),
    *("data.shuffle_seed", "data.eval_seed", "data.format", "data.loss_on"),
}
"""What approximated ones may have another value of: memory, speed, precision, seeds, and instruction rows."""


def place(one: Any) -> tuple[Any, ...]:
    one = {"path": one} if isinstance(one, str) else one
    split = one.get("split") or "train"
    split = f"{split}[:{one['limit']}]" if "limit" in one and "[" not in split else split
    return one["path"].removeprefix("./"), split, one.get("config"), one.get("weight", 1.0)


RECIPES = [
    *("quickstart", "gemma3-4b-full-v6e8", "qwen3-8b-dpo-v5e8"),
    *("qwen35-9b-v6e4", "gemma4-31b-qlora-v6e8"),
]


@pytest.mark.parametrize(("name", "tool"), zip(RECIPES, cycle(TOOLS)))
def test_repository_recipe_survives_round_trip_or_is_refused(name: str, tool: str) -> None:
    if (name, tool) == ("qwen3-8b-dpo-v5e8", "llamafactory"):
        shutil.copy(ROOT / "recipes" / f"{name}.yaml", "recipe.yaml")
        refused(tool, "data.format")
        assert not Path("config.yaml").exists()
        return
    shutil.copy(ROOT / "recipes" / f"{name}.yaml", "recipe.yaml")
    told = held("recipe.yaml", tool)
    assert not [
        row for row in told["keys"] if row["verdict"] == "unsupported" and row["key"].startswith("lora")
    ]


@pytest.mark.parametrize(("variant", "tool"), zip(VARIANTS, cycle(TOOLS)))
def test_recipe_variant_survives_round_trip(variant: str, tool: str) -> None:
    data = recipe(lora="" if variant == "full" else LORA)
    for path, value in VARIANTS[variant].items():
        *sections, last = path.split(".")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    write(data)
    told = held("recipe.yaml", tool)
    again = yaml.safe_load(Path("again.yaml").read_text())
    assert variant != "lora" or at(again, "lora.targets") == at(data, "lora.targets")
    lost = [row["key"] for row in told["keys"] if row["verdict"] == "unsupported"]
    assert not [key for key in lost if key.startswith(("model", "lora", "train.optimizer", "train.schedule"))]


@pytest.mark.parametrize(
    ("train", "tool", "lost"),
    [
        ({"objective": "dpo", "loss_type": "ipo"}, "axolotl", ""),
        ({"objective": "dpo", "loss_type": "robust", "label_smoothing": 0.1}, "trl", ""),
        ({"objective": "dpo", "label_smoothing": 0.1}, "trl", "train.label_smoothing"),
        ({"objective": "cpo", "loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0}, "axolotl", ""),
        ({"objective": "cpo", "loss_type": "hinge"}, "axolotl", "train.loss_type"),
        ({"objective": "kto", "loss_type": "apo_zero_unpaired"}, "trl", ""),
        ({"objective": "kto", "desirable_weight": 0.5}, "axolotl", ""),
        ({"loss_type": "dft"}, "trl", ""),
        ({"loss_type": "dft"}, "axolotl", "train.loss_type"),
        ({"loss_type": "eaft", "eaft_alpha": 0.7}, "llamafactory", ""),
        ({"loss_type": "eaft", "eaft_top_k": 9, "eaft_entropy": 1.0}, *("llamafactory", "train.eaft_top_k")),
        ({"loss_type": "eaft", "eaft_top_k": 9, "eaft_entropy": 1.0}, "axolotl", ""),
    ],
)
def test_loss_settings_survive_round_trip_or_are_refused(train: dict[str, Any], tool: str, lost: str) -> None:
    data = recipe()
    data["data"]["format"] = OBJECTIVES[train.get("objective", "sft")].format or "chat"
    data["train"] |= {"micro_batch_size": 2, **train}
    write(data)
    if lost:
        refused(tool, lost)
        return
    held("recipe.yaml", tool)
    again = yaml.safe_load(Path("again.yaml").read_text())["train"]
    assert {key: again[key] for key in train} == train


def test_falcon_layer_targets_survive_round_trip() -> None:
    """Use Falcon, whose layers are `transformer.h`."""
    data = recipe("tiiuae/falcon-7b")
    wanted = ["query_key_value", r"h\.(3|5)\.mlp\.dense_h_to_4h"]
    data["data"] |= {"format": "text", "fields": {"text": "body"}}
    data["lora"]["targets"] = wanted
    write(data)
    held("recipe.yaml", "trl")
    assert r"transformer\.h\." in yaml.safe_load(Path("config.yaml").read_text())["lora_target_modules"][0]
    assert yaml.safe_load(Path("again.yaml").read_text())["lora"]["targets"] == wanted


@pytest.mark.parametrize("tool", TOOLS)
def test_expert_targets_survive_round_trip_or_are_refused(tool: str) -> None:
    Path("recipe.yaml").write_text(
        WHOLE.replace("MODEL", "Qwen/Qwen3-30B-A3B")
        + "  router_aux_loss_coef: 0.01\n"
        + "lora: {rank: 8, alpha: 8, dropout: 0.0, targets: [q_proj, experts, router], layers: 3-9}\n"
    )
    if tool == "llamafactory":  # it has no key for parameters
        refused(tool, "lora.targets")
        return
    held("recipe.yaml", tool)
    assert yaml.safe_load(Path("again.yaml").read_text())["lora"]["targets"] == [
        "q_proj",
        "router",
        "experts",
    ]
    assert yaml.safe_load(Path("again.yaml").read_text())["lora"]["layers"] == "3-9"


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory"])
def test_new_tokens_and_modules_trained_whole_survive_round_trip(tool: str) -> None:
    data = recipe()
    data["model"] |= {"id": "Qwen/Qwen3-8B", "add_tokens": {"<a>": None, "<b>": None}}
    data["lora"]["modules_to_save"] = ["embed_tokens", "lm_head", ".*norm"]
    write(data)
    held("recipe.yaml", tool)
    again = yaml.safe_load(Path("again.yaml").read_text())
    assert again["model"]["add_tokens"] == {"<a>": None, "<b>": None}
    assert again["lora"]["modules_to_save"] == data["lora"]["modules_to_save"]


def test_master_weights_that_a_tool_does_not_keep_have_a_line() -> None:
    data = recipe()
    data["lora"] = None
    write(data)
    done = CliRunner().invoke(
        app, ["port", "recipe.yaml", "--to", "axolotl", "-o", "full.yaml", "--format", "json"]
    )
    assert done.exit_code == 0, done.stderr
    keys = {row["key"]: row for row in json.loads(done.stdout)["keys"]}
    assert keys["train.optimizer.master_weights"]["verdict"] == "approximated"


@pytest.mark.parametrize("tool", ["trl", "axolotl"])
def test_prompt_completion_data_and_row_limit_survive_round_trip(tool: str) -> None:
    data = recipe()
    data["data"] |= {"train": [{"path": "data/rows.jsonl", "limit": 100}], "format": "prompt_completion"}
    if tool == "axolotl":
        data["data"]["fields"] = {"prompt": "question", "completion": "reply"}
    write(data)
    names = data["data"].get("fields") or {"prompt": "prompt", "completion": "completion"}
    row = {names["prompt"]: "a", names["completion"]: "b"}
    Path("data/rows.jsonl").write_text(json.dumps(row) + "\n")
    held("recipe.yaml", tool)
    again = yaml.safe_load(Path("again.yaml").read_text())["data"]
    assert again["train"] == data["data"]["train"] and again["format"] == "prompt_completion"
    assert again["loss_on"] == "completion" and again.get("fields") == data["data"].get("fields")


@pytest.mark.parametrize(
    ("fields", "columns", "unread"),
    [
        ({}, {"prompt": "instruction", "query": "input", "response": "output"}, "`history`, `system`"),
        ({"output": "reply"}, {"prompt": "instruction", "response": "reply"}, "`input`, `history`, `system`"),
        (
            {"input": "given", "history": "before", "system": "rules"},
            {
                **{"prompt": "instruction", "query": "given", "response": "output"},
                **{"history": "before", "system": "rules"},
            },
            "",
        ),
    ],
)
def test_llama_factory_instruction_columns_match_report(
    fields: dict[str, str], columns: dict[str, str], unread: str
) -> None:
    data = recipe()
    data["data"] |= {"format": "instruction", "fields": fields}
    write(data)
    told = held("recipe.yaml", "llamafactory")
    entry = json.loads(Path("dataset_info.json").read_text())["variant-dataset-1"]
    assert entry["formatting"] == "alpaca" and entry["columns"] == columns
    note = next(row["note"] for row in told["keys"] if row["key"] == "data.format")
    assert ("one line break" in note) is ("query" in columns)
    assert note.partition("data.fields: ")[2] == unread


MIXED = [
    {
        "path": "hf://some/chats",
        "split": "train",
        "fields": {"messages": "talk", "weight": "train"},
        "loss_on": ["assistant", "tool"],
    },
    {
        "path": "hf://some/texts",
        "split": "train",
        "format": "text",
        "fields": {"text": "body"},
        "overlong": "split",
    },
    {"path": "hf://some/pairs", "split": "train", "format": "prompt_completion"},
]


def test_mixed_format_sources_round_trip_only_through_axolotl() -> None:
    data = recipe()
    data["data"]["train"] = MIXED
    write(data)
    told = ported("recipe.yaml", "axolotl")
    assert returned(told, "axolotl", "sft")["data"]["train"] == MIXED
    for tool in ("trl", "llamafactory"):
        refused(tool, "data.train")
    del data["data"]["train"][1]["overlong"]
    write(data)
    assert "the tool cuts samples of a source that are too long in another way" in str(
        ported("recipe.yaml", "axolotl")
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("data.reasoning", "keep"), ("data.temperature", 2.0), ("data.loss_on", ["assistant", "user"])],
)
def test_data_settings_that_a_tool_lacks_are_refused(key: str, value: Any) -> None:
    data = recipe()
    data["data"] |= {key.removeprefix("data."): value, "train": ["hf://some/rows", "hf://other/rows"]}
    write(data)
    for tool in TOOLS:
        status, _, errors = run("recipe.yaml", "--to", tool, "-o", "config.yaml", "--force")
        if (tool, key) == ("axolotl", "data.loss_on"):
            assert status == 0, errors
        else:
            assert status == 1 and f"config cannot express `{key}`" in errors, (tool, errors)


def test_devices_option_divides_global_batch_size() -> None:
    tool = "llamafactory"
    shutil.copy(ROOT / "recipes" / "mistral-small-24b-v6e8.yaml", "recipe.yaml")
    held("recipe.yaml", tool, "--devices", "4")
    data = yaml.safe_load(Path("config.yaml").read_text())
    assert data["gradient_accumulation_steps"] == 4
    spread = yaml.safe_load(Path("accelerate.yaml").read_text())
    assert spread["num_processes"] == 4 and set(spread) <= set(keys_of("accelerate", "cluster"))
    status, _, errors = run("recipe.yaml", "--to", tool, "--devices", "3")
    assert status == 1 and "error[E1199]" in errors and "help: --devices 2" in errors


def test_wrong_use_of_to_option_is_refused() -> None:
    shutil.copy(ROOT / "recipes" / "quickstart.yaml", "recipe.yaml")
    assert run("recipe.yaml", "--to", "nothing")[0] == 2
    assert run("recipe.yaml", "--to", "trl", "--script", "sft")[0] == 2
    assert run("recipe.yaml", "--to", "trl", "--accelerator", "v6e-8")[0] == 2
    assert run("recipe.yaml", "recipe.yaml", "--to", "trl")[0] == 2
    status, _, errors = run("recipe.yaml", "--to", "trl", "-o", "recipe.yaml")
    assert status == 1 and "error[E1112]" in errors
    Path("dataset_info.json").write_text("{}")
    status, _, errors = run("recipe.yaml", "--to", "llamafactory", "-o", "config.yaml")
    assert status == 1 and "error[E1112]" in errors and not Path("config.yaml").exists()
    Path("broken.yaml").write_text("recipe: 1\nname: x\nlora: {rank: -1}\n")
    status, printed, errors = run("broken.yaml", "--to", "trl", "-o", "config.yaml")
    assert status == 1 and "error[E0105]" in errors and printed == ""
    Path("axolotl.yml").write_text("base_model: Qwen/Qwen3-8B\n")
    assert run("axolotl.yml", "--to", "trl")[0] == 1
    assert run("missing.yaml", "--to", "trl")[0] == 1


def test_partial_config_is_marked_as_partial() -> None:
    shutil.copy(ROOT / "recipes" / "qwen3-14b-qlora-v5e8.yaml", "recipe.yaml")
    status, _, errors = run("recipe.yaml", "--to", "trl", "--set", "lora.init=qwix")
    assert status == 1 and errors.count("error[E1198]") == 2, "the format, with what follows from it, and A"
    status, _, errors = run("recipe.yaml", "--to", "trl", "--partial", "-o", "config.yaml")
    assert status == 0 and "a partial config, ported to TRL" in errors
    assert Path("config.yaml").read_text().startswith("# PARTIAL: this config is not the run of its recipe.")


def test_extended_recipe_values_are_reported_at_their_own_file_and_line(folder: Path) -> None:
    shutil.copy(ROOT / "recipes" / "quickstart.yaml", "base.yaml")
    Path("recipe.yaml").write_text("extends: base.yaml\nlora: {rank: 2}\n")
    assert "extends" in {row["key"] for row in ported("recipe.yaml", "axolotl")["keys"]}
    Path("recipe.yaml").write_text("extends: base.yaml\nlora: {kv: shared}\n")
    status, printed, errors = run(
        "recipe.yaml", "--to", "axolotl", "--partial", "--format", "json", "-o", "c.yaml"
    )
    assert status == 0, errors
    places = {row["key"]: (row["file"], row["line"]) for row in json.loads(printed)["keys"]}
    assert places["lora.kv"] == ("recipe.yaml", 2) and places["lora.rank"] == ("base.yaml", 20)
    Path("recipe.yaml").write_text("extends: base.yaml\ndata: {train: [{path: data/x.array_record}]}\n")
    status, _, errors = run("recipe.yaml", "--to", "trl")
    assert status == 1 and "config cannot express `data.train`" in errors and "recipe.yaml:2" in errors


def test_dataset_paths_are_relative_to_config_folder(folder: Path) -> None:
    shutil.copy(ROOT / "recipes" / "quickstart.yaml", "recipe.yaml")
    (folder / "gpu").mkdir()
    assert run("recipe.yaml", "--to", "axolotl", "-o", "gpu/config.yaml")[0] == 0
    assert (
        yaml.safe_load(Path("gpu/config.yaml").read_text())["datasets"][0]["path"]
        == "../data/quickstart/train.jsonl"
    )


@pytest.mark.nightly
def test_written_trl_config_parses_with_trl_and_peft() -> None:
    from peft import LoraConfig
    from trl import DPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
    from trl.scripts.utils import DatasetMixtureConfig
    from trl.trainer.utils import get_peft_config

    for name, kind in (("mistral-small-24b-v6e8", SFTConfig), ("qwen3-8b-dpo-v5e8", DPOConfig)):
        shutil.copy(ROOT / "recipes" / f"{name}.yaml", "recipe.yaml")
        ported("recipe.yaml", "trl", "--set", "model.dtype=float32")
        parser = TrlParser((ScriptArguments, kind, ModelConfig, DatasetMixtureConfig))
        _, training, model, _ = parser.parse_args_and_config(["--config", "config.yaml"])
        made = yaml.safe_load(Path("config.yaml").read_text())
        assert training.learning_rate == made["learning_rate"] and model.lora_r == made["lora_r"]
        config = get_peft_config(model)
        assert isinstance(config, LoraConfig) and set(config.target_modules) == set(
            made["lora_target_modules"]
        )


def test_llama_factory_template_survives_round_trip() -> None:
    example = ROOT / "tests/port/examples/llamafactory-qwen3-lora/expected/recipe.yaml"
    shutil.copy(example, "recipe.yaml")
    ported("recipe.yaml", "llamafactory")
    again = returned({"beside": ["dataset_info.json"]}, "llamafactory", "sft")
    assert at(again, "data.chat_template") == at(yaml.safe_load(example.read_text()), "data.chat_template")


@pytest.mark.parametrize("tool", TOOLS)
def test_start_from_adapter_survives_round_trip_or_is_refused(tool: str) -> None:
    begun = LORA.replace("{", "{start_from: adapters/first, ")
    Path("recipe.yaml").write_text(WHOLE.replace("MODEL", "Qwen/Qwen3-8B") + begun)
    if tool == "trl":  # its scripts begin with fresh ones
        refused(tool, "lora.start_from")
        return
    held("recipe.yaml", tool)
    assert yaml.safe_load(Path("again.yaml").read_text())["lora"]["start_from"] == "adapters/first"


def test_source_chat_templates_round_trip_only_through_axolotl() -> None:
    data = recipe()
    written = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    data["data"]["train"] = ["hf://our/a", {"path": "hf://our/b", "chat_template": written}]
    write(data)
    told = ported("recipe.yaml", "axolotl")
    again = returned(told, "axolotl", "sft")
    assert again["data"]["train"][1]["chat_template"] == written
    assert "chat_template" not in again["data"]
    status, printed, _ = run("recipe.yaml", "--to", "trl", "-o", "config.yaml", "--format", "json", "--force")
    assert status == 1 and "TRL's config cannot express `data.train`" in printed
