"""probe.py of an artifact on virtual CPU devices: what it finds, what it tells, what it keeps to itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from recipec.compiler.artifacts.artifact import write
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering.lower import lower
from recipec.compiler.rehearse.artifact_run import script_environment
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
from recipec.spec.load import load
from tests.conftest import IN_ONE_PIECE
from tests.runtime.runs import lora_section

RECIPE = """\
recipe: 1
name: confidential
model: {id: ./secret-model, dtype: float32}
mesh: {accelerator: cpu-4, axes: {fsdp: 2, tp: 2}}
lora: {rank: 4, targets: [q_proj, v_proj, down_proj], train_tokens: ["<|im_end|>", 9]}
data: {train: [train.jsonl], max_length: 64}
train: {steps: 10, global_batch_size: 8, micro_batch_size: 2}
"""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("probed")
    (place / "secret-model").mkdir()
    (place / "secret-model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (place / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    program = lower(load(place / "recipe.yaml")).program
    assert program is not None
    write(place / "generated", {program.name: emit(program)})
    return place / "generated" / program.name


@pytest.fixture(scope="module")
def environment(artifact: Path) -> Mapping[str, str]:
    made = script_environment(artifact.parent)
    return {**made, "XLA_FLAGS": f"{made['XLA_FLAGS']} {IN_ONE_PIECE}"}


def run(artifact: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(artifact / "probe.py")],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.e2e
def test_a_probe_finds_the_machine_numbers_time_and_a_merge(
    artifact: Path, environment: Mapping[str, str]
) -> None:
    ran = run(artifact, environment)
    assert ran.returncode == 0, ran.stderr
    text = (artifact / "probe.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["machine"]["devices"] == 4 and found["problems"] == []
    places = {(one["where"], one["dtype"]) for one in found["numbers"]}
    named = ("the recipe's mesh", "fsdp 4, tp 1", "another order of the devices")
    assert places == {(where, dtype) for where in named for dtype in ("float32", "bfloat16")}
    assert all("elements" in one for one in found["numbers"])
    # Three layers, three more, and a line through both: eight.
    few, more = found["time"]["depths"]
    assert (few["layers"], more["layers"], found["time"]["layers"]) == (3, 6, 8)
    layer = (more["seconds"] - few["seconds"]) / 3
    assert found["time"]["step_seconds"] == pytest.approx(2 * (more["seconds"] + 2 * layer))
    # A traced step's parts, along the same line.
    parts = found["time"]["parts"]
    assert few["parts"]["products"] > 0 and few["parts"]["collectives"] > 0
    taken = few["parts"]["other"], more["parts"]["other"]
    assert parts["other"] == pytest.approx(max(0, taken[0] + 5 / 3 * (taken[1] - taken[0])))
    assert "seconds of a micro-batch: products" in ran.stdout
    assert more["compiled_bytes"] > few["compiled_bytes"] > 0
    assert 0 < found["merge"]["logits"] <= found["merge"]["logits_allowed"] < found["merge"]["effect"]
    assert "seconds of a step, 8 layers" in ran.stdout
    # Small, and nobody's.
    assert len(text) < 10_000
    for secret in ("confidential", "secret-model", "/", os.uname().nodename):
        assert secret not in text


def test_a_chip_that_is_missing_is_one_sentence(artifact: Path, environment: Mapping[str, str]) -> None:
    two = environment["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    ran = run(artifact, {**environment, "XLA_FLAGS": two})
    assert ran.returncode == 1
    assert "error: the recipe's mesh has 4 CPU devices, this machine 2\n" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.nightly
def test_ctrl_c_leaves_nothing(artifact: Path, environment: Mapping[str, str], tmp_path: Path) -> None:
    (artifact / "probe.json").unlink(missing_ok=True)
    with subprocess.Popen(
        [sys.executable, str(artifact / "probe.py")],
        env={**environment, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "numbers on one CPU device" in line:
                assert list(tmp_path.iterdir())
                process.send_signal(signal.SIGINT)
                break
        assert process.stderr.read().endswith("stopped: nothing was written\n")
    assert process.returncode == 130
    assert not list(tmp_path.iterdir()) and not (artifact / "probe.json").exists()


@pytest.mark.nightly
def test_a_disk_without_room_is_one_sentence(
    artifact: Path, environment: Mapping[str, str], tmp_path: Path
) -> None:
    limited = f"ulimit -f 8; exec {sys.executable} {artifact / 'probe.py'}"  # files of 8 KiB at the most
    ran = subprocess.run(
        ["bash", "-c", limited],
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1 and "error: the probe cannot read or write its files: " in ran.stderr
    assert str(tmp_path) in ran.stderr and "Traceback" not in ran.stderr and not list(tmp_path.iterdir())


def test_what_is_not_there_or_damaged_is_one_sentence(
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


def test_a_weight_that_is_another_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import load_file, save_file

    monkeypatch.setattr(numbers, "STEPS", 3)
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
    assert numbers.compare("here", "float32", computed("right"), right).problem is None
    problem = numbers.compare("here", "float32", computed("wrong"), right).problem
    assert problem is not None and problem.startswith("on here in float32 the miniature differs")
    assert "logits by" in problem and "gradients by" in problem and "\n" not in problem


def test_a_device_that_is_slower_than_the_others_is_named() -> None:
    usual = machine.product(jax.devices()[0])
    found = machine.slow(lambda device: usual * (1.5 if device.id == 2 else 1 + device.id / 100))
    assert found["slow"] == ["device 2 of process 0 takes 1.44 times as long as the others"]
    assert found["slowest"] == 1.44 and found["median_seconds"] == pytest.approx(usual, rel=0.2)
    assert machine.slow(lambda device: usual * (1 + device.id / 100))["slow"] == []


def test_what_is_beyond_its_tolerance_is_no_number_or_larger() -> None:
    found = numbers.Compared("here", "bfloat16", {"loss": np.nan, "logits": 0.04, "losses": 0.2})
    assert set(found.beyond) == {"loss", "losses"}
