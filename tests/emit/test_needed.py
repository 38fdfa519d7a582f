"""Tests of an artifact's runtime/: the modules that its files use, and the optional parts of its recipe."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest
from emitting import compiled, files_of, program_of

from recipec.compiler.artifacts.artifact import (
    LOCK,
    RUNTIME,
    SCHEMA,
    backends_of,
    check,
    modules,
    runtime_files,
    write,
)
from recipec.compiler.artifacts.needed import OPTIONAL, STARTED, imports_of, package_of
from recipec.compiler.emitters.backends import Backend, others
from recipec.compiler.emitters.emit import emit
from recipec.runtime import errors
from recipec.runtime.checkpoints.record import check_record, write_record
from recipec.runtime.errors import UserError, guarded
from recipec.runtime.model.families import FAMILIES


def listed(files: dict[str, bytes]) -> set[str]:
    return set(json.loads(files[LOCK])[RUNTIME])


def file_of(module: str) -> str:
    return f"{module.removeprefix(f'{RUNTIME}.').replace('.', '/')}.py"


def test_optional_modules_exist_and_include_every_model_family() -> None:
    assert {file_of(module) for module in (*OPTIONAL, *STARTED)} <= runtime_files().keys()
    assert {f"runtime.model.families.{name}" for name in FAMILIES} <= OPTIONAL.keys()


def test_plain_recipe_artifact_omits_unneeded_optional_modules(tmp_path: Path) -> None:
    sets = [
        "serve=null",
        "launch.kind=[]",
        "model.attention=dot",
        "train.log.wandb_project=null",
        "checkpoint.directory=run",
    ]
    files = files_of(tmp_path, sets)
    found = listed(files)
    assert "probe.py" not in files and "probe.py" in files_of(tmp_path, [])
    optional = {file_of(module) for module in OPTIONAL}
    peft = {f"peft/{name}.py" for name in ("adapter", "exporting", "fitting", "importing")}
    assert found & optional == {"model/families/gemma4.py", *peft}
    assert not any(path.startswith(("serving/", "launch/", "backends/", "probe/")) for path in found)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the runtime's files of the recipe that the cases change."""
    return listed(files_of(tmp_path_factory.mktemp("plain"), ["checkpoint.directory=run"]))


@pytest.mark.parametrize(
    ("sets", "needed"),
    [
        (["model.attention=splash"], ["model.attention_blocks", "model.attention", "model.context"]),
        (["data.train=[a.parquet]"], ["data.column_files"]),
        (["data.train=[a.jsonl, hf://somebody/set]"], ["data.huggingface"]),
        (["data.eval=[folder]"], ["data.huggingface"]),
        (["data.train=[a.json.gz]"], ["data.json_files"]),
        (["data.train=[a.jsonl]", "data.eval=[b.csv]"], ["data.csv_files"]),
        (["data.train=[folder]"], ["data.csv_files"]),
        (["data.eval_fraction=0.1"], ["data.division", "data.evaluation"]),
        (["data.format=instruction"], ["data.instructions"]),
        (["data.format=prompt_completion"], ["data.prompted"]),
        (["data.format=text", "data.loss_on=all"], ["data.texts"]),
        (["data.stream_window=1000", "train.steps=9"], ["data.stream"]),
        (["merge.quantization=fp8"], ["merging.quantized", "merging.quantized_sampling"]),
        (["model.id=mistralai/Ministral-3-8B-Instruct-2512"], ["weights.fp8"]),
        (
            ["train.objective=dpo", "data.format=preference", "data.packing=false"],
            ["training.preference", "data.preferences", "training.logps"],
        ),
        (["lora.quantize=nf4"], ["model.quantize"]),
        (["lora.layers=0-3"], ["model.layer_ranges"]),
        (["train.loss_normalization=micro_batches"], ["checkpoints.row_bound"]),
        (["train.loss_type=dft"], ["training.objective_losses"]),
        (["data.eval=[b.jsonl]"], ["training.evaluating", "data.weighted"]),
        (["data.train=[{path: a.jsonl, weight: 0.5}, b.jsonl]"], ["data.weighted"]),
        (["lora.train_also=[norm]"], ["merging.whole_sampling", "model.whole_arrays"]),
        (["data.eval=[b.jsonl]", "train.early_stopping={patience: 2}"], ["options"]),
        (["data.train=[gs://bucket/a.jsonl]"], ["data.remote_content"]),
        (["train.log.mlflow_experiment=mine"], ["metrics.services", "metrics.mlflow_log"]),
        (["lora.kind=dora", "lora.dropout=0"], ["model.dora"]),
        (["lora.init=olora"], ["training.first_values"]),
        (["lora.init=loftq", "lora.quantize=nf4"], ["training.loftq"]),
        (["model.add_tokens={<a>: <unused0>}"], ["data.new_tokens", "merging.own_files"]),
        (["lora.start_from=first"], ["training.start_from"]),
        (["model.vocab_size=262208"], ["weights.grown"]),
        (["train.neftune_noise_alpha=5"], ["model.noise"]),
        (["train.qat={}"], ["model.fake_quantize"]),
        (
            [
                "data.format=unpaired_preference",
                "data.packing=false",
                "train={objective: kto, micro_batch_size: 2}",
            ],
            ["training.kto"],
        ),
        (["lora=null", "model.id=google/gemma-3-270m-it"], ["checkpoints.full"]),
        (["checkpoint.directory=gs://bucket/run"], ["metrics.remote", "checkpoints.bucket", "stores"]),
        (["merge.output=s3://bucket/merged"], ["merging.remote_folder", "weights.remote", "stores"]),
        (["train.log.wandb_project=mine"], ["metrics.wandb_log"]),
        (["data.eval=[b.jsonl]", "train.samples={prompts: c.jsonl}"], ["data.prompts", "training.answers"]),
        (
            ["model.id=google/gemma-4-26B-A4B-it", "lora.targets=[q_proj]"],
            ["model.experts", "model.expert_layout", "peft.parameters"],
        ),
        (["model.id=google/gemma-4-E2B-it"], ["model.gemma4_parts"]),
        (["remat.policy=save_dots"], ["model.remat"]),
        (["data.temperature=2"], ["data.tempering"]),
        (
            ["mesh.accelerator=v5p-16", "mesh.axes={fsdp: 8}", "checkpoint.directory=gs://b/run"],
            ["hosts.group", "hosts.watched", "metrics.nowhere"],
        ),
        (["model.id=Qwen/Qwen3-8B"], ["model.families.qwen3"]),
    ],
)
def test_optional_module_is_included_only_when_the_recipe_needs_it(
    sets: list[str], needed: list[str], plain: set[str], tmp_path: Path
) -> None:
    paths = {file_of(module) for module in needed}
    assert not paths & plain
    assert paths <= listed(files_of(tmp_path, ["serve=null", "checkpoint.directory=run", *sets]))


def test_runtime_includes_the_modules_that_emitted_scripts_call(tmp_path: Path) -> None:
    served = listed(files_of(tmp_path, ["launch.kind=[tpu-vm]", "launch.zone=us-east5-a"]))
    assert {"serving/smoke.py", "serving/bench.py", "launch/tpu-vm.sh"} <= served
    assert not {"serving/evaluate.py", "launch/xpk.sh"} & served
    assert "serving/evaluate.py" in listed(files_of(tmp_path, ["evaluate.tasks=[gsm8k]"]))
    backends = listed(emit(program_of(tmp_path), [Backend.TRL, Backend.TORCHAX]))
    assert {"backends/trl/run.py", "backends/torchax/train.py"} <= backends


def test_imports_of_separates_module_level_from_function_imports() -> None:
    text = b"""\
from __future__ import annotations
import runtime.one
import numpy as np
from typing import TYPE_CHECKING
from . import two
if TYPE_CHECKING:
    from runtime.types import Only
try:
    from ..three import name
except ImportError:
    import runtime.one
class Kind:
    from runtime.four import here
    def method(self):
        if np:
            from runtime.five import later
"""
    found = imports_of(text, "runtime.data")
    assert found.top == {
        *("runtime.one", "runtime.data", "runtime.data.two", "runtime.three", "runtime.three.name"),
        *("runtime.four", "runtime.four.here"),
    }
    assert found.within == {"runtime.five", "runtime.five.later"}


def test_imports_of_matches_ast_parser_on_all_runtime_files() -> None:
    files = {path: content for path, content in runtime_files().items() if path.endswith(".py")}
    for path, content in files.items():
        package, parsed = package_of(path), set[str]()
        waiting: list[ast.AST] = [ast.parse(content)]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Import):
                parsed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = resolve_name("." * node.level + (node.module or ""), package)
                parsed |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                waiting += ast.iter_child_nodes(node)
        found = imports_of(content, package)
        assert found.top | found.within == {name for name in parsed if name.split(".")[0] == RUNTIME}, path


def test_shared_runtime_has_the_modules_of_all_artifacts_in_the_folder(tmp_path: Path) -> None:
    out, builds = tmp_path / "generated", {}
    for name, sets in {"plain": [], "logged": ["train.log.wandb_project=mine", "serve=null"]}.items():
        builds[name] = files_of(tmp_path / name, [f"name={name}", *sets])
    write(out, {"plain": builds["plain"]})
    assert write(out, {"logged": builds["logged"]}) == []
    both = listed(builds["plain"]) | listed(builds["logged"])
    assert set(modules(out / RUNTIME)) == both > listed(builds["plain"])
    assert check(out, builds) == check(out, {"plain": builds["plain"]}) == []
    assert write(out, {"plain": builds["plain"]}) == []
    assert set(modules(out / RUNTIME)) == both
    for path in [*(out / "logged").rglob("*")]:
        if path.is_file():
            path.unlink()
    assert write(out, {"plain": builds["plain"]}) == []
    assert set(modules(out / RUNTIME)) == listed(builds["plain"])
    assert (out / SCHEMA).is_file()


@pytest.mark.parametrize("most", [2, pytest.param(99, marks=pytest.mark.nightly)])
def test_recipe_artifacts_run_with_only_their_own_runtime_on_the_path(
    root: Path, tmp_path: Path, most: int
) -> None:
    """Import each module and start each script of artifacts with distinct needs.

    `make test` runs those with the fewest modules.
    """
    distinct: dict[frozenset[str], tuple[str, dict[str, bytes]]] = {}
    for recipe in sorted((root / "recipes").glob("*.yaml")):
        program = compiled(recipe)
        files = emit(program, others(backends_of(root / "generated" / program.name)))
        distinct.setdefault(frozenset(listed(files)), (program.name, files))
    assert len(distinct) > 8
    chosen = [distinct[modules] for modules in sorted(distinct, key=len)][:most]
    for name, files in chosen:
        write(tmp_path / name, {name: files})
    names = [name for name, _ in chosen]
    done = subprocess.run(
        [sys.executable, "-P", Path(__file__).parent / "alone.py", *(str(tmp_path / name) for name in names)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    said = [line.removeprefix("alone: ") for line in done.stdout.splitlines() if line.startswith("alone: ")]
    assert said == names


def test_resume_allows_changed_serving_modules_but_not_training_modules(tmp_path: Path) -> None:
    """Allow a server to be added or removed before a continuation, but no module of the training."""
    alone, served = (files_of(tmp_path / "recipes", sets) for sets in (["serve=null"], []))
    run, artifact = tmp_path / "run", tmp_path / "artifact"
    artifact.mkdir()
    (artifact / LOCK).write_bytes(alone[LOCK])
    write_record(run, artifact)
    (artifact / LOCK).write_bytes(served[LOCK])
    check_record(run, artifact)
    lock = json.loads(served[LOCK])
    lock[RUNTIME]["training/trainer.py"] = "0" * 64
    (artifact / LOCK).write_text(json.dumps(lock))
    with pytest.raises(UserError, match=r"of another artifact: runtime\.training/trainer\.py was"):
        check_record(run, artifact)


def test_missing_runtime_module_gives_one_sentence_error(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{errors.__package__}.model.quantize"

    def main() -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert guarded(main) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: this needs ") and "help: " in said
    assert "runtime/model/quantize.py, which the recipe of this artifact does not ask for" in said
