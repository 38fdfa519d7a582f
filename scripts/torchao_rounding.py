"""Write what torchao's quantization-aware training computes of some numbers, for tests/runtime.

    python -m scripts.torchao_rounding > tests/runtime/torchao_rounding.json

The environment needs torchao, which the project does not use. The file holds, by kind of rounding and type:
activations, a weight, the gradient of their product, and what torchao 0.18 makes of them.
"""

from __future__ import annotations

import json
from typing import Any

TOKENS, OUTPUTS = 4, 3
SIZES = {"int4": (12, 6), "int4_asymmetric": (12, 6), "mxfp4": (64, 32)}
"""Inputs, and those of a group."""


def main() -> None:
    import torch

    out = {}
    for kind in SIZES:
        for dtype in ("float32", "bfloat16"):
            rounded = case(kind, getattr(torch, dtype))
            out[f"{kind}-{dtype}"] = {
                name: value.detach().float().tolist() for name, value in rounded.items()
            }
    print(json.dumps(out))


def case(kind: str, dtype: Any) -> dict[str, Any]:
    """Compute one product, with groups and tokens at the edges of what is rounded."""
    import torch
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.prototype.qat.mx import MXFakeQuantizedLinear
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig
    from torchao.quantization.qat.linear import _get_8da4w_activation_config, _get_8da4w_weight_config

    torch.manual_seed(0)
    inputs, group = SIZES[kind]
    x, weight = torch.randn(TOKENS, inputs) * 3 + 0.7, torch.randn(OUTPUTS, inputs) * 0.05
    x[0], x[1], x[2] = 0.0, x[1].abs(), -x[2].abs()
    weight[0, :group], weight[1, :group] = 0.0, 0.25
    weight[2, 1] = -weight[2, :group].abs().max()
    weight[2, 2] = -weight[2, 1]  # both ends of the range
    if kind == "mxfp4":
        configs = (MXFakeQuantizeConfig(block_size=group),) * 2
    elif kind == "int4":  # as Int8DynActInt4WeightQATQuantizer
        configs = _get_8da4w_activation_config(torch.float32), _get_8da4w_weight_config(group, torch.float32)
    else:  # as Axolotl
        configs = (
            IntxFakeQuantizeConfig(dtype=torch.int8, granularity="per_token", is_symmetric=False),
            Int4WeightFakeQuantizeConfig(group_size=group, activation_dtype=torch.bfloat16),
        )
    linear = MXFakeQuantizedLinear if kind == "mxfp4" else FakeQuantizedLinear
    linear = linear(inputs, OUTPUTS, False, *configs, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    tensor = x.to(dtype).requires_grad_()
    upstream = torch.randn(TOKENS, OUTPUTS).to(dtype)
    product = linear(tensor)
    product.backward(upstream)
    return {
        "x": tensor,
        "weight": linear.weight,
        "upstream": upstream,
        "rounded_x": rounded(tensor, configs[0]),
        "rounded_weight": rounded(linear.weight, configs[1]),
        "product": product,
        "x_gradient": tensor.grad,
        "weight_gradient": linear.weight.grad,
    }


def rounded(x: Any, config: Any) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.qat import MXFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase

    if not isinstance(config, MXFakeQuantizeConfig):
        return FakeQuantizerBase.from_config(config)(x)
    how = config.dtype, config.block_size, config.scaling_mode, config.kernel_preference
    return MXTensor.to_mx(x.detach(), *how).dequantize(x.dtype)


if __name__ == "__main__":
    main()
