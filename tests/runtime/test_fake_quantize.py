"""Tests of quantization-aware training: torchao's numbers, and runs of rounded models against torch."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from recipec.runtime.model.quantize import fake_int4, fake_int8, rounded_operands
from recipec.runtime.sections import FakeQuantization
from tests import tiny
from tests.runtime import decoders, training
from tests.runtime.references import torch_loss, twenty_steps

pytestmark = pytest.mark.usefixtures("highest")

STORED = json.loads((Path(__file__).parent / "torchao_rounding.json").read_text(encoding="utf-8"))
"""What torchao 0.18 computed: scripts/torchao_rounding.py."""


@pytest.mark.parametrize("case", STORED)
def test_operands_and_gradients_match_torchao(case: str) -> None:
    """The rounded operands are equal to the last bit, except that products may be fused with sums."""
    kind, dtype = case.split("-")
    how = FakeQuantization(kind, *(("mxfp4", 32) if kind == "mxfp4" else ("int8", 6)))
    stored = {name: np.array(value, np.float32) for name, value in STORED[case].items()}
    x, weight = jnp.asarray(stored["x"], dtype), jnp.asarray(stored["weight"].T, dtype)

    @jax.jit
    def rounded(x: Any, weight: Any) -> Any:
        return rounded_operands("ti,io->to", x, weight, how)

    def product(x: Any, weight: Any) -> Any:
        return jnp.einsum("ti,io->to", *rounded(x, weight))

    for found, name in zip(rounded(x, weight), ("rounded_x", "rounded_weight"), strict=True):
        found, expected = np.asarray(found, np.float32), stored[name]
        found = found.T if name == "rounded_weight" else found
        assert np.abs(found - expected).max() <= (2e-8 if case == "int4_asymmetric-float32" else 0)
    out, pull = jax.vjp(product, x, weight)
    back = pull(jnp.asarray(stored["upstream"], dtype))
    near = 1e-6 if dtype == "float32" else 1.6e-2  # torch rounds gradients between its operations
    for found, name in zip((out, *back), ("product", "x_gradient", "weight_gradient"), strict=True):
        found, expected = np.asarray(found, np.float32), stored[name]
        found = found.T if name == "weight_gradient" else found
        assert np.abs(found - expected).max() <= near * np.abs(expected).max()
        assert np.array_equal(found == 0, expected == 0), "the same codes are cut off"


@pytest.mark.parametrize("equation", ["btnh,nhd->btd", "bsd,ckdh->cbskh"])
def test_quantization_groups_span_inputs_of_one_output(equation: str) -> None:
    """In every layout of a weight, also with groups that extend over several heads."""
    sizes = dict(zip("btndhckvs", (2, 5, 3, 24, 8, 2, 3, 7, 5), strict=True))
    inputs, output = equation.split("->")
    x_axes, w_axes = inputs.split(",")
    random = np.random.default_rng(0)
    x, weight = (
        random.standard_normal([sizes[axis] for axis in axes]).astype(np.float32) for axes in (x_axes, w_axes)
    )
    summed = [axis for axis in w_axes if axis not in output]
    rest = [axis for axis in w_axes if axis in output]
    found = jax.jit(lambda x, w: rounded_operands(equation, x, w, FakeQuantization("int4", "int8", 12)))(
        x, weight
    )

    order = [w_axes.index(axis) for axis in (*rest, *summed)]
    rows = weight.transpose(order).reshape(-1, 12)  # as Hugging Face stores it: [out, in]
    expected = np.asarray(fake_int4(jnp.asarray(rows), 1)).reshape([sizes[axis] for axis in (*rest, *summed)])
    assert np.array_equal(np.asarray(found[1]), expected.transpose(np.argsort(order)))
    assert np.abs(np.asarray(found[1]) - weight).max() > 0.01
    tokens = x.reshape(*x.shape[: x.ndim - len(summed)], -1)
    assert np.array_equal(np.asarray(found[0]).reshape(tokens.shape), np.asarray(fake_int8(tokens, (2,))))


def fake_linear(how: FakeQuantization) -> Any:
    """Return a torch module with the formulas of torchao's FakeQuantizedLinear, written independently."""

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, value: Any, inside: Any) -> Any:
            ctx.save_for_backward(inside)
            return value

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * ctx.saved_tensors[0], None, None

    def symmetric(w: Any) -> Any:
        rows = w.reshape(-1, how.group_size)
        scale = (rows.abs().amax(1, keepdim=True) / 7.5).clamp(min=torch.finfo(w.dtype).tiny)
        codes = torch.round(rows * (1.0 / scale))
        value = codes.clamp(-8, 7) * scale
        return Passing.apply(w, value.view_as(w), ((codes >= -8) & (codes <= 7)).view_as(w))

    def asymmetric(w: Any) -> Any:
        rows = w.reshape(-1, how.group_size)
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = (high - low) / 15
        exact = (rows - low) / scale
        codes = Passing.apply(exact, torch.round(exact), torch.ones_like(exact, dtype=torch.bool))
        return ((codes.clamp(0, 15) - 8) * scale + (low + 8 * scale)).view_as(w)

    def by_token(x: Any) -> Any:
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=2.0**-23)
        zero = (-128 - torch.round(low / scale)).clamp(-128, 127)
        codes = torch.round(x * (1.0 / scale)) + zero
        value = (codes.clamp(-128, 127) - zero) * scale
        return Passing.apply(x, value, (codes >= -128) & (codes <= 127))

    class FakeLinear(torch.nn.Linear):
        rounds = True

        def forward(self, x: Any) -> Any:
            if not self.rounds:
                return super().forward(x)
            round_weight = symmetric if how.weights == "int4" else asymmetric
            rows = x if how.activations is None else by_token(x)
            return torch.nn.functional.linear(rows, round_weight(self.weight), self.bias)

    return FakeLinear


def replace_linear(model: Any, how: FakeQuantization, names: str) -> Any:
    """Replace the linear layers with these names by rounded ones, with the same weights."""
    kind = fake_linear(how)
    found = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and re.search(rf"(^|\.)({names})$", name):
            module.__class__ = kind
            found += 1
    assert found
    return model


WEIGHTS = FakeQuantization("int4", None, 8)
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.e2e
def test_lora_qat_steps_match_peft_with_rounded_projections(tmp_path: Path) -> None:
    """Compare 20 steps with PEFT's adapters on linear layers that round as torchtune's QATLoRALinear does:
    the base's product, and not the adapter's. Gemma has keys and values in one array, of which only the
    values are adapted."""
    targets = ("q_proj", "v_proj", "o_proj")
    folder = tmp_path / "base"
    model = tiny.make_gemma4(folder, multimodal=False, **LAYERS)
    reference = replace_linear(model, WEIGHTS, "|".join(targets))
    axes = {"fsdp": 4, "tp": 2}
    alike = twenty_steps(folder, reference, axes, tmp_path / "run", targets=targets, qat=WEIGHTS)
    print(f"\n{alike}")
    assert alike.losses <= 1e-5 and alike.gradients <= 1e-5


FULL: dict[str, tuple[Any, FakeQuantization, int, float]] = {
    "llama": (tiny.make_llama, FakeQuantization("int4", "int8", 8, head=True), 1, 3e-3),
    "phi3": (
        functools.partial(decoders.make, "phi3", tie_word_embeddings=True),
        FakeQuantization("int4_asymmetric", None, 12, head=True, start_step=2),
        5,
        1e-4,
    ),
}
"""Models, what is rounded, steps, and the largest difference of a loss. Llama has a head of its own, and Phi
has fused projections and the embedding as its head. In int4 the largest weight of a group is 7.5 times its
scale: once the weights of two runs differ in the last bit, this weight may get another code."""


@pytest.mark.parametrize(
    "name", [pytest.param("llama", marks=pytest.mark.nightly), pytest.param("phi3", marks=pytest.mark.e2e)]
)
def test_full_qat_steps_and_evaluations_match_torch(name: str, tmp_path: Path) -> None:
    """Compare steps and evaluations with torch, before rounding begins and after."""
    make, how, steps, near = FULL[name]
    folder = tmp_path / "base"
    model = make(folder, num_hidden_layers=1)
    mesh, built = training.build(folder, {"fsdp": 4, "tp": 2}, full=True, qat=how)
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.01))
    with mesh:
        trainer = training.trainer(built, mesh, tmp_path / "run", rule, 1, every_steps=steps, eval_every=1)
        training.fit(trainer, tmp_path / "run", steps, lambda step: 1e-3, 1, evaluate=True)
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    linear = replace_linear(model, how, r".*_proj" + ("|lm_head" if how.head else ""))
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01)
    expected: dict[str, list[float]] = {"loss": [], "eval_loss": [], "grad_norm": []}
    with_rounding(linear, how.start_step == 0)
    with torch.no_grad():
        expected["eval_loss"].append(float(torch_loss(model, training.batch(10_000))))
    with_rounding(linear, False)
    plain = float(torch_loss(model, training.batch(10_000)))
    with_rounding(linear, True)
    assert abs(float(torch_loss(model, training.batch(10_000))) - plain) > 10 * near
    for step in range(steps):
        with_rounding(linear, step >= how.start_step)
        loss = torch_loss(model, training.batch(step))
        optimizer.zero_grad()
        loss.backward()
        expected["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(weights, 1.0)))
        optimizer.step()
        expected["loss"].append(float(loss))
        if steps > 1:
            with torch.no_grad():
                expected["eval_loss"].append(float(torch_loss(model, training.batch(10_000))))
    for key, values in expected.items():
        own = [line[key] for line in found if key in line][: len(values)]
        difference = np.abs(np.array(own) - values).max()
        print(f"\n{name}: {key} differs by {difference:.1e} of {max(values):.1f}")
        assert difference <= near


def with_rounding(model: Any, on: bool) -> None:
    for module in model.modules():
        if hasattr(module, "rounds"):
            module.rounds = on
