"""Tests of QLoRA: what it stores, what it computes, and the memory that it saves."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals

from recipec.runtime.errors import UserError
from recipec.runtime.model.expert_products import run
from recipec.runtime.model.families import family_of
from recipec.runtime.model.loading import rematerialize
from recipec.runtime.model.partition_rules import Placement, resolved
from recipec.runtime.model.quantize import dequantize, layout, layouts, quantize
from recipec.runtime.model.sharding import named
from recipec.runtime.settings import MeshSettings
from recipec.runtime.training.losses import batch_loss
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import decoders, training
from tests.runtime.references import reference_nf4

pytestmark = pytest.mark.usefixtures("compiled_once", "highest")
"""The dequantized models are one program."""

MESH = {"fsdp": 4, "tp": 2}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 128,
}
MODELS: dict[str, Callable[..., Any]] = {
    "gemma4": functools.partial(tiny.make_gemma4, **tiny.GEMMA4_EXPERTS, global_head_dim=64),
    "qwen3_moe": functools.partial(decoders.make, "qwen3_moe", mlp_only_layers=[0]),
    "phi3": functools.partial(decoders.make, "phi3"),
    "mistral": functools.partial(decoders.make, "mistral"),
}
EXPERTS = (".experts.gate_up", ".experts.down")
EXPERT_ARRAYS = {"gemma4": 4, "qwen3_moe": 2}
"""By family: two arrays of each layer with experts."""
QUERIES = ("q_proj", "qkv_proj")
"""LoRA's targets: one projection of each layer."""


def targets(model: Path) -> tuple[str, ...]:
    """Return the adapters' targets, which include Qwen 3's experts but not Gemma 4's."""
    experts = json.loads((model / "config.json").read_text())["model_type"] == "qwen3_moe"
    return (*QUERIES, "experts") if experts else QUERIES


SPLIT = {"gate_up": (None, "fsdp", None, "tp"), "down": (None, "tp", "fsdp")}
WHOLE = {"gate_up": (None,) * 4, "down": (None,) * 3}
"""Shardings of experts."""
CODES = {"nf4": "u8", "int8": "s8"}
"""XLA's types of codes on a CPU."""


@pytest.fixture(
    scope="module",
    params=[
        "mistral",
        pytest.param("gemma4", marks=pytest.mark.e2e),
        pytest.param("qwen3_moe", marks=pytest.mark.nightly),
        pytest.param("phi3", marks=pytest.mark.nightly),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make Gemma 4 with experts, another model of experts, one with fused projections, or an ordinary one."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    MODELS[request.param](folder, **SIZES)
    return folder


@pytest.fixture(scope="module")
def built(model: Path) -> Callable[[str | None], Any]:
    """Return a function that builds the model once with "nf4", "int8" or, for None, float32 weights."""
    return functools.cache(
        lambda kind: training.build(model, MESH, quantization=kind, targets=targets(model))[1]
    )


def start(axes: dict[str, int]) -> Any:
    from recipec.runtime.model.sharding import start_mesh

    return start_mesh(MeshSettings("cpu", math.prod(axes.values()), axes))


def variables(built: Any) -> dict[str, Any]:
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(built.model)
        if isinstance(node, nnx.Variable)
    }


def replaced(model: Path, quantized: Any) -> Any:
    """Return the model with each quantized weight dequantized, in the model's dtype."""
    plain = training.build(model, MESH, targets=targets(model))[1]
    stored, own = variables(quantized), variables(plain)
    for path in quantized.quantized:
        weight = own[path].get_raw_value()
        own[path].set_raw_value(jax.device_put(np.asarray(stored[path].get_value()), weight.sharding))
    return plain


def test_nf4_weights_match_reference_in_bitsandbytes_blocks(
    model: Path, built: Callable[[str | None], Any]
) -> None:
    """Compare every linear layer and every expert with the Hugging Face tensors."""
    base = HFCheckpoint.open(model)
    stored = variables(built("nf4"))
    parameters = {p.path: p for p in built("nf4").parameters}
    sites = {target.weight for target in base.family.lora_targets(base.architecture)}
    experts = {path for path in parameters if path.endswith(EXPERTS)}
    assert len(experts) == EXPERT_ARRAYS.get(base.family.name, 0)
    sites |= experts
    assert built("nf4").quantized.keys() == sites, "adapted or not"
    assert len(built("nf4").adapters) == (4 if len(targets(model)) > len(QUERIES) else 2)
    worst = 0.0
    for path in sites:
        found = np.asarray(stored[path].get_value())
        expected = np.zeros(found.shape)
        for number, s in enumerate(parameters[path].sources):
            part = reference_nf4(base.read_rows(s, 0, s.reshape[0])).transpose(s.transpose)
            expected[parameters[path].place(number)] = part
        worst = max(worst, np.abs(found - expected).max() / np.abs(expected).max())
    print(f"\nlargest relative difference from bitsandbytes' layout: {worst:.1e}")
    assert worst <= 1e-6
    others = {path for path, variable in stored.items() if "lora" not in path} - sites
    assert {str(stored[path].get_raw_value().dtype) for path in others} == {"float32"}


@pytest.mark.parametrize("init", ["loftq", "olora"])
def test_nf4_base_and_loftq_adapters_match_reference(init: str, model: Path, tmp_path: Path) -> None:
    """Check LoftQ's one iteration and nf4 of the remainder, by the paper's table and LAPACK."""
    base = HFCheckpoint.open(model)
    run = training.build(model, MESH, kept=tmp_path, quantization="nf4", targets=QUERIES, init=init)[1]
    arrays, found = training.adapters(run), variables(run)
    parameters = {parameter.path: parameter for parameter in run.parameters}
    for adapter in run.adapters:
        parameter = parameters[adapter.target.weight]
        number = 0
        source = parameter.sources[number]
        weight = base.read(source.full_name(base.prefix))
        a, b = adapter.to_peft(*(arrays[path] for path, *_ in adapter.arrays))
        product = adapter.scale * b @ a
        frozen = weight
        if init == "loftq":
            u, s, v = np.linalg.svd(weight - reference_nf4(weight), full_matrices=False)
            expected = (u[:, : adapter.rank] * s[: adapter.rank]) @ v[: adapter.rank]
            assert np.abs(product - expected).max() <= 1e-5 * np.abs(expected).max()
        else:
            frozen = weight - product
        stored = np.asarray(found[parameter.path].get_value())[parameter.place(number)]
        expected = reference_nf4(frozen).reshape(source.reshape).transpose(source.transpose)
        assert np.abs(stored - expected).max() <= 1e-6 * np.abs(expected).max()


def test_dequantize_matches_qwix_bit_for_bit() -> None:
    import qwix

    weight = jnp.asarray(np.random.default_rng(0).standard_normal((96, 40)), jnp.float32)
    codes = qwix.quantize(weight, "nf4", channelwise_axes=(1,), tiled_axes={0: 32})
    assert len(np.unique(np.asarray(codes.qvalue))) == 16
    assert np.array_equal(dequantize(codes, jnp.float32), qwix.dequantize(codes))
    assert np.array_equal(dequantize(codes, jnp.bfloat16), qwix.dequantize(codes).astype(jnp.bfloat16))


def test_int8_error_is_at_most_half_a_channel_step(built: Callable[[str | None], Any]) -> None:
    plain, stored, quantized = variables(built(None)), variables(built("int8")), built("int8").quantized
    assert quantized
    for path, how in quantized.items():
        variable, weight = stored[path], np.asarray(plain[path].get_raw_value())
        raw = variable.get_raw_value()
        contract = tuple(i for i, block in enumerate(how.blocks) if block > 1)
        assert raw.scale.shape == tuple(1 if i in contract else n for i, n in enumerate(weight.shape))
        step = np.abs(weight).max(contract, keepdims=True) / 127.5
        np.testing.assert_allclose(np.asarray(raw.scale), step, rtol=1e-6)
        error = np.abs(np.asarray(variable.get_value()) - weight) / step
        assert 0.4 < error.max() <= 0.5 + 1e-4, path


@pytest.mark.parametrize(
    ("kind", "features", "specs"),
    [("nf4", 256, SPLIT), ("int8", 256, SPLIT), pytest.param("nf4", 192, WHOLE, marks=pytest.mark.e2e)],
    ids=["nf4", "int8", "nf4 whole"],
)
def test_quantized_experts_give_same_results_on_both_meshes(kind: str, features: int, specs: Any) -> None:
    """Compare the experts' sum and its gradient.

    A rule may replicate arrays. Then their blocks are not within a device's features, and the blocks are not
    sharded.
    """
    random = np.random.default_rng(0)
    shapes = {"gate_up": (3, 256, 2, features), "down": (3, features, 256)}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x, upstream = random.standard_normal((2, 8, 5, 256)).astype(np.float32)
    share = np.abs(random.standard_normal((8, 5, 2))).astype(np.float32)
    choices = random.integers(0, 3, (8, 5, 2)).astype(np.int32)

    def loss(x: Any, stored: Any) -> Any:
        out = run(x, share, choices, stored, lambda gate, up: gate * jnp.tanh(up))
        return jnp.sum(out * upstream), out

    found = []
    for axes, placed in (({"fsdp": 8, "tp": 1}, None), (MESH, specs)):
        with start(axes) as mesh:
            stored = {}
            for name, weight in weights.items():
                spec = (None,) * weight.ndim if placed is None else placed[name]
                how = layout(weight.shape, spec, (1,), kind, axes)
                assert how.blocks[1] == (64 if kind == "nf4" else weight.shape[1])
                stored[name] = quantize(jax.device_put(weight, named(mesh, spec)), how, mesh)
            found.append(jax.jit(jax.grad(loss, has_aux=True))(x, stored))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() <= 1e-5 * np.abs(one).max() > 0


def test_nf4_blocks_are_not_split_over_devices() -> None:
    def block(size: int, fsdp: int) -> int:
        how = layout((size, 4), ("fsdp", None), (0,), "nf4", {"fsdp": fsdp})
        assert how.scale_shape == (size // how.blocks[0], 4)
        return how.blocks[0]

    assert [block(5376, n) for n in (1, 4, 8)] == [64, 64, 56]
    assert block(4 * 67, 4) == 67, "a part without a divisor is one block"


def test_nf4_blocks_hold_adjacent_inputs_of_hugging_face_tensor() -> None:
    """Let small heads share a block, as in bitsandbytes, which does not know heads.

    The inputs of an output projection are heads times their size.
    """

    def blocks(heads: int, size: int, tp: int = 1) -> tuple[int, ...]:
        axes = {"fsdp": 2, "tp": tp}
        return layout((heads, size, 96), ("tp", None, "fsdp"), (0, 1), "nf4", axes).blocks

    assert [blocks(8, 16, tp) for tp in (1, 2, 4, 8)] == [(4, 16, 1), (4, 16, 1), (2, 16, 1), (1, 16, 1)]
    assert blocks(8, 64) == (1, 64, 1) and blocks(8, 256) == (1, 64, 1)
    assert blocks(6, 24) == (2, 24, 1) and blocks(8, 80) == (1, 40, 1) and blocks(8, 67) == (1, 67, 1)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_codes_and_scales_are_sharded_like_their_weight(
    kind: str, built: Callable[[str | None], Any]
) -> None:
    stored, quantized = variables(built(kind)), built(kind).quantized
    assert quantized
    for path, how in quantized.items():
        raw = stored[path].get_raw_value()
        assert tuple(raw.qvalue.sharding.spec) == tuple(how.spec), path
        local = raw.scale.addressable_shards[0].data.shape
        split = [MESH.get(name or "", 1) for name in how.scale_spec]
        assert local == tuple(n // parts for n, parts in zip(raw.scale.shape, split, strict=True)), path


def rule() -> Any:
    return optax.adamw(1e-2)


def stepper(built: Any) -> Any:
    """Return a compiled training step for models of this structure."""
    one = training.batch(0)
    graph = nnx.graphdef(built.model)

    @functools.partial(jax.jit, compiler_options=training.QUICK)
    def step(adapters: Any, state: Any, base: Any) -> Any:
        def loss(adapters: Any) -> Any:
            return batch_loss(built.forward, nnx.merge(graph, adapters, base), one)

        value, gradients = jax.value_and_grad(loss)(adapters)
        updates, state = rule().update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state, value

    return step


@pytest.mark.e2e
def test_nf4_training_matches_dequantized_base(model: Path, built: Callable[[str | None], Any]) -> None:
    """Compare losses and adapters after three steps from the same adapters."""

    def steps(step: Any, built: Any) -> tuple[list[float], dict[str, np.ndarray]]:
        _, adapters, base = nnx.split(built.model, nnx.LoRAParam, ...)
        state, losses = rule().init(adapters), []
        for _ in range(3):
            adapters, state, value = step(adapters, state, base)
            losses.append(float(value))
        arrays = {".".join(map(str, p)): np.asarray(v.get_raw_value()) for p, v in adapters.flat_state()}
        return losses, arrays

    with start(MESH):
        losses, found = steps(stepper(built("nf4")), built("nf4"))
        plain_step = stepper(built(None))
        expected_losses, expected = steps(plain_step, replaced(model, built("nf4")))
        plain = steps(plain_step, built(None))[0]
    difference = max(np.abs(found[path] - expected[path]).max() for path in expected)
    apart = np.abs(np.subtract(losses, expected_losses)).max()
    effect = abs(losses[0] - plain[0])
    print(f"\nlosses {apart:.1e}, adapters {difference:.1e}; quantizing moves the loss by {effect:.1e}")
    assert max(apart, difference) <= 1e-5
    assert effect > 1e-3
    assert losses[2] < losses[0], "the adapters are trained"
    assert all(array.any() for array in found.values())


def test_the_backward_pass_keeps_no_dequantized_weight(built: Callable[[str | None], Any]) -> None:
    """Keep codes as residuals.

    Without rematerialization, the residuals of a plain model are its weights.
    """
    kept = {kind: residuals(built(kind)) for kind in (None, "nf4")}
    weight = (SIZES["intermediate_size"], SIZES["hidden_size"])
    assert (weight, "float32") in kept[None]
    assert (weight, "uint4") in kept["nf4"]
    assert (weight, "float32") not in kept["nf4"]
    experts = expert_shapes(built("nf4"))
    most = {kind: max(math.prod(shape) for shape, dtype in kept[kind] if dtype == "float32") for kind in kept}
    assert not experts or most["nf4"] < min(map(math.prod, experts)) <= most[None]


def expert_shapes(built: Any) -> list[tuple[int, ...]]:
    return [how.shape for path, how in built.quantized.items() if path.endswith(EXPERTS)]


def residuals(built: Any) -> set[tuple[tuple[int, ...], str]]:
    """Return shapes and dtypes of the forward pass's residuals without rematerialization."""
    one = training.batch(0)
    rematerialize(built.model, "none")
    graph, adapters, base = nnx.split(built.model, nnx.LoRAParam, ...)

    def loss(adapters: Any) -> Any:
        return batch_loss(built.forward, nnx.merge(graph, adapters, base), one)

    with start(MESH):
        found = saved_residuals(loss, adapters)
    rematerialize(built.model, "decoder")
    return {(aval.shape, str(aval.dtype)) for aval, _ in found}


@pytest.mark.e2e
def test_a_run_on_quantized_experts_resumes_exactly(tmp_path: Path) -> None:
    """Quantize the base again, because a checkpoint holds only the adapters."""
    model = tmp_path / "model"
    decoders.make("qwen3_moe", model, num_hidden_layers=1, mlp_only_layers=[])
    rate = optax.constant_schedule(1e-2)

    def run(folder: Path, until: int) -> dict[str, np.ndarray]:
        mesh, built = training.build(model, MESH, quantization="nf4", targets=QUERIES, dropout=0.1)
        assert expert_shapes(built)
        with mesh:
            trainer = training.trainer(built, mesh, folder, rule())
            training.fit(trainer, folder, until, rate)
        return training.adapters(built)

    expected = run(tmp_path / "whole", 3)
    began = run(tmp_path / "resumed", 2)
    found = run(tmp_path / "resumed", 3)
    assert expected and all(np.array_equal(expected[path], found[path]) for path in expected)
    assert any(not np.array_equal(began[path], found[path]) for path in expected)


def arguments_of(program: Any) -> int:
    """Return the bytes of a compiled function's arguments on a device."""
    return program.memory_analysis().argument_size_in_bytes


def gathers(program: Any) -> set[tuple[str, int]]:
    """Return the types and element counts of a compiled function's all-gathers."""
    found = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", program.as_text())
    return {(dtype, math.prod(map(int, sizes.split(",")))) for dtype, sizes in found}


@pytest.mark.parametrize(
    ("kind", "expected"), [("nf4", 4 + 32 / 64), pytest.param("int8", 8 + 32 / 256, marks=pytest.mark.e2e)]
)
def test_quantized_base_matches_dequantized_logits_in_less_memory(
    kind: str, expected: float, model: Path, built: Callable[[str | None], Any]
) -> None:
    """Compare logits with the dequantized base, and the bytes of a device's arguments.

    The compiler reports the bytes. Experts are gathered as codes.
    """
    one = training.batch(0)

    def compiled(built: Any) -> Any:
        graph = nnx.graphdef(built.model)

        def logits(state: Any) -> Any:
            model = nnx.merge(graph, state)
            return built.forward.logits(model, one["tokens"], one["positions"], one["segment_ids"])

        state, program = nnx.state(built.model), jax.jit(logits)
        # The second compilation is from the cache. Calling it would fail on the layout of four-bit numbers.
        return program, np.asarray(program(state)), program.lower(state).compile()

    with start(MESH):
        plain, before, of_plain = compiled(built(None))
        _, found, of_quantized = compiled(built(kind))
        whole, arguments = arguments_of(of_plain), arguments_of(of_quantized)
        gathered = gathers(of_quantized)
        difference = np.abs(found - np.asarray(plain(nnx.state(replaced(model, built(kind)).model)))).max()
    linear = sum(math.prod(how.shape) for how in built(kind).quantized.values())
    bits = 32 - 8 * 8 * (whole - arguments) / linear  # 8 devices, each with its part
    print(
        f"\n{kind}: logits {difference:.1e}, moved by {np.abs(found - before).max():.2f} of "
        f"{np.abs(before).max():.0f}; {arguments:,} bytes of arguments on a device, {whole:,} in "
        f"float32; {bits:.2f} bits a weight"
    )
    assert difference <= 1e-5
    assert np.abs(found - before).max() > 1e-2
    assert bits == pytest.approx(expected, rel=0.05)
    for size in (math.prod(shape) // MESH["tp"] for shape in expert_shapes(built(kind))):
        assert (CODES[kind], size) in gathered and ("f32", size) not in gathered


NARROW: dict[str, Any] = {
    **{"model_type": "mistral", "vocab_size": 97, "num_hidden_layers": 1, "hidden_size": 168},
    **{"intermediate_size": 336, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16},
    "sliding_window": None,
}
"""Sizes whose blocks depend on the mesh: 56, 42 or 21 of 168 inputs on 1, 4 or 8 devices along fsdp."""


def stored_values(kind: str, began: dict[str, int] | None, axes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the values of random weights in float32, after quantization on a mesh."""
    family = family_of(NARROW)
    architecture = family.architecture(NARROW)
    parameters, mesh = resolved(family.parameters(architecture), (), axes), start(axes)
    first = None if began is None else Placement(began)
    found = {}
    for path, how in layouts(family, architecture, parameters, kind, axes, first).items():
        if not path.endswith(PARTS):
            continue
        random = np.random.default_rng(len(path)).standard_normal(how.shape).astype(np.float32)
        codes = quantize(jax.device_put(random, named(mesh, how.spec)), how, mesh)
        assert codes.scale.shape == how.scale_shape
        found[path] = np.asarray(jax.jit(dequantize, static_argnums=1)(codes, jnp.float32))
    return found


PARTS = ("q_proj.w", "o_proj.w", "down_proj.kernel")
BEGAN = [{"fsdp": 1, "tp": 1}, {"fsdp": 8, "tp": 1}]
MOVED = [{"fsdp": 4, "tp": 2}, {"fsdp": 2, "tp": 4}]


@pytest.mark.parametrize("began", BEGAN, ids=str)
def test_run_keeps_its_first_blocks_of_nf4_on_any_mesh(began: dict[str, int]) -> None:
    """Blocks that another mesh splits keep their scale: every number is the same, bit for bit."""
    expected = stored_values("nf4", None, began)
    for axes in MOVED:
        found = stored_values("nf4", began, axes)
        assert found.keys() == expected.keys() and len(found) == len(PARTS)
        for path, values in expected.items():
            assert np.array_equal(found[path], values), (axes, path)
    other = stored_values("nf4", None, MOVED[0])
    assert any(not np.array_equal(other[path], values) for path, values in expected.items())


def test_mesh_that_splits_blocks_too_finely_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"blocks of 56 entries in .*, and this mesh splits them into pieces of 7"
    ):
        stored_values("nf4", {"fsdp": 1, "tp": 1}, {"fsdp": 8, "tp": 1})


def test_block_of_a_whole_axis_on_a_mesh_of_one_device() -> None:
    axes = {"dcn": 2, "fsdp": 1, "tp": 1}
    how = layout((64, 3), ("fsdp", "tp"), (0,), "nf4", axes)
    assert (how.blocks, how.scale_spec) == ((64, 1), (None, "tp"))
    weight = np.random.default_rng(0).standard_normal(how.shape).astype(np.float32)
    codes = quantize(jax.device_put(weight), how, start(axes))
    assert np.abs(np.asarray(dequantize(codes, jnp.float32)) - weight).max() < 0.6


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bit_weights_are_the_same_on_any_mesh(kind: str) -> None:
    expected = stored_values(kind, None, BEGAN[0])
    found = stored_values(kind, None, MOVED[0])
    assert len(found) == len(PARTS) and all(
        np.array_equal(found[path], values) for path, values in expected.items()
    )
