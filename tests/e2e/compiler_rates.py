"""FLOP/s of one large product and bytes/s of one large sum, by the compiler's cost analysis.

python tests/e2e/compiler_rates.py ACCELERATOR    one line of JSON
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.plan import topology


def main(name: str) -> None:
    mesh = Mesh(np.array(topology.devices(from_name(name))[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    matrix = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=whole)
    vector = jax.ShapeDtypeStruct((2**28,), jnp.float32, sharding=whole)
    product = jax.jit(jnp.matmul).lower(matrix, matrix).compile().cost_analysis()
    addition = jax.jit(jnp.add).lower(vector, vector).compile().cost_analysis()
    rates = [
        product["flops"] / product["optimal_seconds"],
        addition["bytes accessed"] / addition["optimal_seconds"],
    ]
    print(json.dumps({"rates": rates}))


if __name__ == "__main__":
    main(sys.argv[1])
