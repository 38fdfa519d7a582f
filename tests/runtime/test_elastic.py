"""Tests of runs that continue on other meshes and with other micro-batches, with the same numbers."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recipec.runtime.checkpoints.record import check_record, first_record, placement
from recipec.runtime.checkpoints.saving import between_steps
from recipec.runtime.errors import UserError
from tests.runtime.artifacts import STEPS, saved, train, write_artifact
from tests.runtime.lives import Lives

PRELUDE = """
from dataclasses import replace

MESH = replace(MESH, axes={axes})
TRAIN = replace(TRAIN, micro_batch_size={micro})
DATA = replace(DATA, eval=())
{more}
"""
Mesh = tuple[dict[str, int], int]
"""The axes, and the rows of a device's micro-batch. A step has 8 rows."""
BEGAN: Mesh = ({"fsdp": 2, "tp": 1}, 2)
"""The mesh of the runs that stay: two micro-batches a step."""
PREFERENCES = """
TRAIN = replace(TRAIN, objective="dpo")
DATA = replace(DATA, train=("preferences.jsonl",), format="preference", loss_on="completion")
"""
CASES: dict[str, tuple[str, list[Mesh]]] = {
    # Data parallelism over dcn appears or disappears, and sharding over tp appears or disappears.
    "lora": ("", [({"dcn": 2, "fsdp": 2, "tp": 1}, 2), ({"fsdp": 2, "tp": 2}, 1)]),
    "lora, more devices": ("", [({"fsdp": 4, "tp": 2}, 1), ({"fsdp": 8, "tp": 1}, 1)]),
    "lora, fewer devices": ("", [({"fsdp": 1, "tp": 1}, 2), ({"dcn": 2, "fsdp": 2, "tp": 1}, 1)]),
    "dpo": (PREFERENCES, [({"dcn": 2, "fsdp": 2, "tp": 1}, 2), ({"fsdp": 4, "tp": 1}, 1)]),
    # A device's part of 64 inputs has 32 at the start, and then 16 and 64.
    "qlora": (
        'MODEL = replace(MODEL, quantization="nf4")',
        [({"fsdp": 4, "tp": 2}, 1), ({"dcn": 2, "fsdp": 1, "tp": 1}, 2)],
    ),
    "full": ("LORA = None", [({"fsdp": 4, "tp": 2}, 1), ({"dcn": 2, "fsdp": 2, "tp": 1}, 2)]),
}
"""The difference from the run that stays, and the mesh of each step after the start."""
SAVED = 8
"""The step that runs continue from."""


def lock(axes: Mapping[str, int], micro: int, **train: Any) -> dict[str, Any]:
    """Return a recipe's record with the parts that depend on the mesh."""
    recipe = {"mesh": {"accelerator": f"cpu-{math.prod(axes.values())}", "axes": dict(axes)}}
    recipe["train"] = {"micro_batch_size": micro, "global_batch_size": 8, **train}
    return {"lock": 1, "name": "tiny", "recipe": recipe, "model": {}, "packages": {}, "runtime": "sha256:0"}


def artifact(folder: Path, axes: dict[str, int], micro: int, more: str) -> None:
    prelude = PRELUDE.format(axes=axes, micro=micro, more=more)
    rate = 1e-3 if more else 1e-2  # without more, it continues from the shared run, which has the second rate
    write_artifact(folder, devices=math.prod(axes.values()), rate=rate, prelude=prelude)
    (folder / "recipe.lock.json").write_text(json.dumps(lock(axes, micro)))


def write_preferences(path: Path) -> None:
    choose, words = random.Random(1), ["one", "two", "three", "four", "five"]
    for_each = [" ".join(choose.choices(words, k=3)) for _ in range(40)]
    rows = [{"prompt": prompt, "chosen": "\nyes", "rejected": "\nno"} for prompt in for_each]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize(
    "name", ["lora", *(pytest.param(name, marks=pytest.mark.nightly) for name in CASES if name != "lora")]
)
def test_run_resumes_on_another_mesh_with_the_same_losses_and_state(
    name: str, place: Path, lives: Lives, whole: object
) -> None:
    """Compare losses and parameters with the run that stays. Each of the last steps is on another mesh."""
    more, hops = CASES[name]
    key = name.replace(", ", "-").replace(" ", "-")
    stays, moves = "whole", f"{key}-moves"
    if more:
        write_preferences(place / "preferences.jsonl")
        stays = f"{key}-stays"
        artifact(place / stays, *BEGAN, more)
        life = train(lives, place, stays, artifact=stays)
        assert life.status == 0, life.stderr
    folder = place / moves / "checkpoints"
    shutil.copytree(place / stays / "checkpoints", folder)
    shutil.rmtree(folder / str(STEPS))
    (folder / "recipe.lock.json").write_text(json.dumps(lock(*BEGAN)))
    for step, (axes, micro) in enumerate(hops, SAVED + 1):
        hop = f"{key}-{step}"
        artifact(place / hop, axes, micro, more)
        life = train(lives, place, moves, "--resume", "--steps", str(step), artifact=hop)
        assert life.status == 0, life.stderr
        described = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        note = f"note: the run began on fsdp 2 x tp 1 of cpu-2 and continues on {described} of cpu-"
        assert note in life.stderr
        assert f"continuing after step {step - 1} of {STEPS}" in life.stderr
    expected, found = (losses(place / way / "checkpoints") for way in (stays, moves))
    assert found == pytest.approx(expected, abs=1e-5) and len(found) == STEPS
    assert len(set(expected.values())) == STEPS
    for item in ("model_params", "optimizer_state"):
        one, other = (saved(place, way, STEPS, item) for way in (stays, moves))
        assert one.keys() == other.keys(), "whatever the accumulation, the same state is kept"
        for path, array in one.items():
            assert np.allclose(array, other[path], atol=1e-5, rtol=1e-4), path


def check(tmp_path: Path, began: dict[str, Any], now: dict[str, Any]) -> None:
    for folder, content in (("run", began), ("artifact", now)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "recipe.lock.json").write_text(json.dumps(content))
    check_record(tmp_path / "run", tmp_path / "artifact")


WHOLE, HALF = {"fsdp": 8, "tp": 1}, {"dcn": 2, "fsdp": 2, "tp": 1}


def test_resume_reports_changed_mesh_remat_and_micro_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began, now = lock(WHOLE, 1), lock(HALF, 2)
    now["recipe"] |= {"remat": {"policy": "none"}, "cache": {"directory": None}}
    check(tmp_path, began, began)
    assert capsys.readouterr().err == ""
    check(tmp_path, began, now)
    assert capsys.readouterr().err == (
        "note: the run began on fsdp 8 x tp 1 of cpu-8 and continues on dcn 2 x fsdp 2 x tp 1 of cpu-4; "
        'remat was null, now {"policy": "none"}; train.micro_batch_size was 1, now 2\n'
    )
    assert json.loads((tmp_path / "run" / "recipe.lock.json").read_text()) == began


@pytest.mark.parametrize(
    ("train", "cause"),
    [
        ({"loss_normalization": "micro_batches"}, "train.loss_normalization: micro_batches"),
        ({"objective": "orpo"}, "train.objective: orpo"),
        ({"objective": "cpo", "cpo_alpha": 0.5}, "train.objective: cpo"),
        ({"router_aux_loss_coef": 0.001}, "train.router_aux_loss_coef: 0.001"),
    ],
)
def test_loss_per_micro_batch_refuses_resume_with_another_row_count(
    tmp_path: Path, train: dict[str, Any], cause: str
) -> None:
    check(tmp_path, lock(WHOLE, 1, **train), lock(HALF, 2, **train))
    with pytest.raises(UserError) as caught:
        check(tmp_path, lock(WHOLE, 1, **train), lock(HALF, 1, **train))
    assert str(caught.value) == (
        f"{tmp_path / 'run'}: with {cause} the loss depends on the rows of a micro-batch; the run began with "
        "8, and this artifact has 4"
    )
    product = "micro_batch_size x dcn x fsdp x ep"
    assert caught.value.help == f"choose train.micro_batch_size so that {product} is 8 again"


def test_kto_refuses_resume_with_another_row_count_per_device(tmp_path: Path) -> None:
    kto = {"objective": "kto", "loss_type": "kto"}
    with pytest.raises(UserError, match="depends on the rows of a micro-batch"):
        check(tmp_path, lock(WHOLE, 2, **kto), lock(HALF, 2, **kto))
    with pytest.raises(UserError, match="micro-batches of 1 rows a device, and this artifact has 2"):
        check(tmp_path, lock(WHOLE, 1, **kto), lock(HALF, 2, **kto))
    apo = kto | {"loss_type": "apo_zero_unpaired"}
    check(tmp_path, lock(WHOLE, 1, **apo), lock(HALF, 2, **apo))


@pytest.mark.parametrize("change", [{"global_batch_size": 16}, {"seed": 1}, {"loss_normalization": "tokens"}])
def test_resume_refuses_settings_that_change_the_numbers(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=f"holds a run of another artifact: recipe.train.{next(iter(change))} was"
    ):
        check(tmp_path, lock(WHOLE, 1), lock(HALF, 1, **change))


def test_torchax_optimizer_state_is_restored_for_another_accumulation() -> None:
    """Save an optax state of the TorchAX backend after two micro-batches, and restore it for one and four."""

    from recipec.runtime.backends.torchax.torchax_checkpoints import after_step

    parameters = {"w": jnp.arange(8.0)}
    gradients = [{"w": jnp.cos(jnp.arange(8.0) * (i + 1))} for i in range(12)]
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def rule(accumulation: int) -> Any:
        inner = optax.adam(0.1)
        return optax.MultiSteps(inner, accumulation).gradient_transformation() if accumulation > 1 else inner

    def shapes(accumulation: int) -> Any:
        state = jax.eval_shape(rule(accumulation).init, parameters)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)

    @partial(jax.jit, static_argnums=0)
    def part(accumulation: int, trained: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = rule(accumulation).update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state

    def step(accumulation: int, trained: Any, state: Any, window: list[Any]) -> tuple[Any, Any]:
        for gradient in window:
            trained, state = part(accumulation, trained, state, gradient)
        return trained, state

    def mean(window: list[Any]) -> Any:
        return jax.tree.map(lambda *arrays: sum(arrays) / len(arrays), *window)

    first, second, third = gradients[:2], gradients[2:6], gradients[6:8]
    trained, state = step(2, parameters, rule(2).init(parameters), first)
    state = after_step(shapes(4), between_steps(state), 1)
    assert int(state.gradient_step) == 1 and jax.tree.structure(state) == jax.tree.structure(shapes(4))
    trained, state = step(4, trained, state, second)
    trained, _ = step(1, trained, after_step(shapes(1), between_steps(state), 2), [mean(third)])

    expected, other = parameters, rule(1).init(parameters)
    for window in (first, second, third):
        expected, other = step(1, expected, other, [mean(window)])
    assert np.allclose(trained["w"], expected["w"], atol=1e-6)


def test_blocks_are_those_of_the_first_record_of_a_run_that_became_longer(tmp_path: Path) -> None:
    axes = [{"fsdp": size, "tp": 1} for size in (2, 4, 8)]
    names = ("recipe.lock.until-8.json", "recipe.lock.until-12.json", "recipe.lock.json")
    for name, mesh in reversed(list(zip(names, axes, strict=True))):
        (tmp_path / name).write_text(json.dumps(lock(mesh, 1)))
        found = placement(first_record(tmp_path))
        assert found == {"axes": mesh, "rules": ()}
