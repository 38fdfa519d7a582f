"""Tests of each optimizer's chain in train.py: sharded as on one device, resumed exactly, as in PyTorch."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from transformers.optimization import Adafactor

from recipec.compiler import catalog, python_text
from recipec.compiler.lowering.optimization import hyperparameters, matrices, optimizer
from recipec.compiler.miniature.fewer_layers import pattern, with_layers
from recipec.runtime.checkpoints.trained_weights import hugging_face
from recipec.runtime.model.families import family_of
from recipec.runtime.model.sharding import named
from recipec.runtime.sections import Log
from recipec.runtime.settings import CheckpointSettings, MeshSettings, TrainSettings
from recipec.runtime.training.optimizers import master_weights, scale_by_muon
from recipec.runtime.training.step import Step
from recipec.runtime.training.trainer import Checkpointing, Trainer
from recipec.runtime.weights.checkpoint import HFCheckpoint
from recipec.spec.language import Recipe
from tests import tiny
from tests.runtime import decoders, training
from tests.runtime.references import torch_loss
from tests.runtime.training import arrays

pytestmark = pytest.mark.usefixtures("compiled_once")
"""A run and its continuation are the same program."""

MESH = {"fsdp": 4, "tp": 2}
RATE = 1e-2
SHAPES = {
    "matrix": ((256, 128), ("fsdp", "tp")),
    "heads": ((8, 128, 16), ("tp", "fsdp", None)),
    "norm": ((130,), ("tp",)),
}


MATRICES = {"matrix": ((1,), (0,)), "heads": ((1,), (0, 2))}


DIFFERENT: dict[str, dict[str, float]] = {"sgd": {"momentum": 0.9}, "rmsprop": {"b2": 0.97, "momentum": 0.9}}
"""Settings other than the defaults."""


def chain(name: str, schedule: Any = RATE) -> Any:
    """Return train.py's optimizer for a recipe, with any rate or schedule, and Muon's steps in float32."""
    given = {"name": name, "eps": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1.0, **DIFFERENT.get(name, {})}
    recipe = Recipe.model_validate(
        {
            **{"recipe": 1, "name": "toy", "model": {"id": "some/model", "dtype": "float32"}},
            "mesh": {"accelerator": "v5p-8", "axes": MESH},
            "data": {"train": ["a.jsonl"]},
            "train": {"optimizer": given},
        }
    )
    names = {"optax": optax, "schedule": schedule, "MATRICES": MATRICES, **hyperparameters(recipe.train)}
    names["scale_by_muon"] = functools.partial(scale_by_muon, dtype="float32")
    return eval(python_text.source(optimizer(recipe)), names)


NAMES = ("adamw", "lion", "adafactor", "muon")
"""Those of which PyTorch has no rule, or whose states have other shapes; and the usual one."""


def start() -> Any:
    from recipec.runtime.model.sharding import start_mesh

    return start_mesh(MeshSettings("cpu", 8, MESH))


def toy(mesh: Any, dtype: str = "float32") -> Any:
    """Return a model of three sharded parameters, with the fields of loading.Built."""
    from tunix.utils import env_utils

    env_utils.setup_sharding_environment()  # as Tunix's models do
    random = np.random.default_rng(0)
    model = nnx.Module()
    for name, (shape, spec) in SHAPES.items():
        value = random.standard_normal(shape).astype(np.float32) * 0.1
        variable = nnx.Param(jax.device_put(value.astype(jax.numpy.dtype(dtype)), named(mesh, spec)))
        variable.set_metadata(out_sharding=spec)
        setattr(model, name, variable)
    return SimpleNamespace(model=model, adapters=(), provider=None, forward=PLAIN, lora=None, teacher=None)


PLAIN = SimpleNamespace(architecture=SimpleNamespace(expert_layers=()), settings=SimpleNamespace(qat=None))
"""The part of a model without experts that a trainer reads."""


def loss(model: Any, tokens: Any) -> Any:
    """Return a loss of every parameter and of a batch's tokens."""
    x = tokens.astype(jnp.float32)[:, : training.LENGTH] / 500.0
    heads = jnp.einsum("bt,ndt->bnd", x, model.heads[...].astype(jnp.float32))
    out = heads.mean(1) @ model.matrix[...].astype(jnp.float32).T
    return ((out - 1.0) ** 2).mean() + (model.norm[...].astype(jnp.float32) ** 2 * x.mean()).sum()


def trainer(built: Any, mesh: Any, folder: Path, rule: Any, accumulation: int = 2) -> Any:
    class Toy(Trainer):
        def _step_of(self, built: Any) -> Step:
            def of(model: Any, inputs: Any, before: Any) -> Any:
                return loss(model, inputs["tokens"]), {}

            return Step(built, self.optimizer, self._settings, self._mesh, of, self._reference)

    settings = TrainSettings(
        steps=9, global_batch_size=8 * accumulation, micro_batch_size=1, log=Log(every=99)
    )
    checkpoint = CheckpointSettings(str(folder), every_steps=2, keep=3)
    return Toy(built, rule, settings, mesh, accumulation, Checkpointing(str(folder), checkpoint))


def run(folder: Path, rule: Any, until: int, accumulation: int = 2, dtype: str = "float32") -> Any:
    mesh = start()
    with mesh:
        built = toy(mesh, dtype)
        one = trainer(built, mesh, folder, rule, accumulation)
        training.fit(one, folder, until, lambda step: RATE, accumulation)
    return one


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function that runs four steps with an optimizer once, with the run's folder."""

    @functools.cache
    def run_of(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(name)
        return run(folder, chain(name), 4), folder

    return run_of


def resumed(folder: Path, rule: Any, target: Path, *options: Any) -> Any:
    """Continue another run from its second step to its fourth."""
    shutil.copytree(folder, target)
    shutil.rmtree(target / "4")
    return run(target, rule, 4, *options)


@pytest.mark.parametrize("name", NAMES)
def test_sharded_optimizer_steps_match_plain_arrays(
    name: str, whole: Callable[[str], tuple[Any, Path]]
) -> None:
    found, before = arrays(whole(name)[0].model), arrays(toy(start()).model)
    rule, params = chain(name), dict(before)
    state = rule.init(params)
    gradient = jax.grad(lambda params, tokens: loss(SimpleNamespace(**params), tokens))

    @jax.jit
    def stepped(params: Any, state: Any, one: Any, other: Any) -> Any:
        parts = [gradient(params, tokens) for tokens in (one, other)]
        updates, state = rule.update(jax.tree.map(lambda a, b: (a + b) / 2, *parts), state, params)
        return optax.apply_updates(params, updates), state

    for step in range(4):
        params, state = stepped(params, state, *(training.batch(2 * step + i)["tokens"] for i in (0, 1)))
    for path, array in params.items():
        assert np.abs(before[path] - array).max() > 1e-4, "the steps move it"
        np.testing.assert_allclose(found[path], array, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_resumed_optimizer_run_is_exact(
    name: str, whole: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    run, folder = whole(name)
    parts = resumed(folder, chain(name), tmp_path / "parts")
    for left, right in ((run.model, parts.model), (run.optimizer, parts.optimizer)):
        expected, found = arrays(left), arrays(right)
        assert expected.keys() == found.keys()
        for path, array in expected.items():
            assert np.array_equal(array, found[path]), path


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_state_of_parameter_shape_is_sharded_like_parameter(
    name: str, whole: Callable[[str], tuple[Any, Path]]
) -> None:
    seen: dict[str, int] = {}
    for path, variable in nnx.state(whole(name)[0].optimizer).flat_state():
        array, leaf = variable.get_raw_value(), str(path[-1])
        if leaf in SHAPES and array.shape == SHAPES[leaf][0]:
            parts = [MESH.get(axis or "", 1) for axis in SHAPES[leaf][1]]
            local = tuple(n // part for n, part in zip(array.shape, parts, strict=True))
            assert array.addressable_shards[0].data.shape == local, path
            seen[leaf] = seen.get(leaf, 0) + 1
        else:
            assert array.sharding.is_fully_replicated, path
    # The accumulated gradient, and the optimizer's arrays of the same shape. Factored state has other shapes.
    expected = {"adamw": 3, "lion": 2, "adafactor": 2, "muon": 3}[name]
    fewer = {"adafactor": {"matrix"}, "muon": {"matrix", "heads"}}.get(name, set())
    assert seen == {leaf: expected - (leaf in fewer) for leaf in SHAPES}


def test_master_weights_accumulate_small_bfloat16_updates() -> None:
    """Sum a hundred steps of 1/4000 of a weight.

    In bfloat16 each step is lost. On float32 copies they add up to a fortieth.
    """
    params = {"w": jnp.full((8,), 1.0, jnp.bfloat16)}
    gradient = {"w": jnp.full((8,), 1.0, jnp.bfloat16)}

    def after(rule: Any) -> float:
        weights, state = params, rule.init(params)
        for _ in range(100):
            updates, state = rule.update(gradient, state, weights)
            weights = optax.apply_updates(weights, updates)
        assert weights["w"].dtype == jnp.bfloat16
        return float(weights["w"][0])

    assert after(optax.sgd(2.5e-4)) == 1.0
    assert after(master_weights(optax.sgd(2.5e-4))) == float(jnp.bfloat16(0.975))


def test_bfloat16_weights_are_the_rounded_master_copy(tmp_path: Path) -> None:
    """Shard the master copy like the weights, and save it with them."""
    rule = master_weights(chain("adamw"))
    one = run(tmp_path / "whole", rule, 4, 2, "bfloat16")
    state = nnx.state(one.optimizer).flat_state()
    masters = {str(path[-1]): node.get_raw_value() for path, node in state if "master" in path}
    assert masters.keys() == SHAPES.keys()
    weights = arrays(one.model)
    for name, master in masters.items():
        assert master.dtype == jnp.float32 and weights[name].dtype == jnp.bfloat16
        assert np.array_equal(np.asarray(master.astype(jnp.bfloat16)), weights[name])
        assert not np.array_equal(np.asarray(master), weights[name]), "it holds more than they do"
        assert tuple(master.sharding.spec) == tuple(SHAPES[name][1])
    parts = resumed(tmp_path / "whole", rule, tmp_path / "parts", 2, "bfloat16")
    for path, array in arrays(one.optimizer).items():
        assert np.array_equal(array, arrays(parts.optimizer)[path]), path


@pytest.fixture(scope="module")
def torch_arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "matrix": random.standard_normal((256, 130)).astype(np.float32),
        "vector": random.standard_normal(130).astype(np.float32),
    }


def gradients_of(arrays: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Yield gradients that shrink, and a large one, whose update Adafactor clips."""
    random = np.random.default_rng(2)
    for step in range(5):
        yield {
            name: (random.standard_normal(array.shape) * 10.0 ** -(step % 4)).astype(np.float32)
            for name, array in arrays.items()
        }


def torch_rule(name: str, weights: list[Any]) -> Any:
    if name == "adamw":
        return torch.optim.AdamW(weights, lr=RATE, eps=1e-5, weight_decay=0.01)
    if name == "sgd":
        return torch.optim.SGD(weights, lr=RATE, momentum=0.9, weight_decay=0.01)
    if name == "rmsprop":
        return torch.optim.RMSprop(weights, lr=RATE, alpha=0.97, eps=1e-5, momentum=0.9, weight_decay=0.01)

    return Adafactor(weights, lr=RATE, weight_decay=0.01, scale_parameter=False, relative_step=False)


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop", "adafactor"])
def test_optimizer_updates_match_pytorch(name: str, torch_arrays: dict[str, np.ndarray]) -> None:
    """Use a changing rate. Adafactor's reference is transformers', without its own learning rates."""
    weights = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in torch_arrays.items()}
    optimizer = torch_rule(name, list(weights.values()))
    rule = chain(name, lambda step: RATE / (1 + step))
    params: Any = dict(torch_arrays)
    state, update = rule.init(params), jax.jit(rule.update)
    for step, gradients in enumerate(gradients_of(torch_arrays)):
        optimizer.param_groups[0]["lr"] = RATE / (1 + step)
        for key, gradient in gradients.items():
            weights[key].grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    difference = max(np.abs(weights[key].detach().numpy() - params[key]).max() for key in params)
    moved = min(np.abs(torch_arrays[key] - params[key]).max() for key in params)
    print(f"\n{name}: {difference:.1e} of {moved:.1e}")
    assert difference <= 4e-6
    assert moved > 1e-3


MUON_RATE, DECAY, STEPS = 1e-3, 0.1, 4
MODELS = {
    "gemma3": functools.partial(tiny.make_gemma3, num_hidden_layers=1),
    "phi3": functools.partial(decoders.make, "phi3"),
    "starcoder2": functools.partial(decoders.make, "starcoder2", num_hidden_layers=1),
}


def orthogonal(gradients: np.ndarray) -> np.ndarray:
    """Return a matrix whose singular values are those of five Newton-Schulz steps, for an RMS of 0.2."""
    u, s, v = np.linalg.svd(gradients.astype(np.float64), full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v * 0.2 * np.sqrt(max(gradients.shape))


class Reference:
    """LLaMA-Factory's muon_rule for torch's parameters, by singular values."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.steps = 0

    def step(self, weights: dict[str, Any], rate: float) -> None:
        self.steps += 1
        for name, weight in weights.items():
            g = weight.grad.numpy().astype(np.float64)
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                buffer = self.sums[name] = self.sums.get(name, 0.0) * 0.95 + g
                update = orthogonal(g + 0.95 * buffer)
            else:
                first, second = self.sums.get(name, (0.0, 0.0))
                first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
                self.sums[name] = first, second
                corrected = np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
                update = first / (1e-8 + np.sqrt(second)) * corrected
            weight.data.mul_(1 - rate * DECAY)
            weight.data.sub_(weight.data.new_tensor(rate * update))


def muon_rule(axes: Any, dtype: str = "float32") -> Any:
    return optax.chain(
        scale_by_muon(axes, 0.95, 0.9, 0.999, 1e-8, dtype=dtype),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(lambda step: MUON_RATE / (1 + step)),
    )


def train_torch(model: Any) -> dict[str, np.ndarray]:
    """Train transformers' model, and return its parameters by name."""
    weights, reference = dict(model.named_parameters()), Reference()
    for step in range(STEPS):
        model.zero_grad()
        torch_loss(model, training.batch(step)).backward()
        reference.step(weights, MUON_RATE / (1 + step))
    return {name: weight.detach().numpy() for name, weight in weights.items()}


def test_muon_matrix_axes_match_hugging_face_shapes() -> None:
    """Check the axes of each array of the catalog's models against the shapes in Hugging Face's layout.

    Models of one config.json are one case, of which each kind of layer is checked once.
    """
    entries = {id: entry["config"] for id, entry in catalog.entries().items() if "unsupported" not in entry}
    distinct = {json.dumps(config, sort_keys=True): id for id, config in entries.items()}
    assert len(distinct) > 100
    for id in distinct.values():
        config, family = entries[id], family_of(entries[id])
        parameters = family.parameters(family.architecture(with_layers(config, pattern(config))))
        axes = matrices(parameters)
        for parameter in parameters:
            found = axes.get(re.sub(r"\.\d+\.", ".*.", parameter.path))
            for source in parameter.sources:
                turned = len(source.shape) == 2 and not re.search("embed|lm_head", source.name)
                assert (found is not None) == turned, (id, source.name)
                if found is not None:
                    sides = [math.prod(parameter.shape[axis] for axis in some) for some in found]
                    assert (sides[1], sides[0]) == source.shape, (id, source.name)


@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("phi3", "starcoder2"))]
)
def test_muon_steps_match_torch_reference(name: str, tmp_path: Path) -> None:
    """Cover heads, Hugging Face's fused projections, and biases."""
    model = MODELS[name](tmp_path / "base")
    base = HFCheckpoint.open(tmp_path / "base")
    parameters = base.family.parameters(base.architecture)
    before = {name: weight.detach().numpy().copy() for name, weight in model.named_parameters()}
    with jax.default_matmul_precision("highest"):
        mesh, built = training.build(tmp_path / "base", {"fsdp": 4, "tp": 2}, full=True)
        with mesh:
            chain = muon_rule(matrices(parameters))
            trainer = training.trainer(built, mesh, tmp_path / "run", chain, 1, every_steps=STEPS)
            training.fit(trainer, tmp_path / "run", STEPS, lambda step: MUON_RATE, 1)
    arrays, expected = training.weights(built), train_torch(model)
    worst = []
    for parameter in (one for one in parameters if one.trainable):
        for number, source in enumerate(parameter.sources):
            found = hugging_face(arrays[parameter.path][parameter.place(number)], source)
            named = source.full_name(base.prefix)
            moved = np.abs(expected[named] - before[named]).max()
            worst.append((np.abs(found - expected[named]).max() / moved, named))
            assert moved > MUON_RATE / 10
    print(f"\n{name}: {max(worst)}")
    assert max(worst)[0] <= 1e-2
