"""Tests of Gemma 4's experts and of Gemma 2's norms."""

from __future__ import annotations

import re
from types import SimpleNamespace
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

from recipec.runtime.model.gemma4_experts import mixture
from recipec.runtime.model.norms import offset_rms_norm
from recipec.runtime.model.sharding import start_mesh
from recipec.runtime.settings import MeshSettings

pytestmark = pytest.mark.usefixtures("highest")

MESH = {"fsdp": 4, "tp": 2}
SLICED = {"dcn": 2, "fsdp": 2, "tp": 2}


def expert_weights(experts: int, hidden: int, features: int) -> tuple[Any, dict[str, Any]]:
    """Return transformers' router and experts with random weights, and these weights in Tunix's layout."""
    config = transformers.Gemma4TextConfig(
        hidden_size=hidden, num_experts=experts, top_k_experts=2, moe_intermediate_size=features
    )
    config._experts_implementation = "eager"
    block = torch.nn.ModuleList(
        [modeling_gemma4.Gemma4TextRouter(config), modeling_gemma4.Gemma4TextExperts(config)]
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.3)
    router, mixture = (dict(one.named_parameters()) for one in block)
    gate_up = mixture["gate_up_proj"].reshape(experts, 2, features, hidden)
    arrays = {
        "router_logits": router["proj.weight"].T,
        "router_scale": router["scale"],
        "per_expert_scale": router["per_expert_scale"],
        "gating_einsum": gate_up,
        "linear": mixture["down_proj"].swapaxes(1, 2),
    }
    return block, {name: value.detach().numpy() for name, value in arrays.items()}


def test_gemma4_experts_match_transformers_outputs_and_gradients() -> None:
    """Compare gradients too.

    The router reads another tensor than the experts do, and full fine-tuning needs the weights' gradients.
    """
    experts, hidden, features = 6, 16, 8
    block, arrays = expert_weights(experts, hidden, features)
    x, residual, upstream = np.random.default_rng(0).standard_normal((3, 8, 5, hidden)).astype(np.float32)

    def out(x: Any, residual: Any, arrays: dict[str, Any]) -> Any:
        variables = {name: nnx.Param(value) for name, value in arrays.items()}
        sizes = {"features": hidden, "hidden_dim": features, "num_experts_per_datapoint": 2}
        moe = SimpleNamespace(config=SimpleNamespace(dtype=jnp.float32), **sizes, **variables)
        return jnp.sum(mixture(moe, x, residual) * upstream), mixture(moe, x, residual)

    both = jax.jit(jax.grad(out, argnums=(0, 1, 2), has_aux=True))
    with start_mesh(MeshSettings("cpu", 8, SLICED)):
        (to_x, to_residual, to_arrays), found = both(x, residual, arrays)

    inputs, read = (torch.tensor(value.reshape(-1, hidden), requires_grad=True) for value in (x, residual))
    _, weights, choices = block[0](read)
    expected = block[1](inputs, choices, weights)
    (expected * torch.tensor(upstream.reshape(-1, hidden))).sum().backward()
    pairs = [
        (found, expected.detach()),
        (to_x, inputs.grad),
        (to_residual, read.grad),
        (to_arrays["router_logits"].T, block[0].proj.weight.grad),
        (to_arrays["per_expert_scale"], block[0].per_expert_scale.grad),
        (to_arrays["gating_einsum"], block[1].gate_up_proj.grad),
        (to_arrays["linear"].swapaxes(1, 2), block[1].down_proj.grad),
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
    _, arrays = expert_weights(6, 16, 8)
    variables = {name: nnx.Param(jnp.asarray(value)) for name, value in arrays.items()}
    sizes = {"features": 16, "hidden_dim": 8, "num_experts_per_datapoint": 2}
    moe = SimpleNamespace(config=SimpleNamespace(dtype=jnp.float32), **sizes, **variables)
    x = jnp.ones((8, 5, 16))
    with start_mesh(MeshSettings("cpu", 8, MESH)):
        text = str(jax.make_jaxpr(lambda x: mixture(moe, x, x))(x))
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
    ours = SimpleNamespace(scale=SimpleNamespace(value=jnp.asarray(scale, jnp.bfloat16)))
    found = offset_rms_norm(ours, jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found, np.float32) - expected).max() <= 2**-7, "one rounding of a value up to 2"
    assert (np.asarray(found, np.float32) == expected).mean() > 0.98
