"""Tests of experts' adapters: their products, their arrays in PEFT's layouts, and the model without them."""

from __future__ import annotations

from dataclasses import replace
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

from recipec.runtime.checkpoints.trained_weights import TrainedAdapters, hugging_face
from recipec.runtime.errors import UserError
from recipec.runtime.merging.arithmetic import changed_blocks
from recipec.runtime.merging.tensor_samples import ExpertProduct
from recipec.runtime.model import experts
from recipec.runtime.model.adapters import LoraSettings, build_adapters
from recipec.runtime.model.expert_products import run
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.families.qwen3_moe import FAMILY
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.peft.peft_names import OLD_NAMES, REMAPPED
from recipec.runtime.settings import MeshSettings
from recipec.runtime.training.objective_losses import before_training
from tests.runtime import decoders, training
from tests.runtime.built_models import randomize

AXES = {"fsdp": 2, "tp": 2}


@pytest.mark.parametrize("axes", [None, AXES], ids=["one device", "2x2"])
def test_expert_products_with_adapters_match_merged_weights(axes: dict[str, int] | None) -> None:
    """Compare gradients too. Those of experts without a token are zero."""
    experts, hidden, features, rank = 9, 12, 6, 3
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    base = {"gate_up": normal(experts, hidden, 2, features), "down": normal(experts, features, hidden)}
    adapters = {
        "gate_up_lora_a": normal(experts, hidden, rank),
        "gate_up_lora_b": normal(experts, rank, 2, features),
        "down_lora_a": normal(experts, features, rank),
        "down_lora_b": normal(experts, rank, hidden),
    }
    x, upstream, weights = normal(2, 2, hidden), normal(2, 2, hidden), normal(2, 2, 2)
    choices = np.array([[[0, 4], [4, 7]], [[1, 4], [0, 7]]], np.int32)

    def by_adapters(x: Any, adapters: Any) -> Any:
        out = run(x, weights, choices, {**base, **adapters}, lambda gate, up: jax.nn.silu(gate) * up)
        return jnp.sum(out * upstream), out

    def by_weights(x: Any, adapters: Any) -> Any:
        a, b = (adapters[f"gate_up_lora_{letter}"] for letter in "ab")
        gate_up = (base["gate_up"] + jnp.einsum("edr,ercf->edcf", a, b))[choices]
        a, b = (adapters[f"down_lora_{letter}"] for letter in "ab")
        down = (base["down"] + jnp.einsum("efr,erd->efd", a, b))[choices]
        both = jnp.einsum("btd,btkdcf->btkcf", x, gate_up)
        rows = jnp.einsum("btkf,btkfd->btkd", jax.nn.silu(both[..., 0, :]) * both[..., 1, :], down)
        out = jnp.einsum("btkd,btk->btd", rows, weights)
        return jnp.sum(out * upstream), out

    with jax.default_matmul_precision("highest"):
        expected = jax.grad(by_weights, argnums=(0, 1), has_aux=True)(x, adapters)
        compute = jax.jit(jax.grad(by_adapters, argnums=(0, 1), has_aux=True))
        if axes is None:
            found = compute(x, adapters)
        else:
            with start_mesh(MeshSettings("cpu", 4, axes)):
                found = compute(x, adapters)
    unused = [expert for expert in range(experts) if expert not in choices]
    for gradient in found[0][1].values():
        assert not np.asarray(gradient)[unused].any() and np.asarray(gradient)[choices].any()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


LAYOUTS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "together": {"apart": False},
    "inputs first, alternating": {"apart": False, "inputs_first": True, "alternate": True},
    "inputs first, which PEFT is not told": {"apart": False, "inputs_first": True, "swapped": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expert_adapters_of_every_layout_merge_as_in_peft(layout: str) -> None:
    """Compare merged tensors, their check, and the conversion to PEFT's matrices and back."""
    import peft

    config = {**decoders.fields("qwen3_moe"), "num_hidden_layers": 1, "mlp_only_layers": []}
    a = FAMILY.architecture(config)
    assert a.experts is not None
    names = replace(a.experts.tensors, **LAYOUTS[layout])
    a = replace(a, experts=replace(a.experts, tensors=names))
    settings = LoraSettings(rank=3, alpha=4.5, dropout=0.0, targets=("experts",))
    adapters = build_adapters(FAMILY, a, settings)
    parameters = {p.path: p for p in FAMILY.parameters(a)}
    random = np.random.default_rng(1)
    arrays = {
        one.target.weight: tuple(
            random.standard_normal(shape).astype(np.float32) for shape in (one.a_shape, one.b_shape)
        )
        for one in adapters
    }
    trained = TrainedAdapters(1, {}, b"", settings, tuple(adapters), arrays)
    changes, deltas = trained.changes(SimpleNamespace(family=FAMILY, architecture=a, prefix="model.")), {}
    weights: dict[str, np.ndarray] = {}
    for adapter in adapters:
        low, high = arrays[adapter.target.weight]
        parameter = parameters[adapter.target.weight]
        letters = "edr,ercf->edcf" if high.ndim == 4 else "efr,erd->efd"
        deltas[parameter.path] = delta = 1.5 * np.einsum(letters, low, high)
        for number, source in enumerate(parameter.sources):
            name = source.full_name("model.")
            weights[name] = random.standard_normal(source.shape).astype(np.float32)
            expected = weights[name] + hugging_face(delta[parameter.place(number)], source)
            blocks = np.concatenate(list(changed_blocks(weights[name], changes[name], np.dtype("float32"))))
            np.testing.assert_allclose(blocks, expected, rtol=0, atol=5e-6, err_msg=name)
            rows, width = np.arange(source.shape[0]), int(np.prod(source.shape[1:]))
            product = ExpertProduct(adapter, parameter, number, trained)
            exact, allowed = product.value(rows, weights[name].reshape(-1, width).astype(np.float64))
            assert (np.abs(exact - blocks.reshape(exact.shape)) <= allowed).all()
            assert allowed.max() < 1e-4
        pair = adapter.to_peft(low, high)
        assert tuple(matrix.shape for matrix in pair) == adapter.peft_shapes
        assert all(map(np.array_equal, adapter.from_peft(pair), (low, high)))

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d, e, f = a.hidden_size, a.experts.count, a.experts.size
            first = [(d, 2 * f), (f, d)] if names.inputs_first else [(2 * f, d), (d, f)]
            self.gate_up_proj, self.down_proj = (torch.nn.Parameter(torch.zeros(e, *one)) for one in first)
            self.is_transposed = names.inputs_first and not names.swapped

    holder = torch.nn.Module()
    holder.experts = Experts()
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    settings_of_peft = peft.LoraConfig(r=3, lora_alpha=4.5, target_modules=[], target_parameters=targets)
    wrapped = peft.get_peft_model(holder, settings_of_peft)
    pairs = trained.deltas()
    for module in wrapped.modules():
        if hasattr(module, "parameter_name"):
            pair = pairs[f"layers.0.mlp.experts.{module.parameter_name}"]
            with torch.no_grad():
                module.lora_A["default"].weight.copy_(torch.tensor(np.ascontiguousarray(pair.a)))
                module.lora_B["default"].weight.copy_(torch.tensor(np.ascontiguousarray(pair.b)))
    by_peft = wrapped.merge_and_unload().experts
    together = FAMILY.parameters(replace(a, experts=replace(a.experts, tensors=replace(names, apart=False))))
    for parameter in together:
        if parameter.path in deltas:
            (source,) = parameter.sources
            found = getattr(by_peft, source.name.rpartition(".")[2]).detach().numpy()
            expected = hugging_face(deltas[parameter.path], source)
            np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


def test_families_whose_linear_layers_peft_takes_for_experts_are_listed() -> None:
    from peft.utils import transformers_weight_conversion as conversion

    kinds = conversion._MODEL_TO_CONVERSION_PATTERN
    names = conversion._MOE_TARGET_MODULE_MAPPING
    taken = {
        name
        for name, family in FAMILIES.items()
        if any(kinds.get(kind) in names for kind in family.model_types)
    }
    assert "qwen3_moe" in taken and taken <= set(REMAPPED)
    assert all(kinds[name] in names for name in REMAPPED)
    assert {old for mapping in names.values() for old in mapping} == set(OLD_NAMES)


def test_model_with_adapters_off_equals_the_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn the adapters off within a program, as DPO's reference does.

    An unused expert adapter is an error.
    """
    decoders.make("qwen3_moe", tmp_path, num_hidden_layers=1, mlp_only_layers=[])
    targets = ("q_proj", "experts", "router")
    mesh, built = training.build(tmp_path, AXES, remat="decoder", targets=targets)
    randomize(built)
    one = training.batch(0)
    rows = [one[name] for name in ("tokens", "positions", "segment_ids")]
    graph, state = nnx.split(built.model)

    @jax.jit
    def both(state: Any) -> Any:
        model = nnx.merge(graph, state)
        with before_training(built.provider, kept=False):
            without = built.forward.logits(model, *rows)
        return built.forward.logits(model, *rows), without

    with mesh:
        adapted, without = map(np.asarray, both(state))
    built.provider.check_used()
    _, plain = training.build(tmp_path, AXES, remat="decoder", full=True)
    expected = training.logits(plain, mesh, one)
    np.testing.assert_allclose(without, expected, rtol=0, atol=1e-5)
    assert np.abs(adapted - expected).max() > 1

    built.provider.used.clear()
    monkeypatch.setattr(experts, "adapters_of", lambda _, x: (x, {}))
    training.logits(built, mesh, one)
    with pytest.raises(UserError, match=r"2 of 4 adapters .* among them layers.0.mlp.experts.down"):
        built.provider.check_used()


@pytest.mark.e2e
@pytest.mark.usefixtures("compiled_once")
def test_resumed_expert_adapters_equal_uninterrupted_training(tmp_path: Path) -> None:
    """Resume adapters of experts and their optimizer state."""
    decoders.make("qwen3_moe", tmp_path / "base", num_hidden_layers=1, mlp_only_layers=[])

    def run(folder: Path, steps: int) -> dict[str, np.ndarray]:
        mesh, built = training.build(tmp_path / "base", AXES, targets=("q_proj", "experts", "router"))
        with mesh:
            trainer = training.trainer(built, mesh, folder, optax.adamw(1e-2))
            training.fit(trainer, folder, steps, optax.constant_schedule(1e-2))
        return training.adapters(built)

    whole = run(tmp_path / "whole", 3)
    run(tmp_path / "parts", 2)
    parts = run(tmp_path / "parts", 3)
    assert len(whole) == 8 and all(whole[path].any() for path in whole)
    for path, array in whole.items():
        assert np.array_equal(parts[path], array), path
