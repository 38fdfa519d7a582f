"""What a recipe with pictures adds to a program, its artifact and its estimates, for Gemma 3 4B."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import fields
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from recipec.compiler.emitters.emit import emit
from recipec.compiler.explain.explain import summary
from recipec.compiler.lower import lower
from recipec.compiler.lowering.assumed_pictures import row_patches, row_pictures
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.abstract import abstract_pictures
from recipec.compiler.plan.search import variants
from recipec.compiler.roofline import server_memory
from recipec.compiler.roofline.step_estimate import mask_of_pictures, need, picture_bytes
from recipec.compiler.roofline.training_step import model_flops, rows, state_bytes, tower_flops
from recipec.runtime.model.layers import Images
from recipec.spec.load import load

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "recipes" / "gemma3-12b-v5e8.yaml"
SETS = (
    "model.id=google/gemma-3-4b-it",
    "model.attention=auto",
    "data.format=chat",
    "serve.accelerator=v5e-1",
)
SETS += ("serve.tensor_parallel_size=1", "data.fields={}")
TOWER = 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 588 * 1152 + 1152 * 2560
"""Numbers of SigLIP's matrices, with the projector's."""
TABLE = 4096 * 1152
"""Numbers of its table of positions, which is whole on each device."""


@functools.cache
def program(*sets: str) -> Program:
    lowered = lower(load(BASE, [*SETS, *sets]), planning=True)
    assert lowered.program is not None, lowered.diagnostics
    return lowered.program


def artifact(*sets: str) -> dict[str, str]:
    """Return the texts of an artifact's files."""
    files = emit(program(*sets)).items()
    return {path: text.decode() if isinstance(text, bytes) else text for path, text in files}


def test_the_tower_is_part_of_the_program_only_with_pictures_and_never_trained() -> None:
    seeing, blind = program("data.images={}"), program()
    tower = [parameter for parameter in seeing.parameters if parameter.path.startswith("vision.")]
    assert sum(math.prod(parameter.shape) for parameter in tower) == pytest.approx(TOWER, rel=0.02)
    assert not any(parameter.trainable for parameter in tower)
    assert seeing.parameters[: len(blind.parameters)] == blind.parameters
    assert len(seeing.parameters) == len(blind.parameters) + len(tower)
    assert seeing.trainable_parameters == blind.trainable_parameters
    assert (seeing.recipe.model.attention, blind.recipe.model.attention) == ("dot", "splash")
    assert blind.architecture.vision is None
    full = program("lora=null", "merge.adapter=false", "data.images={}")
    assert full.trainable_parameters == blind.base_parameters


def test_an_axis_that_does_not_divide_the_tower_does_not_split_it() -> None:
    """Check 32 devices: they divide the 1,152 features, but not the 4,304 within a feed-forward block."""
    sets = ("mesh.accelerator=v5e-32", "mesh.axes={fsdp: 32, tp: 1}", "train.global_batch_size=32")
    parameters = program(*sets, "data.images={}").parameters
    specs = {parameter.path: parameter.spec for parameter in parameters}
    assert specs["vision.layers.0.mlp.fc1.kernel"] == ("fsdp", "tp")
    assert specs["vision.layers.0.mlp.fc2.kernel"] == ("tp", "fsdp")
    sets = ("mesh.accelerator=v5e-32", "mesh.axes={fsdp: 1, tp: 32}", "train.global_batch_size=32")
    lowered = lower(load(BASE, [*SETS, *sets, "data.images={}"]))
    assert not any("vision." in diagnostic.message for diagnostic in lowered.diagnostics)


@pytest.mark.parametrize(("images", "pictures"), [("{}", 4), ("{per_row: 7}", 7)])
def test_a_row_has_room_for_half_of_its_tokens_or_for_the_recipe_s_number(images: str, pictures: int) -> None:
    one = program(f"data.images={images}")
    assert row_pictures(one) == pictures
    assert row_patches(one) == 4096 * pictures
    assert picture_bytes(one) == 4 * 4096 * pictures * 588


def test_estimates_count_the_tower_by_patches() -> None:
    seeing, blind = program("data.images={}"), program("model.attention=dot")
    rows, patches = 8, 4 * 4096
    pairs = 2 * 27 * 1152 * 4096
    assert tower_flops(seeing) == pytest.approx(2 * rows * patches * (TOWER + pairs), rel=0.01)
    tokens = rows * 2048
    assert model_flops(seeing, tokens) == pytest.approx(model_flops(blind, tokens) + tower_flops(seeing))
    assert state_bytes(seeing) - state_bytes(blind) == pytest.approx(2 * (TOWER / 8 + TABLE), rel=0.03)
    assert need(seeing).total > need(blind).total
    weights = {weight.name: weight.bytes for weight in server_memory.weights(seeing)}
    assert weights[server_memory.VISION] == pytest.approx(2 * TOWER, rel=0.02)
    assert sum(weights.values()) - weights[server_memory.VISION] == pytest.approx(
        sum(weight.bytes for weight in server_memory.weights(blind)), rel=1e-6
    )


def test_the_artifact_says_what_its_scripts_need_of_pictures() -> None:
    files = artifact("data.images={}")
    lock = json.loads(files["recipe.lock.json"])
    assert lock["model"]["architecture"]["vision"]["patches"] == 4096
    assert "--picture" in files["serve/smoke.sh"]
    shapes = json.loads(files["probe_models.json"])
    assert shapes["patches"] == 4 * 4096
    assert all(depth["config"]["vision_config"]["image_size"] == 896 for depth in shapes["depths"])
    blind = artifact()
    assert "vision" not in json.loads(blind["recipe.lock.json"])["model"]["architecture"]
    assert "--picture" not in blind["serve/smoke.sh"] and "patches" not in json.loads(
        blind["probe_models.json"]
    )


def test_explain_says_what_pictures_add() -> None:
    seeing = summary("model", program("data.images={per_row: 2}"))
    assert [sentence for sentence in seeing if "vision tower of 27 layers and its projector" in sentence]
    two = program("data.images={per_row: 2}")
    share = tower_flops(two) / model_flops(two, rows(two) * two.recipe.data.max_length)
    (room,) = [sentence for sentence in seeing if "patches a row" in sentence]
    assert room.startswith("with room for 8,192 patches") and f" {share:.0%} of" in room
    assert not [sentence for sentence in summary("model", program()) if "patches" in sentence]


def test_adapters_of_the_tower_are_part_of_the_program_and_of_its_estimates() -> None:
    """Check every linear layer of SigLIP's 27 layers; the projector of Gemma 3 has none."""
    targets = "lora.targets=[q_proj, k_proj, v_proj{}]"
    frozen = program("data.images={}", targets.format(""))
    trained = program("data.images={}", targets.format(", out_proj, fc1, fc2"), "lora.vision=true")
    added = trained.tower_adapters
    assert len(added) == 27 * 6 and not frozen.tower_adapters
    assert trained.adapters[: -len(added)] == frozen.adapters
    rank = trained.recipe.lora.rank
    numbers = 27 * rank * (4 * 2 * 1152 + 2 * (1152 + 4304))
    assert trained.trainable_parameters - frozen.trainable_parameters == numbers
    specs = {parameter.path: parameter.spec for parameter in trained.parameters}
    for adapter in added:
        assert adapter.a_spec[:-1] + adapter.b_spec[1:] in (
            specs[adapter.target.weight],
            tuple(reversed(specs[adapter.target.weight])),
        )
    rows, patches = 8, 4 * 4096
    pairs = 2 * 27 * 1152 * 4096
    backward = 2 * rows * patches * (27 * (4 * 1152**2 + 2 * 1152 * 4304) + 2 * pairs)
    apart = tower_flops(trained) - tower_flops(frozen)
    assert apart == pytest.approx(backward + 6 * rows * patches * numbers, rel=0.01)
    assert need(trained).total - need(frozen).total > 2 * patches * 27 * 1152
    (said,) = [line for line in summary("model", trained) if "vision tower of 27 layers" in line]
    assert "162 linear layers have adapters" in said
    assert "which are frozen" in " ".join(summary("model", frozen))


def test_the_projector_alone_is_trained_whole() -> None:
    frozen, trained = (
        program("data.images={}", *more) for more in ((), ("lora.modules_to_save=[projector]",))
    )
    whole = {parameter.path: math.prod(parameter.shape) for parameter in trained.whole}
    assert whole == {"vision.projector.norm.w": 1152, "vision.projector.projection.kernel": 1152 * 2560}
    assert trained.trainable_parameters - frozen.trainable_parameters == sum(whole.values())
    assert tower_flops(trained) == tower_flops(frozen)


def test_explain_says_what_the_mask_of_pictures_costs() -> None:
    (told,) = [
        line for line in summary("model", program("data.images={}")) if "dot in place of splash" in line
    ]
    mask = mask_of_pictures(program("data.images={}"))
    assert mask is not None and str(mask) == told
    # A device has a row of 2,048 tokens, and each token has 8 heads' scores for all others, in bfloat16.
    assert mask.scores == 2 * 8 * 2048**2
    assert 0 < mask.share < 0.2
    assert mask_of_pictures(program()) is None
    causal = "model.id=Qwen/Qwen3-VL-2B-Instruct", "data.images={}"
    assert mask_of_pictures(program(*causal)) is None
    assert not [one for one in variants(program("data.images={}")) if "model.attention=splash" in one.sets]


def test_fields_name_the_column_of_pictures_only_with_pictures() -> None:
    fields = "data.fields={images: photos}"
    assert program("data.images={}", fields).recipe.data.fields == {"images": "photos"}
    found = lower(load(BASE, [*SETS, fields])).diagnostics
    assert [diagnostic.code for diagnostic in found if diagnostic.severity == "error"] == ["E0413"]


def test_a_plan_has_the_arrays_that_a_run_gives_the_model() -> None:
    tokens = jax.ShapeDtypeStruct((8, 2048), jnp.int32)
    names = {field.name for field in fields(Images)}
    turned = program("model.id=Qwen/Qwen3-VL-2B-Instruct", "data.images={}")
    arrays = abstract_pictures(turned, tokens)
    assert set(arrays) == names and arrays["rotary_positions"].shape == (8, 2048, 3)
    assert set(abstract_pictures(program("data.images={}"), tokens)) == names - {"rotary_positions"}
    assert not abstract_pictures(program(), tokens)
