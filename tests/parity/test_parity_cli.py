"""Tests of `recipe parity RECIPE` without training: which backends run, on which recipe, and the output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.parity import backend_runs
from recipec.compiler.parity.backend_runs import write_recipe
from recipec.compiler.parity.compare import read_trace
from recipec.compiler.rehearse.pipeline import Pipeline, StepFailed
from recipec.compiler.rehearse.rehearse import write_miniature
from recipec.runtime.training.trace import Trace
from tests.emit.emitting import compiled

RECIPE = """\
recipe: 1
name: small
model: {id: %s}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 8, alpha: 16, dropout: 0.1}
data: {train: [gs://bucket/train.jsonl], max_length: 1024, packing: true}
train:
  steps: 100
  global_batch_size: 16
  micro_batch_size: 1
"""
LLAMA, GEMMA4 = "meta-llama/Llama-3.2-1B-Instruct", "google/gemma-4-31B-it"


def test_expected_steps_depend_on_model_and_backends(root: Path) -> None:
    gemma4, llama = (compiled(root / f"recipes/{name}.yaml") for name in ("quickstart", "llama31-8b-v6e8"))
    whole = ["miniature", "compile", "tunix", "torchax", "trl", "control", "merge", "compare"]
    assert list(backend_runs._expected(gemma4, tuple(Backend))) == whole
    assert list(backend_runs._expected(llama, tuple(Backend))) == [
        step for step in whole if step != "control"
    ]
    assert list(backend_runs._expected(gemma4, [Backend.TUNIX, Backend.TORCHAX])) == [*whole[:4], *whole[-2:]]


@pytest.mark.parametrize("name", ["gemma4-31b-v5p8", "gemma3-270m-cpu"])
def test_parity_miniature_keeps_data_optimizer_and_target_settings(
    root: Path, tmp_path: Path, name: str
) -> None:
    original = compiled(root / "recipes" / f"{name}.yaml")
    write_miniature(original, tmp_path, dtype="float32")
    replaced = {change.path for change in write_recipe(original, 20, tmp_path)}
    small = compiled(tmp_path / "recipe.yaml").recipe
    assert small.model.dtype == small.merge.dtype == "float32" and small.train.steps == 20
    assert small.model.quantization is None
    assert small.lora is None or small.lora.dropout == 0.0
    assert not small.data.evaluates
    kept = {"data.packing", "data.loss_on", "data.format", "train.loss_normalization", "train.optimizer.name"}
    kept |= {"train.optimizer.eps", "train.optimizer.max_grad_norm", "train.schedule.name", "lora.targets"}
    assert not replaced & kept


def test_micro_batch_normalization_runs_parity_on_one_device(tmp_path: Path) -> None:
    text = RECIPE.replace("fsdp: 4, tp: 1", "fsdp: 2, ep: 2, tp: 1") % "Qwen/Qwen3-30B-A3B"
    (tmp_path / "recipe.yaml").write_text(text + "  loss_normalization: micro_batches\n")
    original = compiled(tmp_path / "recipe.yaml")
    (tmp_path / "work").mkdir()
    write_miniature(original, tmp_path / "work", dtype="float32")
    write_recipe(original, 20, tmp_path / "work")
    small = compiled(tmp_path / "work" / "recipe.yaml")
    assert dict(small.recipe.mesh.axes) == {"fsdp": 1, "tp": 1}
    assert (small.accumulation_steps, small.micro_batch_rows) == (2, 1)


class Scripts:
    """A fake of the pipeline's scripts: each run leaves a trace, an adapter and a merged model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: list[list[str]] = []
        self.losses: dict[str, list[float]] = {}
        self.fails: str | None = None
        monkeypatch.setattr(Pipeline, "script", lambda pipeline, command, *rest: self.script(command))

    def script(self, command: list[str]) -> str:
        _, script, *options = command
        given = dict(zip(options[::2], options[1::2], strict=True))
        output, model = Path(given["--output"]), Path(given["--model"])
        self.run.append([Path(script).name, output.name, *sorted(given.keys() - {"--model", "--output"})])
        if Path(script).name == self.fails:
            raise StepFailed(f"{self.fails} exited with status 1", "error: no such thing")
        assert Path(script).is_file() and model.is_dir()
        if "--trace" in given:
            arrays = {"layers.0.self_attn.q_proj.lora_A": np.full((8, 64), 0.1, np.float32)}
            losses = self.losses.get(output.name, [3.0, 2.0])
            about = {"dtype": "float32"}
            Trace("any", "small", about, losses, [7, 7], arrays, arrays).write(Path(given["--trace"]))
        elif "--import-adapter" not in given:
            shutil.copytree(model, output / "merged")
        return "done: steps=2 loss=2.0"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return Scripts(monkeypatch)


@pytest.fixture
def parity(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command on a model's recipe: exit status, stdout, stderr."""

    def run(model: str, *options: str | Path, more: str = "") -> tuple[int, str, str]:
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE % model + more)
        arguments = ["parity", str(path), *map(str, options)]
        result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return run


def test_parity_trains_and_merges_every_backend(
    scripts: Scripts, parity: Callable[..., Any], tmp_path: Path
) -> None:
    status, printed, _ = parity(LLAMA, "--keep", tmp_path / "kept")
    assert status == 0, printed
    trained = [["train.py", "tunix"], ["train_trl.py", "trl"], ["train_torchax.py", "torchax"]]
    assert scripts.run == [
        *([*run, "--data-dir", "--trace"] for run in trained),
        ["merge.py", "tunix"],
        *(
            ["merge.py", name, *option]
            for name in ("trl", "torchax")
            for option in (["--import-adapter"], [])
        ),
    ]
    assert "lora.dropout: 0.1 -> 0.0" in printed
    for pair in ("tunix - trl", "tunix - torchax", "trl - torchax"):
        assert printed.count(pair) == 5
    assert "failed" not in printed and f"kept: {tmp_path / 'kept'}" in printed
    assert read_trace(tmp_path / "kept" / "traces" / "trl.npz").losses == [3.0, 2.0]


def test_parity_fails_when_losses_differ_beyond_tolerance(
    scripts: Scripts, parity: Callable[..., Any], tmp_path: Path
) -> None:
    scripts.losses["trl"] = [3.0, 2.001]
    status, printed, err = parity(LLAMA, "--backend", "trl", "--backend", "tunix", "--json")
    found = json.loads(printed)
    assert status == 1 and found["ok"] is False and "kept: " in err
    assert [row["quantity"] for row in found["rows"] if not row["ok"]] == ["losses"]
    assert list(found["seconds"]) == ["miniature", "compile", "tunix", "trl", "merge", "compare"]
    shutil.rmtree(err.rpartition("kept: ")[2].strip())
    loose = ("--tolerance", "losses=1e-2", "--backend", "trl", "--backend", "tunix")
    assert parity(LLAMA, *loose)[0] == 0


def test_gemma4_tolerance_is_ten_times_the_control_run_difference(
    scripts: Scripts, parity: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    scripts.losses |= {"trl": [3.0, 2.001], "control": [3.0, 2.0012]}
    options = ("--backend", "trl", "--backend", "tunix", "--keep", tmp_path / "kept")
    status, printed, _ = parity(GEMMA4, *options)
    assert status == 0, "ten times the control's difference is allowed"
    assert "trl - control" in printed and "its first adapters moved by 1e-7" in printed
    assert ["train_trl.py", "control", "--adapter", "--data-dir", "--trace"] in scripts.run
    # The start is train.py's own start, with a tiny change of A only.
    from recipec.runtime.model.initial import initial_adapters

    small = compiled(tmp_path / "kept" / "recipe.yaml")
    assert small.lora is not None
    written = load_file(tmp_path / "kept" / "perturbed" / "adapter_model.safetensors")
    for name, (a, b) in initial_adapters(small.adapters, small.lora, small.recipe.train.seed).items():
        (key,) = (key for key in written if f".{name}.lora_A" in key)
        apart = np.abs(written[key] - a)
        assert 0 < apart.max() < 1e-6
        assert not written[key.replace("lora_A", "lora_B")].any() and not b.any()
    scripts.losses["control"] = [3.0, 2.001]
    assert parity(GEMMA4, *options)[0] == 1


def test_a_script_that_fails_ends_the_comparison(scripts: Scripts, parity: Callable[..., Any]) -> None:
    scripts.fails = "train_trl.py"
    status, printed, _ = parity(LLAMA)
    assert status == 1 and "error: no such thing" in printed
    assert [run[0] for run in scripts.run] == ["train.py", "train_trl.py"]
    shutil.rmtree(printed.rpartition("kept: ")[2].strip())


def test_backend_that_refuses_the_recipe_is_left_out(scripts: Scripts, parity: Callable[..., Any]) -> None:
    lion = "  optimizer: {name: lion, learning_rate: 0.0001}\n"
    status, printed, _ = parity(LLAMA, more=lion)
    assert status == 0
    assert "left out: trl: E0920, " in printed and "tunix - torchax" in printed
    # The recipe's own refusals count, and not those of the float32 miniature.
    status, printed, _ = parity(LLAMA, "--set", "model.quantization=int8")
    assert (
        status == 0 and "left out: trl: E0923, " in printed and "model.quantization: int8 -> none" in printed
    )


def test_too_few_backends_are_an_error(
    scripts: Scripts, parity: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lion = "  optimizer: {name: lion, learning_rate: 0.0001}\n"
    status, _, err = parity(LLAMA, "--backend", "trl", "--backend", "tunix", more=lion)
    assert status == 1 and not scripts.run
    assert "error[E1050]: " in err and "of those given tunix can run this recipe here; trl cannot: " in err
    assert "error[E0920]: " in err and f"--> {tmp_path / 'recipe.yaml'}:11:" in err
    status, _, err = parity(LLAMA, "--backend", "tunix")
    assert status == 1 and "error[E1050]" in err and "--backend NAME of another one" in err
    monkeypatch.setattr(
        backend_runs, "missing_packages", lambda names: [name for name in names if "torchax" in name]
    )
    status, printed, err = parity(LLAMA, "--backend", "torchax", "--backend", "tunix", "--json")
    (found,) = [finding for finding in json.loads(printed) if finding["severity"] == "error"]
    assert status == 1 and found["code"] == "E1050" and "torchax cannot be imported" in found["message"]
