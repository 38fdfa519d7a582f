"""Tests of an artifact's probe.py on virtual CPU devices: its findings, its report, what stays private."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from recipec.runtime.model.adapters import lora_settings
from recipec.runtime.model.random_weights import write_text_model
from recipec.runtime.probe import machine, numbers
from recipec.runtime.probe.probe import main
from recipec.runtime.settings import (
    CheckpointSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
    RunSettings,
    TrainSettings,
)
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime.probed import CONFIG, build, environment_of, run
from tests.runtime.runs import lora_section


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("probed"))


@pytest.fixture(scope="module")
def environment(artifact: Path) -> Mapping[str, str]:
    return environment_of(artifact)


def test_missing_devices_give_one_sentence_error(artifact: Path, environment: Mapping[str, str]) -> None:
    two = environment["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    ran = run(artifact, {**environment, "XLA_FLAGS": two})
    assert ran.returncode == 1
    assert "error: the recipe's mesh has 4 CPU devices, this machine 2\n" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_missing_output_folder_or_artifact_gives_clear_error(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(artifact, ["--output", str(tmp_path / "nowhere")])
    assert "there is no folder" in capsys.readouterr().err
    assert main(tmp_path, []) == 1
    assert "cannot read or write its files" in capsys.readouterr().err


def settings() -> RunSettings:
    return RunSettings(
        ModelSettings(id="tiny", family="qwen3", dtype="bfloat16"),
        MeshSettings("cpu", 2, {"fsdp": 2, "tp": 1}),
        lora_settings(lora_section(targets=["q_proj", "down_proj"]), 1),
        DataSettings(train=(), max_length=64, packing=True),
        TrainSettings(steps=1, global_batch_size=2, micro_batch_size=1),
        CheckpointSettings("checkpoints"),
    )


def test_changed_weight_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import load_file, save_file

    monkeypatch.setattr(numbers, "STEPS", 2)
    config = CONFIG | {"num_hidden_layers": 1}
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
        write_text_model(tmp_path / name, config)
    file = tmp_path / "wrong" / "model.safetensors"
    tensors = load_file(file)
    weight = "model.layers.0.mlp.up_proj.weight"
    tensors[weight][5, 7] += 0.2
    save_file(tensors, file)
    mesh = numbers.reference_mesh({"fsdp": 2, "tp": 1})

    def computed(name: str) -> numbers.Outcome:
        base = HFCheckpoint.open(tmp_path / name)
        return numbers.outcome(base, settings(), optax.adam, mesh, "float32", True)

    right = computed("right")
    assert numbers.compare("here", "float32", right, right).problem is None
    problem = numbers.compare("here", "float32", computed("wrong"), right).problem
    assert problem is not None and problem.startswith("on here in float32 the miniature differs")
    assert "logits by" in problem and "gradients by" in problem and "\n" not in problem


def test_a_device_that_is_slower_than_the_others_is_named() -> None:
    usual = machine.product(jax.devices()[0])
    found = machine.slow(lambda device: usual * (1.5 if device.id == 2 else 1 + device.id / 100))
    assert found["slow"] == ["device 2 of process 0 takes 1.44 times as long as the others"]
    assert found["slowest"] == 1.44 and found["median_seconds"] == pytest.approx(usual, rel=0.2)
    assert machine.slow(lambda device: usual * (1 + device.id / 100))["slow"] == []


def test_beyond_lists_nan_and_differences_above_tolerance() -> None:
    found = numbers.Compared("here", "bfloat16", {"loss": np.nan, "logits": 0.04, "losses": 0.2})
    assert set(found.beyond) == {"loss", "losses"}
