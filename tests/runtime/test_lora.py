"""Tests of LoRA in the model: its arrays, computation and gradients, and the compiled program."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import Adapter, LoraSettings, build_adapters
from recipec.runtime.model.decoder import Decoder
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.families.decoder_family import described
from recipec.runtime.model.families.gemma4 import Gemma4
from recipec.runtime.model.initial import initial_pair
from recipec.runtime.model.layers import Batch, Config
from recipec.runtime.model.loading import abstract_model
from recipec.runtime.model.lora import dropped, keep_mask, row_salts
from recipec.runtime.model.sharding import divisible
from recipec.runtime.settings import ModelSettings
from recipec.runtime.training.losses import batch_loss
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import training
from tests.runtime.built_models import jaxpr, randomize

MESH = {"fsdp": 4, "tp": 2}
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4") / "model"
    tiny.make_gemma4(folder, **TWO)
    return folder


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3") / "model"
    tiny.make_gemma3(folder, num_hidden_layers=2)
    return folder


@pytest.mark.parametrize("family", ["gemma4", "gemma3"])
def test_lora_arrays_match_qwix_paths_and_shapes(family: str, request: pytest.FixtureRequest) -> None:
    """Compare paths and shapes with Qwix, which finds them by tracing the model."""
    import qwix

    base = HFCheckpoint.open(request.getfixturevalue(family))
    lora = LoraSettings(rank=3, alpha=3.0, targets=training.TARGETS, dropout=0.0)
    settings = ModelSettings(id="", family=family, dtype="float32")
    ours = abstract_model(base.family, base.architecture, settings, lora, {"fsdp": 1, "tp": 1})
    provider = qwix.LoraProvider(
        module_path=".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
        rank=3,
        alpha=3.0,
    )

    def stock() -> Any:
        model = Decoder(Config(described(base.architecture), jnp.dtype("float32")))
        ones = jnp.ones((2, 2), jnp.int32)
        return qwix.apply_lora_to_model(model, provider, ones, Batch.of(ones, ones), rngs=nnx.Rngs(0))

    def leaves(model: Any) -> dict[str, Any]:
        state = nnx.state(model, nnx.LoRAParam).flat_state()
        return {".".join(map(str, path)): variable.get_raw_value().shape for path, variable in state}

    assert leaves(ours.model) == leaves(nnx.eval_shape(stock))
    assert jax.devices()[0].platform == "cpu"


def test_arrays_that_differ_from_the_familys_description_are_refused(
    gemma4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = Gemma4.parameters
    monkeypatch.setattr(Gemma4, "parameters", lambda self, a: parameters(self, a)[:-1])
    with pytest.raises(UserError, match=r"differs from its family's description in 1 arrays: final_norm.w"):
        training.build(gemma4, MESH)


def test_unused_adapters_are_refused(gemma4: Path) -> None:
    mesh, built = training.build(gemma4, MESH)
    with pytest.raises(UserError, match="13 of 13 adapters"):
        built.provider.check_used()
    training.logits(built, mesh, training.batch(0))
    built.provider.check_used()


def test_variable_metadata_matches_array_sharding(gemma4: Path) -> None:
    """Check the shardings, with rules, that the optimizer's state and a restored checkpoint follow."""
    rules = ((r".*mlp\.down_proj.*", ("fsdp", "tp")), (r".*q_proj\.w", (None, None, None)))
    mesh, built = training.build(gemma4, MESH, rules=rules)
    state = nnx.state(built.model)
    specs = dict(nnx.get_partition_spec(state).flat_state())
    seen = Counter()
    for path, variable in state.flat_state():
        array = variable.get_raw_value()
        name = ".".join(map(str, path))
        spec = specs[path]
        spec = spec if isinstance(spec, PartitionSpec) else spec.get_raw_value()
        assert array.sharding.is_equivalent_to(_named(mesh, spec), array.ndim), name
        seen[type(variable).__name__] += 1
        if name == "layers.0.mlp.down_proj.kernel_lora_a":
            assert tuple(spec) == ("fsdp", None)
        if name == "layers.1.mlp.down_proj.kernel_lora_b":
            assert tuple(spec) == (None, "tp")
        if name == "layers.0.attn.q_proj.w_lora_b":
            assert not any(spec)
        if name == "embedder.input_embedding":
            assert tuple(spec) == (None, "fsdp"), "509 entries do not divide by tp"
    assert seen["LoRAParam"] == 26


def _named(mesh: Any, spec: Any) -> Any:
    return NamedSharding(mesh, spec)


@pytest.mark.parametrize("family", ["gemma4", "gemma3"])
def test_activation_sharding_constraints_apply_on_cpu(family: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(family)
    mesh, built = training.build(folder, MESH, remat="none")
    text = jaxpr(built, mesh)
    # q, k, v and the attention's output of each layer, and the feed-forward block's features.
    assert text.count("sharding_constraint") >= 1 + 2 * 4
    assert "P('fsdp', None, 'tp'" in text


def test_sharding_omits_axes_that_do_not_divide() -> None:
    axes = {"fsdp": 4, "tp": 2}
    assert divisible((8, 5, 3), ("fsdp", None, "tp"), axes) == ("fsdp", None, None)
    assert divisible((6, 4), ("fsdp", "tp"), axes) == (None, "tp")
    assert divisible((8,), ("other",), axes) == (None,)


def test_bfloat16_model_computes_in_bfloat16_with_float32_adapters(gemma4: Path) -> None:
    one = training.batch(0)
    mesh, built = training.build(gemma4, MESH, dtype="bfloat16", remat="none")
    randomize(built)
    assert {array.dtype for array in training.adapters(built).values()} == {np.dtype("float32")}
    low = training.logits(built, mesh, one)
    text = jaxpr(built, mesh)
    # The base's projections multiply bfloat16 by bfloat16. The adapters' products are float32.
    hidden, rows, length = 64, training.ROWS, training.LENGTH
    assert f"bf16[{rows},{length},{hidden}]" in text
    residual = re.findall(rf"(bf16|f32)\[{rows},{length},128\] = dot_general", text)
    assert residual.count("bf16") >= 4, "gate and up of two layers"
    mesh, exact = training.build(gemma4, MESH, remat="none")
    randomize(exact)
    high = training.logits(exact, mesh, one)
    difference = np.abs(low - high)[one["segment_ids"] > 0]
    assert 1e-3 < difference.mean() < 0.5, "bfloat16 rounds, and rounds no more than that"


def test_initial_adapters_follow_peft_bounds_and_seed() -> None:
    config = {**tiny.gemma4_text(**TWO), "model_type": "gemma4_text"}
    family = FAMILIES["gemma4"]
    architecture = family.architecture(config)

    def adapters(**options: Any) -> dict[str, Adapter]:
        lora = LoraSettings(
            **{"dropout": 0.0, "rank": 8, "alpha": 8.0, "targets": training.TARGETS, **options}
        )
        return {a.target.weight: a for a in build_adapters(family, architecture, lora)}

    peft, qwix = (
        LoraSettings(rank=8, alpha=8.0, targets=(), dropout=0.0),
        LoraSettings(rank=8, alpha=8.0, targets=(), init="qwix", dropout=0.0),
    )
    for weight, fan_in in (("mlp.down_proj.kernel", 128), ("attn.o_proj.w", 8 * 16)):
        adapter = adapters()[f"layers.0.{weight}"]
        values = initial_pair(adapter, peft, seed=0)[0]
        assert values.shape == adapter.a_shape
        assert 0.95 * fan_in**-0.5 < np.abs(values).max() <= fan_in**-0.5
        assert abs(values.mean()) < 0.2 * fan_in**-0.5
        wide = initial_pair(adapter, qwix, seed=0)[0]
        assert 0.95 * (6 / fan_in) ** 0.5 < np.abs(wide).max() <= (6 / fan_in) ** 0.5
    key, value = (initial_pair(adapters()[f"layers.0.attn.{one}_proj.w"], peft, seed=0)[0] for one in "kv")
    alone = initial_pair(adapters(targets=("v_proj",))["layers.0.attn.v_proj.w"], peft, seed=0)[0]
    assert key.shape == (64, 8)
    assert not np.array_equal(key, value), "K and V have their own A"
    assert np.array_equal(value, alone), "V's does not depend on whether K is trained"
    assert not np.array_equal(alone, initial_pair(adapters()["layers.0.attn.v_proj.w"], peft, seed=1)[0])


def test_initial_values_do_not_depend_on_the_mesh(gemma4: Path) -> None:
    found = [
        training.adapters(training.build(gemma4, axes, seed=7)[1]) for axes in (MESH, {"fsdp": 1, "tp": 8})
    ]
    for path, array in found[0].items():
        assert np.array_equal(array, found[1][path]), path
        assert array.any() == path.endswith("_lora_a"), "B starts at zero"


RUNS = ((0, 0), (0, 1), (1, 0), (2**32 - 1, 7))
"""Seeds and micro-batches."""


def test_dropout_mask_depends_on_seed_row_and_projection() -> None:
    shape = (64, 33, 65)
    salts = [jax.jit(row_salts, static_argnums=(0, 2))(seed, jnp.int32(i), 64) for seed, i in RUNS]
    masks = [np.asarray(keep_mask(one, shape, 0.1)) for one in salts]
    for mask in masks:
        assert abs(mask.mean() - 0.9) < 0.003
        for axis in range(3):
            others = tuple(i for i in range(3) if i != axis)
            assert np.abs(mask.mean(others) - 0.9).max() < 0.06, "no axis is favored"
    for i in range(4):
        for j in range(i):
            correlation = np.corrcoef(masks[i].ravel(), masks[j].ravel())[0, 1]
            assert abs(correlation) < 0.01
    for one, other in ((masks[0][:, :, 1:], masks[0][:, :, :-1]), (masks[0][1:], masks[0][:-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01
    halves = [keep_mask(row_salts(0, jnp.int32(i), 32), (32, *shape[1:]), 0.1) for i in (2, 3)]
    assert np.array_equal(masks[1], np.concatenate(halves)), "rows are counted over micro-batches"
    x = jnp.ones(shape)
    one, same, other = (np.asarray(dropped(x, salts[0], name, 0.1)) for name in ("q", "q", "k"))
    assert np.array_equal(one, same) and set(np.unique(one)) == {np.float32(0.0), np.float32(1 / 0.9)}
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01
    pictures = x[:48].reshape(16, 3, 33, 65)
    by_row = dropped(pictures, salts[0][:16], "q", 0.1).reshape(48, 33, 65)
    assert np.array_equal(by_row, dropped(x[:48], salts[0][:16], "q", 0.1)), "three pictures of each row"


def test_dropout_changes_training_loss_repeatably_and_not_evaluation(gemma4: Path) -> None:
    mesh, built = training.build(gemma4, MESH, dropout=0.5, remat="decoder")
    _, without = training.build(gemma4, MESH, dropout=0.0, remat="decoder")
    randomize(built)
    graph, state = nnx.split(built.model)
    one = training.batch(0)

    @jax.jit
    def dropped(state: Any, index: Any) -> Any:
        with built.provider.training(0, index, len(one["tokens"])):
            return batch_loss(built.forward, nnx.merge(graph, state), one)

    with mesh:
        first = [float(dropped(state, np.int32(i))) for i in (0, 1, 0)]
    assert first[0] == first[2] != first[1]
    evaluation, plain = (re.sub(" at 0x[0-9a-f]+", "", jaxpr(one, mesh)) for one in (built, without))
    assert evaluation == plain, "evaluation has no dropout"
