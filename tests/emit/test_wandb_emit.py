"""Tests of how train.log.wandb_project changes an artifact, and of what it leaves unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from emitting import RECIPE, files_of, program_of

from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.miniature.small_checkpoint import shrink
from recipec.compiler.miniature.small_recipe import derive
from recipec.runtime.checkpoints.record import check_record, write_record
from recipec.runtime.errors import UserError

ASKED = ["train.log.wandb_project=support"]


def lines(text: bytes) -> set[str]:
    return set(text.decode().splitlines())


def test_wandb_is_emitted_only_when_recipe_sets_wandb_project(tmp_path: Path) -> None:
    without, asked = files_of(tmp_path / "a"), files_of(tmp_path / "b", ASKED)
    assert without.keys() == asked.keys()
    changed = {path for path in without if without[path] != asked[path]} - {"recipe.yaml", "recipe.lock.json"}
    assert changed == {"train.py", "requirements-train.txt", "README.md", "launch/tpu-vm.sh"}
    logged = '    log=Log(every=10, tensorboard=True, wandb_project="support"),'
    assert lines(asked["train.py"]) - lines(without["train.py"]) == {logged}
    more = lines(asked["requirements-train.txt"]) - lines(without["requirements-train.txt"])
    assert more == {f"{name}=={version}" for name, version in pins.sets()["wandb"]["direct"].items()} | {
        f"{name}=={version}" for name, version in pins.sets()["wandb"]["transitive"].items()
    }
    for path in changed:
        assert b"wandb" not in without[path]
    assert b"`WANDB_API_KEY`" in asked["README.md"]


def test_every_backend_script_and_requirements_include_wandb(tmp_path: Path) -> None:
    made = emit(
        program_of(tmp_path, ASKED, RECIPE.replace("google/gemma-4-31B-it", "Qwen/Qwen3-4B")), [*Backend]
    )
    for script in ("train.py", "train_torchax.py", "baseline/train_trl.py"):
        assert b'wandb_project="support"' in made[script]
    for file in ("requirements-train.txt", "requirements-torchax.txt", "baseline/requirements-trl.txt"):
        names = [line.partition("==")[0] for line in made[file].decode().splitlines() if "==" in line]
        assert "wandb" in names and len(names) == len(set(names))


def test_mlflow_packages_are_pinned_together_with_wandb(tmp_path: Path) -> None:
    made = files_of(tmp_path, [*ASKED, "train.log.mlflow_experiment=support"])
    assert b' mlflow_experiment="support"' in made["train.py"] and b"MLFLOW_TRACKING_URI" in made["README.md"]
    pinned = [line for line in made["requirements-train.txt"].decode().splitlines() if "==" in line]
    wanted = {**pins.sets()["mlflow"]["direct"], **pins.sets()["mlflow"]["transitive"]}
    assert {f"{name}=={version}" for name, version in wanted.items()} <= set(pinned)
    assert len({line.partition("==")[0] for line in pinned}) == len(pinned)


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_logging_service_pins_agree_with_script_pins(service: str) -> None:
    more = {**pins.sets()[service]["direct"], **pins.sets()[service]["transitive"]}
    every = [
        {**pins.sets()[name]["direct"], **pins.sets()[name]["transitive"]} for name in ("train-cpu", "trl")
    ]
    every.append({**pins.sets()["train-tpu"]["direct"], **pins.sets()["train-tpu"]["transitive"]})
    assert not any(all(name in whole for whole in every) for name in more)
    for whole in every:
        assert {name: whole[name] for name in more if name in whole}.items() <= more.items()


def test_resume_allows_wandb_change_but_no_other_package_change(tmp_path: Path) -> None:
    """Record its packages separately. Any other changed package is another environment."""
    folders = {}
    for name, sets in (("without", []), ("asked", ASKED)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        lock = files_of(tmp_path / f"{name}-recipe", sets)["recipe.lock.json"]
        (folders[name] / "recipe.lock.json").write_bytes(lock)
    for begun, goes_on in (("without", "asked"), ("asked", "without")):
        write_record(tmp_path / f"run-{begun}", folders[begun])
        check_record(tmp_path / f"run-{begun}", folders[goes_on])
    record = json.loads((folders["asked"] / "recipe.lock.json").read_text())
    record["packages"]["train"]["flax"] = "0"
    (folders["asked"] / "recipe.lock.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"packages\.train\.flax"):
        check_record(tmp_path / "run-without", folders["asked"])


def test_miniature_recipe_drops_wandb_project(tmp_path: Path) -> None:
    program = program_of(tmp_path, ASKED)
    config = shrink(program.config, {"fsdp": 4, "tp": 1})
    recipe, replaced = derive(program, config, "train.jsonl", "eval.jsonl", 12)
    assert recipe["train"]["log"]["wandb_project"] is None
    assert [change.after for change in replaced if change.path == "train.log.wandb_project"] == ["none"]
