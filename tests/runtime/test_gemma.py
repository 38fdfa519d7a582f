"""Tests of Gemma 4's experts and of the norms of Gemma 2 and 3."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4 import modeling_gemma4

from recipec.runtime.model.experts import Mixture
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.families.description import Norm
from recipec.runtime.model.layers import Config, Normalization
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.settings import MeshSettings

pytestmark = pytest.mark.usefixtures("highest")

MESH = {"fsdp": 4, "tp": 2}
SLICED = {"dcn": 2, "fsdp": 2, "tp": 2}
CONFIG = {
    "hidden_size": 16,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 8,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
}


def expert_weights() -> tuple[Any, dict[str, Any]]:
    """Return transformers' router and experts with random weights, and these weights in the decoder's
    layout."""
    config = transformers.Gemma4TextConfig(**CONFIG)
    config._experts_implementation = "eager"
    block = torch.nn.ModuleList(
        [modeling_gemma4.Gemma4TextRouter(config), modeling_gemma4.Gemma4TextExperts(config)]
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.3)
    router, experts = (dict(one.named_parameters()) for one in block)
    gate_up = experts["gate_up_proj"].reshape(6, 2, 8, 16)
    arrays = {
        "router.kernel": router["proj.weight"].T,
        "router_scale": router["scale"],
        "per_expert_scale": router["per_expert_scale"],
        "experts.gate_up": gate_up.permute(0, 3, 1, 2),
        "experts.down": experts["down_proj"].swapaxes(1, 2),
    }
    return block, {name: value.detach().numpy() for name, value in arrays.items()}


def mixture(arrays: dict[str, Any]) -> Mixture:
    """Return the decoder's experts with these weights."""
    a = FAMILIES["gemma4"].architecture({"model_type": "gemma4_text", **CONFIG})
    assert a.experts is not None
    out = Mixture(Config(a, jnp.float32), a.experts)
    for name, value in arrays.items():
        *modules, last = name.split(".")
        holder = out
        for module in modules:
            holder = getattr(holder, module)
        setattr(holder, last, nnx.Param(value))
    return out


def test_gemma4_experts_match_transformers_outputs_and_gradients() -> None:
    """Compare gradients too.

    The router reads another tensor than the experts do, and full fine-tuning needs the weights' gradients.
    """
    block, arrays = expert_weights()
    x, residual, upstream = np.random.default_rng(0).standard_normal((3, 8, 5, 16)).astype(np.float32)

    def out(x: Any, residual: Any, arrays: dict[str, Any]) -> Any:
        found = mixture(arrays)(x, residual)
        return jnp.sum(found * upstream), found

    both = jax.jit(jax.grad(out, argnums=(0, 1, 2), has_aux=True))
    with start_mesh(MeshSettings("cpu", 8, SLICED)):
        (to_x, to_residual, to_arrays), found = both(x, residual, arrays)

    inputs, read = (torch.tensor(value.reshape(-1, 16), requires_grad=True) for value in (x, residual))
    _, weights, choices = block[0](read)
    expected = block[1](inputs, choices, weights)
    (expected * torch.tensor(upstream.reshape(-1, 16))).sum().backward()
    pairs = [
        (found, expected.detach()),
        (to_x, inputs.grad),
        (to_residual, read.grad),
        (to_arrays["router.kernel"].T, block[0].proj.weight.grad),
        (to_arrays["per_expert_scale"], block[0].per_expert_scale.grad),
        (to_arrays["experts.gate_up"].transpose(0, 2, 3, 1), block[1].gate_up_proj.grad),
        (to_arrays["experts.down"].swapaxes(1, 2), block[1].down_proj.grad),
    ]
    for ours, theirs in pairs:
        reference = theirs.numpy()
        assert np.abs(reference).max() > 0.1
        assert (
            np.abs(np.asarray(ours).reshape(reference.shape) - reference).max()
            < 1e-5 * np.abs(reference).max()
        )


def test_each_device_computes_experts_only_for_local_rows() -> None:
    """Do not sort rows over the whole batch, as Tunix does: each device would compute all rows."""
    _, arrays = expert_weights()
    moe = mixture({name: jnp.asarray(value) for name, value in arrays.items()})
    x = jnp.ones((8, 5, 16))
    with start_mesh(MeshSettings("cpu", 8, MESH)):
        text = str(jax.make_jaxpr(lambda x: moe(x, x))(x))
    products = re.findall(r"(f32\[[\d,]+\]) = ragged_dot", text)
    # 8 rows of 5 tokens over 4 devices, 2 experts for each token; 8 features of an expert over 2 devices.
    assert products == ["f32[20,8]", "f32[20,16]"]


def test_bfloat16_norms_match_transformers() -> None:
    """Compare bit for bit, because 1 + scale in bfloat16 would lose most of a small scale."""
    random = np.random.default_rng(0)
    x, scale = random.standard_normal((8, 32)), random.standard_normal(32) * 0.01
    norm = Gemma2RMSNorm(32).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(scale))
        expected = norm(torch.tensor(x).bfloat16()).float().numpy()
    ours = Normalization(Norm(1e-6, offset=1.0, wide=True), (32,), jnp.bfloat16)
    ours.w = nnx.Param(jnp.asarray(scale, jnp.bfloat16))
    found = ours(jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float32) - expected).max() <= 2**-7, "one rounding of a value up to 2"
    assert (np.asarray(found, np.float32) == expected).mean() > 0.98
