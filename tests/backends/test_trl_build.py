"""Tests of what `recipe build --backend trl` writes, refuses and remembers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING
from typer.testing import CliRunner

from recipec.compiler.catalog import class_name
from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.cli.main import app
from recipec.compiler.emitters.baseline import decoder_layer
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering.backend import Backend
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.families.towers import READERS
from tests.emit.emitting import program_of, tool

RECIPE = """\
recipe: 1
name: sample
model: {id: google/gemma-3-1b-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 16}
data: {train: [{path: data/train.jsonl}]}
train: {global_batch_size: 8, micro_batch_size: 1, optimizer: {learning_rate: 0.001}}
"""

VARIANTS = {
    "adamw": [],
    "full": ["lora=null"],
    "float32 on a CPU": [
        "mesh={accelerator: cpu-1, axes: {fsdp: 1}}",
        "model.dtype=float32",
        "remat.policy=none",
    ],
    "sgd": ["train.optimizer={name: sgd, learning_rate: 0.1, momentum: 0.9}", "train.schedule.name=constant"],
    "rmsprop": ["train.optimizer={name: rmsprop, eps: 1.0e-6, momentum: 0.9, weight_decay: 0}"],
    "adafactor": ["train.optimizer={name: adafactor, learning_rate: 0.01, weight_decay: 0}"],
    "constant": ["train.schedule={name: constant, warmup_steps: 3}"],
    "steps": ["train.steps=9", "train.schedule={name: linear, warmup_steps: 2}"],
    "ends in its warm-up": ["train.steps=9", "train.schedule={name: cosine, warmup_steps: 12}"],
    "linear": ["train.schedule={name: linear, min_lr_ratio: 0.2, warmup_ratio: 0.25}"],
    "linear to nothing": ["train.schedule={name: linear}"],
    "cosine": ["train.schedule={name: cosine, min_lr_ratio: 0.1, warmup_steps: 4}"],
    "dpo": ["data.format=preference", "train={objective: dpo, beta: 0.2, label_smoothing: 0.1}"],
    "orpo of all weights": ["data.format=preference", "train.objective=orpo", "lora=null"],
    "grpo": [
        "data.format=prompt",
        "train.objective=grpo",
        "rewards=[{length: {maximum: 20}}]",
        "lora.dropout=0",
    ],
    "template": ["data.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"],
}


def files(folder: Path, *sets: str) -> dict[str, str]:
    built = emit(program_of(folder, sets, RECIPE), (Backend.TRL,))
    return {name: content.decode() for name, content in built.items()}


def functions(script: str, folder: Path) -> dict[str, Any]:
    """Return the names of a script without running it."""
    path = folder / "artifact" / "baseline" / "script.py"
    names: dict[str, Any] = {"__name__": "script", "__file__": str(path)}
    before = list(sys.path)
    try:
        exec(compile(script, str(path), "exec"), names)
    finally:
        sys.path[:] = before
    return names


STEPS = 9


@pytest.mark.parametrize(
    "variant",
    ["adamw", "sgd", "constant", "steps", "ends in its warm-up", "linear", "linear to nothing", "cosine"],
)
def test_trl_schedule_matches_train_py(variant: str, tmp_path: Path) -> None:
    """Compare to a millionth of the peak, because optax computes in float32."""
    built = files(tmp_path, *VARIANTS[variant])
    tunix = functions(built["train.py"], tmp_path)
    trl = functions(built["baseline/train_trl.py"], tmp_path)
    expected = tunix["learning_rate"](STEPS)
    peak = trl["LEARNING_RATE"]
    for step in range(STEPS):
        assert math.isclose(trl["learning_rate"](step, STEPS), float(expected(step)), abs_tol=1e-6 * peak)


def test_optimizer_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    script = functions(files(tmp_path, *VARIANTS["cosine"])["baseline/train_trl.py"], tmp_path)
    made = script["optimizer"]([torch.nn.Parameter(torch.zeros(2))])
    schedule = script["schedule"](made, 20)
    for step in range(20):
        assert math.isclose(made.param_groups[0]["lr"], script["learning_rate"](step, 20), rel_tol=1e-12)
        made.step()
        schedule.step()


@pytest.mark.parametrize("variant", VARIANTS)
def test_train_trl_script_passes_ruff(variant: str, tmp_path: Path) -> None:
    script = tmp_path / "train_trl.py"
    script.write_text(files(tmp_path, *VARIANTS[variant])["baseline/train_trl.py"])
    rules = ["--isolated", "--line-length", "100", "--select", "E,F,I,UP,B,SIM", "--ignore", "E402"]
    for command in (["check", *rules], ["format", "--isolated", "--check"]):
        assert tool("ruff", *command, script, cwd=tmp_path) == ""  # in a checkout, runtime is its own package


@pytest.mark.parametrize(
    ("sets", "processes", "precision"),
    [
        ([], 4, "no"),
        (["lora=null"], 4, "bf16"),
        (["lora=null", "train.optimizer.master_weights=false"], 4, "no"),
        (["mesh.axes={fsdp: 2, tp: 2}", "train.global_batch_size=2"], 2, "no"),
        (VARIANTS["float32 on a CPU"], 1, "no"),
    ],
)
def test_accelerate_accepts_the_emitted_configuration(
    sets: list[str], processes: int, precision: str, tmp_path: Path
) -> None:
    """Use accelerate's own reader, which refuses unknown keys, and FSDP's own plugin."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = tmp_path / "accelerate.yaml"
    file.write_text(files(tmp_path, *sets)["baseline/accelerate.yaml"])
    config = load_config_from_file(str(file))
    assert (config.num_processes, config.mixed_precision) == (processes, precision)
    assert config.num_machines == 1
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train_trl.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.use_fsdp == (processes > 1) and arguments.use_cpu == (processes == 1)
    if processes == 1:
        return
    given = prepare_multi_gpu_env(arguments)
    assert given["FSDP_VERSION"] == "2"
    assert given["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Gemma3DecoderLayer"
    assert given["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"


def test_model_class_names_match_transformers() -> None:
    """Use transformers' table of model types, including those that configs of our families may name."""
    kinds = {
        *(family.model_types[-1] for family in FAMILIES.values()),
        *("mistral", "ministral3", "phi3", "gemma", "granite", "olmo2", "olmo3", "smollm3", "glm4"),
        *("starcoder2", "cohere2", "qwen3_5_text", "mixtral", "qwen3_moe", "gpt_oss", "llama4_text"),
    }
    for kind in sorted(kinds):
        config = {"model_type": kind}
        named = CAUSAL.get(kind, "Mistral4ForCausalLM")  # the table lacks this one
        assert named == f"{class_name(config)}ForCausalLM"
        module = sys.modules[getattr(transformers, named).__module__]
        assert all(hasattr(module, layer) for layer in decoder_layer(config).split(",")), kind


@pytest.mark.parametrize("kind", sorted({*READERS} - {"llava", "mistral3"}))
def test_layer_class_of_models_that_read_pictures_is_in_transformers(kind: str) -> None:
    whole = getattr(transformers, SEEING[kind])
    config = {"model_type": kind, "text_config": {"model_type": f"{kind}_text"}}
    assert hasattr(sys.modules[whole.__module__], decoder_layer(config))


@pytest.mark.parametrize(
    ("model", "codes"), [("gemma-4-26B-A4B-it", ["W0926"]), ("gemma-4-31B-it", [])], ids=["experts", "dense"]
)
def test_nf4_with_experts_warns_of_unquantized_experts(model: str, codes: list[str], tmp_path: Path) -> None:
    for sets, expected in ((["model.quantization=nf4"], codes), ([], [])):
        made = program_of(tmp_path, [f"model.id=google/{model}", *sets], RECIPE)
        assert [found.code for found in diagnosed(made, (Backend.TRL,))] == expected


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `recipe build` on recipe.yaml: exit status, stdout and stderr."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def run(*arguments: str) -> tuple[int, str, str]:
        words = [str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "out"), *arguments]
        result = CliRunner().invoke(app, ["build", *words], catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return run


def test_refused_build_points_to_the_setting_and_writes_nothing(
    recipe: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    status, _, errors = recipe("--backend", "trl", "--set", "model.quantization=int8")
    assert status == 1 and not (tmp_path / "out").exists()
    assert "error[E0923]: --backend trl: bitsandbytes' int8 also quantizes activations" in errors
    assert " --> --set:1:20\n" in errors and "help: quantization: nf4" in errors
    status, _, _ = recipe("--set", "model.quantization=int8")
    assert status == 0


def test_rebuild_keeps_backends_until_backend_option_changes_them(
    recipe: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "out" / "sample"

    def lock() -> dict[str, Any]:
        read: dict[str, Any] = json.loads((folder / "recipe.lock.json").read_text())
        return read

    assert recipe()[0] == 0
    assert "backends" not in lock() and not (folder / "baseline").exists()
    assert "baseline" not in (folder / "README.md").read_text()
    assert recipe("--backend", "trl", "--check")[0] == 1
    assert recipe("--backend", "trl")[0] == 0
    assert lock()["backends"]["trl"]["trl"] == "1.16.0"
    assert "baseline/train_trl.py" in lock()["files"]
    assert "baseline/accelerate.yaml" in (folder / "README.md").read_text()
    assert recipe("--check")[0] == 0
    assert recipe()[0] == 0 and (folder / "baseline" / "train_trl.py").exists()
    assert recipe("--backend", "tunix", "--check")[0] == 1
    assert recipe("--backend", "tunix")[0] == 0
    assert not (folder / "baseline").exists() and "backends" not in lock()


def test_only_nf4_requirements_include_bitsandbytes(tmp_path: Path) -> None:
    assert "bitsandbytes" not in files(tmp_path)["baseline/requirements-trl.txt"]
    assert "\nbitsandbytes==" in files(tmp_path, "model.quantization=nf4")["baseline/requirements-trl.txt"]


def test_trl_pins_equal_the_installed_versions(tmp_path: Path) -> None:
    lines = files(tmp_path)["baseline/requirements-trl.txt"].splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith(("#", "-")))
    assert {"torch", "transformers", "trl", "peft", "accelerate"} <= set(pinned)
    assert not {"jax", "google-tunix", "flax", "optax"} & set(pinned)
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets"):
        assert pinned[name] == version(name).partition("+")[0]


@pytest.mark.parametrize(
    ("sets", "efficient"),
    [([], "true"), (["model.quantization=nf4"], "false"), (["model.id=google/gemma-4-31B-it"], "false")],
)
def test_ram_efficient_loading_is_off_for_nf4_and_gemma4(
    sets: list[str], efficient: str, tmp_path: Path
) -> None:
    """Let one process read the checkpoint, if accelerate can pass it on.

    accelerate 1.15 fails on a checkpoint's buffers (Gemma 4's layer_scalar) and on quantized weights.
    """
    text = files(tmp_path, *sets)["baseline/accelerate.yaml"]
    assert f"fsdp_cpu_ram_efficient_loading: {efficient}\n" in text
