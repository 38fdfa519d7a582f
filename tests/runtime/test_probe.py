"""Tests of an artifact's probe.py on virtual CPU devices: its findings, its report, what stays private."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.profiler import ProfileData
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from recipec.compiler.lowering.libtpu import known
from recipec.compiler.plan.abstract import abstract_batch
from recipec.runtime.model.adapters import lora_settings
from recipec.runtime.model.families import family_of
from recipec.runtime.model.random_weights import RandomCheckpoint, write_text_model
from recipec.runtime.model.remat import POLICIES
from recipec.runtime.probe import compare_numbers, machine, timing
from recipec.runtime.probe.probe import main
from recipec.runtime.probe.probe_results import digest_of
from recipec.runtime.probe.variants import VARIANTS
from recipec.runtime.sections import Grpo
from recipec.runtime.settings import (
    CheckpointSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
    RunSettings,
    TrainSettings,
)
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime import towers
from tests.runtime.probed import CONFIG, build, environment_of, run
from tests.runtime.runs import lora_section


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("probed"))


@pytest.fixture(scope="module")
def environment(artifact: Path) -> Mapping[str, str]:
    return environment_of(artifact)


def test_missing_devices_give_one_sentence_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("mesh={accelerator: cpu-16, axes: {fsdp: 8, tp: 2}}", "train.global_batch_size=16")
    assert main(build(tmp_path, *sets), []) == 1
    error = capsys.readouterr().err
    assert "error: the recipe's mesh has 16 CPU devices, this machine 8\n" in error
    assert "Traceback" not in error


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


def test_variant_needs_the_probe_of_the_unchanged_step(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ("--output", str(tmp_path))
    assert main(artifact, ["--try", "save-dots", *there]) == 1
    assert "to compare with" in capsys.readouterr().err
    (tmp_path / "probe.json").write_text('{"probe": 1, "recipe": "other"}')
    assert main(artifact, ["--try", "save-dots", *there]) == 1
    assert "is of another recipe" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(artifact, ["--try", "fastest", *there])
    assert "attention-2048" in capsys.readouterr().err


@pytest.mark.e2e
def test_variant_is_timed_and_added_to_the_probe_of_the_same_recipe(
    artifact: Path, environment: Mapping[str, str], tmp_path: Path
) -> None:
    there = ("--output", str(tmp_path))
    lock = json.loads((artifact / "recipe.lock.json").read_text())
    before = {"probe": 1, "recipe": digest_of(lock), "time": {"step_seconds": 2.0}}
    (tmp_path / "probe.json").write_text(json.dumps(before))
    ran = run(artifact, environment, "--try", "save-dots", *there)
    assert ran.returncode == 0, ran.stderr
    after = json.loads((tmp_path / "probe.json").read_text())
    seconds = after.pop("tried")["save-dots"]["step_seconds"]
    assert after == before
    assert f"{seconds / 2:.3f}" in ran.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_changes_the_step_by_known_flags_and_settings(name: str) -> None:
    unchanged = replace(settings(), mesh=MeshSettings("tpu", 2, {"fsdp": 2}, flags=("--xla_tpu_x=1",)))
    changed = VARIANTS[name].of(unchanged)
    assert changed != unchanged and VARIANTS[name].of(changed) == changed
    names = [flag.removeprefix("--").partition("=")[0] for flag in changed.mesh.flags]
    assert all(map(known, (flag for flag in names if flag != "xla_tpu_x")))
    assert ("xla_tpu_x" in names) is VARIANTS[name].keep_flags
    assert changed.model.remat in POLICIES


def test_changed_weight_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_numbers, "STEPS", 2)
    config = CONFIG | {"num_hidden_layers": 1}
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
        write_text_model(tmp_path / name, config)
    file = tmp_path / "wrong" / "model.safetensors"
    tensors = load_file(file)
    weight = "model.layers.0.mlp.up_proj.weight"
    tensors[weight][5, 7] += 0.2
    save_file(tensors, file)
    mesh = compare_numbers.reference_mesh({"fsdp": 2, "tp": 1})

    def computed(name: str) -> compare_numbers.Outcome:
        base = HFCheckpoint.open(tmp_path / name)
        return compare_numbers.outcome(base, settings(), optax.adam, mesh, "float32", True)

    right = computed("right")
    assert compare_numbers.compare("here", "float32", right, right).problem is None
    problem = compare_numbers.compare("here", "float32", computed("wrong"), right).problem
    assert problem is not None and problem.startswith("on here in float32 the miniature differs")
    assert "logits by" in problem and "gradients by" in problem and "\n" not in problem


@pytest.mark.parametrize("objective", sorted(set(OBJECTIVES) - {"distill"}))
def test_each_objective_is_computed_and_timed(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe has no teacher: it computes a distillation as sft."""
    monkeypatch.setattr(compare_numbers, "STEPS", 2)
    write_text_model(tmp_path, CONFIG | {"num_hidden_layers": 1})
    grpo = Grpo(num_generations=2, iterations=2, beta=0.04) if objective == "grpo" else None
    loss_type = "kto" if objective == "kto" else "sigmoid"
    train = replace(settings().train, objective=objective, grpo=grpo, loss_type=loss_type)
    run = replace(settings(), train=train)
    mesh = compare_numbers.reference_mesh({"fsdp": 2, "tp": 1})
    outcome = compare_numbers.outcome(HFCheckpoint.open(tmp_path), run, optax.adam, mesh, "float32", True)
    assert np.isfinite(outcome.losses).all() and any(np.abs(g).max() > 0 for g in outcome.gradients.values())
    shapes = abstract_batch(train, run.data.max_length, run.mesh.data_parallel, mesh)
    timed = timing._rows(run, CONFIG["vocab_size"])
    assert {name: (array.shape, array.dtype) for name, array in timed.items()} == {
        name: (shape.shape, shape.dtype) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("case", [pytest.param("gemma3", marks=pytest.mark.nightly), "qwen3_vl"])
def test_a_step_with_pictures_is_timed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has two pictures of Gemma 3's size, or one of any size."""
    for name, value in {"WARM": 0, "TIMED": 1, "parts": lambda *arguments: {}}.items():
        monkeypatch.setattr(timing, name, value)
    config = towers.config_of(case).to_dict()
    run = replace(settings(), model=replace(settings().model, family=family_of(config).name))
    mesh = compare_numbers.reference_mesh({"fsdp": 2, "tp": 1})
    depth = timing.timed(config, (0, 1), run, optax.adam, mesh, 72)
    assert depth.layers == 2 and depth.seconds > 0
    blind = timing.timed(config, (0, 1), run, optax.adam, mesh)
    assert depth.compiled_bytes > blind.compiled_bytes
    architecture = RandomCheckpoint.of(config).seeing().architecture
    arrays = timing._pictures(architecture, 72, timing._rows(run, 64)["positions"])
    assert ("rotary_positions" in arrays) == (case == "qwen3_vl")


def test_a_device_that_is_slower_than_the_others_is_named() -> None:
    usual = machine.product(jax.devices()[0])
    found = machine.slow(lambda device: usual * (1.5 if device.id == 2 else 1 + device.id / 100))
    assert found["slow"] == ["device 2 of process 0 takes 1.44 times as long as the others"]
    assert found["slowest"] == 1.44 and found["median_seconds"] == pytest.approx(usual, rel=0.2)
    assert machine.slow(lambda device: usual * (1 + device.id / 100))["slow"] == []


def test_beyond_lists_nan_and_differences_above_tolerance() -> None:
    found = compare_numbers.Compared("here", "bfloat16", {"loss": np.nan, "logits": 0.04, "losses": 0.2})
    assert set(found.beyond) == {"loss", "losses"}


BF16 = "bf16[8,128]{1,0:T(8,128)(2,1)}"
TEXT = f"""HloModule jit_step, is_scheduled=true

%fused.1 (p: bf16[8,128]) -> bf16[8,128] {{
  %c.1 = {BF16} convolution(%p, %p), dim_labels=bf_io->bf
  ROOT %n.1 = {BF16} negate(%c.1)
}}

%start.1 (p: bf16[8,128]) -> bf16[8,128] {{
  %g.1 = {BF16} all-gather(%p), channel_id=3, dimensions={{0}}
  ROOT %s.1 = {BF16} custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}}

%step.1 (p: bf16[8,128]) -> bf16[8,128] {{
  %g.2 = {BF16} all-gather(%p), channel_id=3, dimensions={{0}}
  ROOT %n.2 = {BF16} negate(%g.2)
}}

%done.1 (p: bf16[8,128]) -> bf16[8,128] {{
  %g.3 = {BF16} all-gather(%p), channel_id=3, dimensions={{0}}
  ROOT %d.1 = {BF16} custom-call(%g.3), custom_call_target="AsyncCollectiveDone"
}}

%scattered (p: bf16[8,128]) -> bf16[8,128] {{
  %r.1 = {BF16} all-reduce(%p), channel_id=4, to_apply=%add
  ROOT %n.3 = {BF16} slice(%r.1)
}}

%body (p: bf16[8,128]) -> bf16[8,128] {{
  ROOT %fusion.9 = {BF16} fusion(%p), kind=kOutput, calls=%fused.1
}}

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {{
  %p = {BF16} parameter(0)
  %copy-start.1 = ({BF16}, {BF16}, u32[]{{:S(2)}}) copy-start(%p)
  %fusion.1 = {BF16} fusion(%p), kind=kOutput, calls=%fused.1
  %copy-done.1 = {BF16} copy-done(%copy-start.1)
  %begin.1 = {BF16} fusion(%p), kind=kCustom, calls=%start.1
  %beside.1 = {BF16} fusion(%p), kind=kCustom, calls=%step.1
  %end.1 = {BF16} fusion(%p), kind=kCustom, calls=%done.1
  %fusion.2 = {BF16} fusion(%p), kind=kCustom, calls=%scattered
  %gather-start.1 = (({BF16}), {BF16}, u32[]) all-gather-start(%p), channel_id=7
  %gather-done.1 = {BF16} all-gather-done(%gather-start.1)
  %wrapped.1 = (({BF16}), {BF16}, u32[]) async-start(%p), calls=%scattered
  %waited.1 = {BF16} async-done(%wrapped.1)
  %splash.1 = {BF16} custom-call(%p), custom_call_target="tpu_custom_call", metadata={{op_name="a/matmul"}}
  %allocated.1 = {BF16} custom-call(), custom_call_target="AllocateBuffer"
  %while.1 = {BF16} while(%p), condition=%condition, body=%body
  ROOT %copy.1 = {BF16} copy(%while.1)
}}
"""


def test_tpu_program_operations_are_classified_by_kind() -> None:
    found = timing.kinds(TEXT)
    told = {part: {name for name, kind in found.items() if kind == part} for part in timing.PARTS}
    assert told["products"] == {"c.1", "fusion.1", "fusion.9"}
    assert told["kernels"] == {"splash.1"}
    assert told["copies"] == {"copy-start.1", "copy-done.1"}
    collectives = {"begin.1", "end.1", "fusion.2", "gather-start.1", "gather-done.1", "wrapped.1", "waited.1"}
    assert told["collectives"] == collectives | {"s.1", "d.1", "r.1"}
    assert {"beside.1", "while.1", "copy.1", "allocated.1"} <= told["other"]


def plane(name: str, **lines: list[tuple[str, float, float]]) -> str:
    """Return a plane of an XSpace.

    Args:
        lines: each line's operations, with their start and duration in microseconds.
    """
    names = sorted({event[0] for events in lines.values() for event in events})
    said = {one: next(line.strip() for line in TEXT.splitlines() if f"%{one} = " in line) for one in names}
    out = f'planes {{ name: "{name}"'
    for number, one in enumerate(names, 1):
        text = said[one].removeprefix("ROOT ").replace('"', '\\"')
        out += f'\nevent_metadata {{ key: {number} value {{ id: {number} name: "{text}" }} }}'
    for line, events in lines.items():
        out += f'\nlines {{ name: "{line.replace("_", " ")}"'
        for one, start, taken in events:
            out += f" events {{ metadata_id: {names.index(one) + 1}"
            out += f" offset_ps: {round(start * 1e6)} duration_ps: {round(taken * 1e6)} }}"
        out += " }"
    return f"{out} }}\n"


def test_tpu_trace_time_is_summed_by_operation_kind() -> None:
    ops = [
        ("fusion.1", 0, 30),
        ("splash.1", 30, 20),
        ("gather-done.1", 55, 10),  # after 5 microseconds of nothing
        ("while.1", 65, 32),
        ("fusion.9", 66, 15),
        ("fusion.9", 81, 15),
        ("copy-done.1", 97, 3),
    ]
    beside = [("gather-start.1", 10, 55), ("copy-start.1", 80, 20)]
    other = [("fusion.1", 0, 60), ("copy.1", 60, 40)]
    text = plane("/device:TPU:0", XLA_Ops=ops, Async_XLA_Ops=beside, Steps=[("copy.1", 0, 100)])
    text += plane("/device:TPU:1", XLA_Ops=other)
    text += plane("/device:TPU:0 SparseCore 0", XLA_Ops=other) + plane("/host:CPU", python=other)
    found = timing.summed(
        ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text)),
        timing.kinds(TEXT),
    )
    both = {"products": 120, "other": 42, "kernels": 20, "collectives": 10, "copies": 3, "idle": 5}
    expected = {name: taken / 2 / timing.TRACED / 1e6 for name, taken in both.items()}
    assert found == pytest.approx(expected)
    assert timing.summed(ProfileData.from_serialized_xspace(b""), {}) == {}


def test_cpu_step_trace_finds_parts_and_leaves_no_files(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))

    def placed(*spec: str | None) -> jax.Array:
        return jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, PartitionSpec(*spec)))

    inputs = placed("fsdp"), placed(None, "fsdp")
    step = jax.jit(lambda x, w: jnp.sin(x @ w @ w).sum()).lower(*inputs).compile()
    found = timing.parts(lambda: step(*inputs).block_until_ready(), step.as_text())
    assert found["products"] > 0 and found["collectives"] > 0 and found["other"] > 0
    assert found["kernels"] == found["copies"] == 0
    assert list(tmp_path.iterdir()) == []
