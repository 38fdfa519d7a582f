"""Tests of the libtpu flags that the project knows, against libtpu itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipec.compiler.lowering.libtpu import DATA, profiles
from recipec.compiler.plan.pool import environment

pytestmark = pytest.mark.e2e

TOPOLOGIES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x1", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
GATHERED = """
import sys
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
sharding = NamedSharding(Mesh(np.array(devices), ("fsdp",)), PartitionSpec("fsdp"))
weight = jax.ShapeDtypeStruct((1024, 1024), "bfloat16", sharding=sharding)
print(len(jax.jit(lambda x, w: x @ w).lower(weight, weight).compile().as_text()))
"""

EXPERTS = """
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
rows, weight, sizes = array(4096, 28672), array(8, 28672, 4096), array(8, dtype="int32")
jax.jit(jax.lax.ragged_dot).lower(rows, weight, sizes).compile()
"""
"""The product of Mixtral 8x7B's experts with the largest tiles."""
VMEM = "xla_tpu_scoped_vmem_limit_kib"


def test_flag_list_matches_the_installed_libtpu(root: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.libtpu_flags", "--check"], cwd=root, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_libtpu_accepts_each_generation_profile(generation: str) -> None:
    flags = " ".join(f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
                     for name, value in profiles()[generation].items())  # fmt: skip
    command = [sys.executable, "-c", GATHERED, TOPOLOGIES[generation]]

    def compile(flags: str) -> subprocess.CompletedProcess[str]:
        made = {**environment(), "LIBTPU_INIT_ARGS": flags}
        return subprocess.run(command, env=made, capture_output=True, text=True)

    assert compile(flags).returncode == 0
    refused = compile(f"{flags} --xla_tpu_no_such_flag=true")
    assert refused.returncode != 0 and "xla_tpu_no_such_flag" in refused.stdout + refused.stderr


def test_expert_profile_leaves_enough_vmem_for_ragged_dot() -> None:
    def compile(kib: int) -> subprocess.CompletedProcess[str]:
        made = {**environment(), "LIBTPU_INIT_ARGS": f"--{VMEM}={kib}"}
        return subprocess.run([sys.executable, "-c", EXPERTS], env=made, capture_output=True, text=True)

    refused = compile(profiles()["v6e"][VMEM])
    assert refused.returncode != 0 and "CompileTimeScopedVmemOom" in refused.stderr
    assert compile(json.loads(DATA.read_text())["experts"]["v6e"][VMEM]).returncode == 0
