"""Tests of routing and experts against transformers' own modules, by outputs and gradients.

They cover every kind of scores, experts without a token, sizes that a mesh does not divide, and ties.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from recipec.runtime.checkpoints.trained_weights import recorded_lora
from recipec.runtime.errors import UserError
from recipec.runtime.model import expert_products
from recipec.runtime.model.expert_products import SPLIT_AXIS, outer, run
from recipec.runtime.model.experts import clamped, route
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.families.decoder_family import DecoderFamily
from recipec.runtime.model.families.description import Experts, ExpertTensors
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime import decoders, training
from tests.runtime.training import QUICK

LIMIT = 1e-5
"""For an output or a gradient, relative to the largest of its array."""
AXES = {"fsdp": 2, "tp": 2}
HIDDEN = 12


@dataclass(frozen=True)
class Case:
    """A block of transformers.

    Attributes:
        module: its class, below transformers.models.
        experts: our description of it.
        rows, tokens: the batch; the mesh divides 4 rows and not 3.
        config: keys of config.json besides the sizes.
        names: of the router, of gate and up, and of down.
        inputs_first, alternate: as in ExpertTensors.
    """

    module: str
    experts: Experts
    rows: int = 4
    tokens: int = 5
    config: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, str, str] = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    inputs_first: bool = False
    alternate: bool = False


GRANITE = ("router.layer.weight", "input_linear.weight", "output_linear.weight")
ROUTER = ("router.weight", "experts.gate_up_proj", "experts.down_proj")

CASES = {
    "softmax, normalized": Case("mixtral.MixtralSparseMoeBlock", Experts(5, 2, 10, normalized=True)),
    "softmax, more experts than tokens": Case(
        "olmoe.OlmoeSparseMoeBlock", Experts(24, 2, 6), rows=3, tokens=3, config={"norm_topk_prob": False}
    ),
    "chosen, tp does not divide": Case(
        "granitemoe.GraniteMoeMoE", Experts(6, 4, 7, scores="chosen"), rows=3, names=GRANITE
    ),
    "sigmoid, groups, corrected": Case(
        "glm4_moe.Glm4MoeMoE",
        Experts(
            *(12, 3, 6),
            **{"scores": "sigmoid", "normalized": True, "scale": 2.5, "groups": 4, "chosen_groups": 2},
            **{"correction": True, "wide": True},
        ),
        config={
            **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
            **{"n_routed_experts": 12, "moe_intermediate_size": 6},
        },
    ),
    "sigmoid, one group, not normalized": Case(
        "glm4_moe.Glm4MoeMoE",
        Experts(5, 5, 7, scores="sigmoid", correction=True, wide=True),
        config={"norm_topk_prob": False, "n_routed_experts": 5, "moe_intermediate_size": 7},
    ),
    "sigmoid, on inputs": Case(
        "llama4.Llama4TextMoe",
        Experts(6, 2, 10, scores="sigmoid", on_inputs=True),
        names=ROUTER,
        inputs_first=True,
    ),
    "chosen, biases, within limits": Case(
        "gpt_oss.GptOssMLP",
        Experts(7, 3, 6, scores="chosen", biases=True, clamped=True),
        names=ROUTER,
        inputs_first=True,
        alternate=True,
    ),
}


def block(case: Case) -> Any:
    """Return transformers' module with random weights and zeroed shared experts."""
    family, name = case.module.split(".")
    kind = transformers.AutoConfig.for_model("llama4_text" if family == "llama4" else family)
    e = case.experts
    sizes = {
        **{"hidden_size": HIDDEN, "intermediate_size": e.size, "num_experts_per_tok": e.per_token},
        **{"num_experts": e.count, "num_local_experts": e.count},
    }
    config = type(kind)(**{**sizes, **case.config})
    config._experts_implementation = "eager"
    made = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            # Wide enough to reach gpt-oss's limits.
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2 if tensor.ndim == 3 else 1))
            if "shared_expert" in name:
                tensor.zero_()
    return made.eval()


def arrays_of(case: Case, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert a block's tensors, or their gradients, to the decoder's layout."""
    router, gate_up, down = (tensors[name] for name in case.names)
    e, f = case.experts.count, case.experts.size
    if not case.inputs_first:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)

    def halves(x: np.ndarray) -> np.ndarray:
        """Reshape [..., 2 F] to [..., 2, F]."""
        apart = x.reshape(*x.shape[:-1], f, 2).swapaxes(-1, -2)
        return apart if case.alternate else x.reshape(*x.shape[:-1], 2, f)

    out = {"router": router.T, "gate_up": halves(gate_up), "down": down}
    if case.experts.biases:
        out |= {
            "router_bias": tensors["router.bias"],
            "gate_up_bias": halves(tensors["experts.gate_up_proj_bias"]),
            "down_bias": tensors["experts.down_proj_bias"],
        }
    assert out["gate_up"].shape == (e, HIDDEN, 2, f)
    return out


def by_transformers(
    case: Case, x: np.ndarray, cotangent: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray | None]:
    """Return the output, the arrays, the gradients of the arrays and of x, and the correction."""
    made = block(case)
    given = torch.tensor(x, requires_grad=True)
    out = made(given.clone())
    out = (out[0] if isinstance(out, tuple) else out).reshape(x.shape)
    out.backward(torch.tensor(cotangent))
    tensors = {name: tensor.detach().numpy() for name, tensor in made.named_parameters()}
    gradients = {
        name: tensor.grad.numpy() for name, tensor in made.named_parameters() if tensor.grad is not None
    }
    correction = dict(made.named_buffers()).get("gate.e_score_correction_bias")
    return (
        out.detach().numpy(),
        arrays_of(case, tensors),
        {**arrays_of(case, gradients), "x": given.grad.numpy()},
        None if correction is None else correction.numpy(),
    )


def computed(case: Case, correction: np.ndarray | None) -> Callable[..., Any]:
    """Return a function of our block: its output, and the gradients of the arrays and x for a cotangent."""

    def forward(arrays: dict[str, Any]) -> Any:
        x = arrays["x"]
        logits = x @ arrays["router"] + arrays.get("router_bias", 0)
        weights, choices = route(logits, case.experts, correction)
        experts = {name: value for name, value in arrays.items() if name in SPLIT_AXIS}
        if "down_bias" in arrays:
            experts["down_bias"] = arrays["down_bias"]
        activation = clamped if case.experts.clamped else lambda gate, up: jax.nn.silu(gate) * up
        return run(x, weights, choices, experts, activation, case.experts.on_inputs)

    def both(arrays: dict[str, Any], cotangent: Any) -> Any:
        out, back = jax.vjp(forward, arrays)
        return out, back(cotangent)[0]

    return both


@pytest.mark.parametrize("name", CASES)
def test_expert_blocks_match_transformers_outputs_and_gradients(name: str) -> None:
    """Run on a mesh that may divide neither the rows nor an expert's features."""
    case = CASES[name]
    random = np.random.default_rng(1)
    x, cotangent = random.standard_normal((2, case.rows, case.tokens, HIDDEN)).astype(np.float32)
    wanted, arrays, gradients, correction = by_transformers(case, x, cotangent)
    assert "more" not in name or any(not gradients["down"][e].any() for e in range(case.experts.count))
    compute = computed(case, correction)
    compiled = jax.jit(compute, compiler_options=training.QUICK)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(AXES))
    with jax.default_matmul_precision("highest"), mesh:
        out, back = compiled({**arrays, "x": x}, cotangent)
    assert back.keys() == gradients.keys()
    found = {"out": out, **back}
    for key, reference in {"out": wanted, **gradients}.items():
        size = np.abs(reference).max()
        assert size > 0.1
        assert np.abs(np.asarray(found[key]) - reference).max() <= LIMIT * size, key


KINDS = {
    "softmax": Experts(6, 2, 1, normalized=True),
    "chosen": Experts(6, 2, 1, scores="chosen"),
    "sigmoid": Experts(6, 2, 1, scores="sigmoid"),
    "softmax in groups": Experts(6, 2, 1, groups=3, chosen_groups=1, summed=1),
    "sigmoid in groups": Experts(6, 2, 1, scores="sigmoid", groups=3, chosen_groups=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_router_breaks_ties_by_lowest_expert_index(kind: str) -> None:
    """Compare only the weights on ties, because torch does not define which experts win.

    Rows without ties equal torch's.
    """
    experts = KINDS[kind]
    logits = np.array(
        [
            [0, 0, 0, 0, 0, 0],  # all are equal
            [-1, 2, 0, 2, 2, -1],  # more ties for the best than are chosen
            [1, -2, 3, 0, 0, 0],  # ties behind the chosen ones
            [10, -1, 2, 1.5, -3, 1],  # no ties; the second group is best by sigmoids, and the first by logits
        ],
        np.float32,
    )
    weights, choices = (np.asarray(found)[0] for found in route(logits[None], experts))
    first = [[0, 1], [1, 3], [2, 0], [0, 2]]
    if experts.groups > 1:
        first = [[0, 1], [3, 2], [2, 3], [2, 3]] if experts.summed == 2 else [[0, 1], [1, 0], [2, 3], [0, 1]]
        ranked = np.where(np.arange(6) // 2 == np.array(first)[:, :1] // 2, logits, -np.inf)
    else:
        ranked = logits
    assert choices.tolist() == first
    scores = torch.tensor(logits)
    top = torch.topk(torch.tensor(ranked), 2).indices
    if experts.scores == "softmax":
        scores = torch.softmax(scores, -1)
    elif experts.scores == "sigmoid":
        scores = torch.sigmoid(scores)
    expected = scores.gather(-1, top)
    if experts.scores == "chosen":
        expected = torch.softmax(expected, -1)
    if experts.normalized:
        expected = expected / expected.sum(-1, keepdim=True)
    assert np.abs(weights - expected.numpy()).max() <= 1e-6


def test_router_ranks_saturated_sigmoids_by_logits() -> None:
    logits = np.array([[[30.0, 20.0, 40.0]]], np.float32)
    weights, choices = route(logits, Experts(3, 1, 1, scores="sigmoid"))
    assert (float(weights[0, 0, 0]), int(choices[0, 0, 0])) == (1.0, 2)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a GLM 4.5 with a layer after its last one, as published: it predicts a further token."""
    folder = tmp_path_factory.mktemp("glm")
    decoders.make("glm4_moe", folder, num_nextn_predict_layers=1)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": np.ones((48, 96), np.float32)}, file)
    return folder


def test_router_correction_stays_float32_in_bfloat16_model(glm: Path) -> None:
    """Keep the correction in float32.

    GLM 4.5's values are above 4, where bfloat16 has steps of 1/32, which is more than scores differ by.
    """
    _, built = training.build(glm, {"fsdp": 1}, dtype="bfloat16", targets=["q_proj"])
    found, saved = training.arrays(built.model), load_file(glm / "model.safetensors")
    for layer in (1, 2):
        correction = found.pop(f"layers.{layer}.mlp.correction")
        assert correction.dtype == np.float32
        assert np.array_equal(correction, saved[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"])
    assert {str(array.dtype) for path, array in found.items() if "lora" not in path} == {"bfloat16"}


@pytest.mark.parametrize(("key", "value"), [("num_nextn_predict_layers", 0), ("num_hidden_layers", 2)])
def test_extra_layers_are_ignored_only_if_config_json_declares_them(
    glm: Path, tmp_path: Path, key: str, value: int
) -> None:
    """Ignore as many extra layers as config.json says. More layers are those of another checkpoint."""
    base = HFCheckpoint.open(glm)
    base.verify()
    assert base.unused() == ["model.layers.3.eh_proj.weight"]
    (tmp_path / "model.safetensors").symlink_to(glm / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**base.config, key: value}))
    with pytest.raises(UserError, match=r"model\.layers\.3\.eh_proj\.weight is of layer 3"):
        HFCheckpoint.open(tmp_path).verify()


@pytest.mark.parametrize("rows", [384, 130])
def test_expert_weight_gradients_are_correct_with_and_without_tpu_kernel(rows: int) -> None:
    """Use 130 rows, which are no whole tiles. One expert has no row, and the last 40 rows have no expert."""
    draws = np.random.default_rng(1)
    left, right = (draws.standard_normal((rows, width)).astype(np.float32) for width in (12, 7))
    sizes = [33, 0, 1, rows - 74]
    ends = np.cumsum(sizes)
    own = [left[end - size : end].T @ right[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    for on_tpu in (False, True):
        found = outer(*map(jnp.asarray, (left, right, np.int32(sizes))), on_tpu=on_tpu, interpret=on_tpu)
        assert np.abs(found - np.stack(own)).max() <= LIMIT * np.abs(np.stack(own)).max()


def test_recorded_run_accepts_base_with_fused_or_separate_experts() -> None:
    """Accept experts one by one or in one tensor, as long as their number is the same."""
    family = FAMILIES["olmoe"]
    assert isinstance(family, DecoderFamily)
    trained = family.architecture({"model_type": "olmoe"})
    assert trained.experts is not None
    together = replace(trained, experts=replace(trained.experts, tensors=ExpertTensors(apart=False)))
    base: Any = SimpleNamespace(name="base", family=family, architecture=together)
    recorded = json.loads(json.dumps(asdict(trained)))
    assert recorded_lora({"recipe": {}, "model": {"architecture": recorded}}, base) is None
    recorded["experts"]["count"] -= 1
    with pytest.raises(UserError, match="base: its experts is"):
        recorded_lora({"recipe": {}, "model": {"architecture": recorded}}, base)


def test_adapter_products_of_a_tpu_read_bfloat16_operands_unless_a_precision_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare with float32 operands: values and gradients differ by bfloat16's rounding alone."""
    draws = np.random.default_rng(1)
    sizes = jnp.array([4, 0, 9], jnp.int32)
    rows = jnp.asarray(draws.standard_normal((16, 24)), jnp.bfloat16)
    a, b = (jnp.asarray(draws.standard_normal(shape), jnp.float32) for shape in ((3, 24, 5), (3, 5, 7)))
    weight = jnp.asarray(draws.standard_normal((3, 24, 7)), jnp.bfloat16)
    upstream = draws.standard_normal((13, 7))

    def loss(rows: Any, a: Any, b: Any) -> Any:
        arrays = {"down": weight, "down_lora_a": a, "down_lora_b": b}
        return jnp.sum(expert_products._product(rows, "down", arrays, sizes)[:13] * upstream)

    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    value, gradients = step(rows, a, b)
    # As in a process that sets no precision, whatever the tests before this one set.
    with jax.default_matmul_precision(None), monkeypatch.context() as patched:
        patched.setattr(expert_products, "_on_tpu", lambda: True)
        jax.clear_caches()  # JAX keeps what it traced for a CPU
        with jax.default_matmul_precision("highest"):
            assert _ragged_operands(step, rows, a, b) == {"bfloat16", "float32"}
        assert _ragged_operands(step, rows, a, b) == {"bfloat16"}
        rounded, of_rounded = step(rows, a, b)
    jax.clear_caches()
    assert abs(rounded - value) <= 0.02 * np.abs(upstream).sum()
    for one, other, dtype in zip(of_rounded, gradients, ("bfloat16", "float32", "float32"), strict=True):
        assert one.dtype == other.dtype == dtype
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        assert np.abs(one - other).max() <= 0.01 * np.abs(other).max()


def _ragged_operands(function: Any, *arguments: Any) -> set[str]:
    """Return the dtypes of the operands of a function's ragged products."""
    dtypes: set[str] = set()
    waiting = [jax.make_jaxpr(function)(*arguments).jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            if equation.primitive.name.startswith("ragged_dot"):
                dtypes |= {str(variable.aval.dtype) for variable in equation.invars[:2]}
            inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
            waiting += [value for value in inner if hasattr(value, "eqns")]
    return dtypes


HIDDEN, FEATURES, EXPERTS, RANK = 12, 10, 8, 3
IN_TILES = 256
"""A hidden size whose rows are exchanged as tiles of 128 values."""


EVEN, UNEVEN = 0.0, 50.0
"""In an uneven batch three experts get all rows."""


def results(axes: dict[str, int], hidden: int = HIDDEN, adapted: bool = False) -> list[Any]:
    """Return the value and the gradients of both batches, with the experts on a mesh.

    Args:
        adapted: the experts' weights are frozen, and have adapters.
    """
    draws = np.random.default_rng(0)
    shapes = {
        "gate_up": (EXPERTS, hidden, 2, FEATURES),
        "down": (EXPERTS, FEATURES, hidden),
        "gate_up_bias": (EXPERTS, 2, FEATURES),
        "down_bias": (EXPERTS, hidden),
    }
    arrays = {
        name: jnp.asarray(draws.normal(0, hidden**-0.5, shape), jnp.float32) for name, shape in shapes.items()
    }
    x = jnp.asarray(draws.standard_normal((8, 5, hidden)), jnp.float32)
    router = jnp.asarray(draws.normal(0, hidden**-0.5, (hidden, EXPERTS)), jnp.float32)
    described = Experts(EXPERTS, 3, FEATURES)
    sizes = {
        "gate_up_lora_a": (EXPERTS, hidden, RANK),
        "gate_up_lora_b": (EXPERTS, RANK, 2, FEATURES),
        "down_lora_a": (EXPERTS, FEATURES, RANK),
        "down_lora_b": (EXPERTS, RANK, hidden),
    }
    frozen: dict[str, Any] = {}
    if adapted:
        adapters = {
            name: jnp.asarray(draws.normal(0, hidden**-0.5, size), jnp.float32)
            for name, size in sizes.items()
        }
        frozen, arrays = arrays, adapters

    def loss(x: Any, router: Any, arrays: Any, lean: float) -> Any:
        logits = x @ router + lean * (jnp.arange(EXPERTS) < 3)
        weights, choices = route(logits, described)
        arrays = {**frozen, **arrays}
        return jnp.sum(jnp.sin(run(x, weights, choices, arrays, lambda gate, up: jax.nn.silu(gate) * up)))

    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    compute = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=QUICK)
    with Mesh(devices.reshape(tuple(axes.values())), tuple(axes)), jax.default_matmul_precision("highest"):
        both = [compute(x, router, arrays, lean) for lean in (EVEN, UNEVEN)]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(both)]


def test_sharded_experts_match_one_device_values_and_gradients() -> None:
    expected = results({"fsdp": 1})
    for axes in ({"fsdp": 2, "ep": 2, "tp": 2}, {"ep": 4}):
        for mine, alone in zip(results(axes), expected, strict=True):
            assert np.abs(mine - alone).max() <= 1e-5 * np.abs(alone).max()


@pytest.mark.parametrize("adapted", [False, True], ids=["weights", "adapters in blocks of rows"])
def test_rows_that_no_device_sent_are_not_used(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results({"fsdp": 1}, IN_TILES, adapted)
    monkeypatch.setattr(expert_products, "BLOCK", 16)  # of the 64 rows that a device has room for
    monkeypatch.setattr(expert_products, "_kernel_tile", lambda rows: rows)
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    for mine, alone in zip(results({"ep": 4}, IN_TILES, adapted), expected, strict=True):
        assert np.abs(mine - alone).max() <= 1e-5 * np.abs(alone).max()


def test_rematerialized_layer_does_not_repeat_expert_exchange() -> None:
    shapes = {"gate_up": (EXPERTS, HIDDEN, 2, FEATURES), "down": (EXPERTS, FEATURES, HIDDEN)}
    arrays = {name: jnp.ones(shape) for name, shape in shapes.items()}

    @jax.checkpoint
    def layer(x: Any) -> Any:
        weights, choices = route(x[..., :EXPERTS], Experts(EXPERTS, 3, FEATURES))
        return run(x, weights, choices, arrays, lambda gate, up: jax.nn.silu(gate) * up).sum()

    with Mesh(np.array(jax.devices()[:4]), ("ep",)):
        traced = str(jax.make_jaxpr(jax.grad(layer))(jnp.ones((8, 5, HIDDEN))))
    assert traced.count(" while[") == 2  # forward and backward
