"""Print libtpu's cycles for one large bfloat16 product, as one line of JSON.

python tests/e2e/compiler_cycles.py ACCELERATOR
"""

from __future__ import annotations

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.plan import abstract
from recipec.compiler.plan.hlo.read_schedule import CYCLES

SIZE = 8192


def main(name: str) -> None:
    mesh = Mesh(np.array(abstract.devices(from_name(name))[:1]), ("one",))
    matrix = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    text = jax.jit(jnp.matmul).lower(matrix, matrix).compile().as_text()
    cycles = sum(int(found[1]) for found in re.finditer(CYCLES, text))
    print(json.dumps({"cycles": cycles, "flops": 2 * SIZE**3}))


if __name__ == "__main__":
    main(sys.argv[1])
