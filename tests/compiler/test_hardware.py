"""Tests of accelerator names and topologies, against the figures of Google's pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.compiler.lowering import hardware
from recipec.compiler.plan import rates
from recipec.compiler.plan.kernels import KernelSeconds
from recipec.compiler.plan.server_step.compile import job as serve_job
from recipec.compiler.plan.torus import Torus
from recipec.runtime.clients.bench_server import GENERATIONS
from recipec.spec.language.mesh import Mesh
from recipec.spec.load import load
from recipec.spec.validate import default_axes


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hosts", "topology", "hbm"),
    [
        ("v5p-8", 4, 4, 1, "2x2x1", 95),
        ("v5p-16", 8, 8, 2, "2x2x2", 95),
        ("v4-8", 4, 4, 1, "2x2x1", 32),
        ("v5e-8", 8, 8, 1, "2x4", 15.75),
        ("v5litepod-8", 8, 8, 1, "2x4", 15.75),
        ("v5e-16", 16, 16, 4, "4x4", 15.75),
        ("v6e-8", 8, 8, 1, "2x4", 31.25),
        ("tpu7x-8", 4, 8, 1, "2x2x1", 192),
    ],
)
def test_names_of_accelerators_resolve_to_chips_and_topologies(
    name: str, chips: int, devices: int, hosts: int, topology: str, hbm: float
) -> None:
    found = hardware.from_name(name)
    assert (found.chips, found.devices, found.hosts) == (chips, devices, hosts)
    assert (found.topology, found.hbm_gib, found.platform) == (topology, hbm, "tpu")


def test_description_says_if_the_number_counts_tensorcores() -> None:
    assert "4 chips (the number in its name counts TensorCores)" in hardware.from_name("v5p-8").describe()
    assert "TensorCores" not in hardware.from_name("v6e-8").describe()


@pytest.mark.parametrize(
    "name",
    ["v5p", "v5p-0", "v5p-4", "v9-8", "cpu", "cpu-0", "cpu-1000000000", "h100-8", "", "v5p-8 x", "v6e-3"],
)
def test_unknown_accelerator_names_are_refused_with_help(name: str) -> None:
    with pytest.raises(hardware.UnknownAccelerator) as caught:
        hardware.from_name(name)
    assert caught.value.help


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5p:", "TPU v5p has no topology ``"),
        ("v5p:9x9", "TPU v5p has no topology `9x9`"),
        ("x:2x2", "unknown TPU generation in topology `x:2x2`"),
    ],
)
def test_unknown_topologies_are_refused(topology: str, message: str) -> None:
    with pytest.raises(hardware.UnknownAccelerator, match=message) as caught:
        hardware.from_topology(topology)
    assert caught.value.help


def test_every_known_accelerator_name_resolves() -> None:
    assert len(hardware.known_names()) > 50
    for name in hardware.known_names():
        assert hardware.from_name(name).name == name


def mesh(accelerator: str, hosts: int | None = None, **axes: int) -> Mesh:
    return Mesh(accelerator=accelerator, hosts=hosts, axes=axes)


def test_dcn_axis_multiplies_tpu_slices() -> None:
    found = hardware.accelerator(mesh("v5p-16", dcn=4, fsdp=8))
    assert (found.slices, found.chips, found.devices, found.hosts) == (4, 32, 32, 8)
    assert found.usd_per_hour == pytest.approx(4 * (hardware.from_name("v5p-16").usd_per_hour or 0))
    one = hardware.accelerator(mesh("v5p-16", fsdp=8))
    assert one == hardware.from_name("v5p-16") and one.slices == 1


def test_dcn_axis_and_hosts_on_a_cpu_add_no_devices() -> None:
    found = hardware.accelerator(mesh("cpu-8", hosts=2, dcn=2, fsdp=4))
    assert (found.slices, found.devices, found.hosts) == (1, 8, 2)


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        (mesh("v5p-32", fsdp=16), [4]),
        (mesh("v6e-8", fsdp=8), [1, 2]),
        (mesh("v5e-8", dcn=3, fsdp=8), [3, 6]),
        (mesh("v6e-1", fsdp=1), [1]),
        (mesh("cpu-6", fsdp=6), [1, 2, 3, 6]),
    ],
)
def test_host_counts_lists_the_valid_numbers_of_hosts(given: Mesh, counts: list[int]) -> None:
    assert hardware.host_counts(given) == counts


@pytest.fixture
def another_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a generation v9z to the catalog: v6e with other names, cores and devices."""
    data = json.loads(hardware.DATA.read_text(encoding="utf-8"))
    data["v9z"] = {
        **data["v6e"],
        **{"title": "TPU v9z", "aliases": ["v9lite"], "gcloud": "v9litepod"},
        **{"hbm_gib": 288, "single_host_chips": [1, 4], "devices_per_chip": 2},
        "vllm": {"support": "tested", "name": "TPU v9", "kernel_version": 9},
    }
    (tmp_path / "hardware.json").write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setattr(hardware, "DATA", tmp_path / "hardware.json")
    hardware.generations.cache_clear()
    yield
    hardware.generations.cache_clear()


def test_new_tpu_generation_needs_only_a_catalog_entry(another_chip: None, tmp_path: Path) -> None:
    """Use it from names to launchers, a server's checks and both plans. No module names its generation."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        """\
recipe: 1
name: sample
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v9lite-8, axes: {fsdp: 16}}
data: {train: [{path: train.jsonl}]}
train: {global_batch_size: 16}
checkpoint: {directory: gs://bucket/run}
serve: {accelerator: v9z-4, tensor_parallel_size: 8}
launch: {kind: [tpu-vm, gke, xpk], zone: us-east5-a, cluster: tpus, image: example.org/train:1}
""",
        encoding="utf-8",
    )
    lowered = lower(load(recipe))
    program = lowered.program
    assert program is not None, lowered.diagnostics
    assert (program.accelerator.chips, program.accelerator.devices, program.accelerator.hosts) == (8, 16, 2)
    assert not {one.code for one in lowered.diagnostics} & {"N0609", "W0609", "E0603"}
    files = emit(program)
    assert b"--accelerator-type=v9litepod-8" in files["launch/tpu-vm.sh"]
    assert b"--tpu-type=v9litepod-2x4" in files["launch/xpk.sh"]
    chip = rates.published(program.accelerator, KernelSeconds(program.accelerator))
    assert (chip.clock, chip.flops, chip.hbm) == (1.75e9, 459e12, 819e9)
    assert rates.reached("v9z") == rates.reached("v9y") and rates.interval("v9z", lora=False).low > 0
    assert Torus.of(program.accelerator, [(0, 0, 0, 0)]).link == 100e9
    made = serve_job(program, [6])
    assert (made.chip, made.kernel_version, made.topology) == ("TPU v9", 9, "v9z:2x2")
    with pytest.raises(hardware.UnknownAccelerator) as caught:
        hardware.from_name("v9z-3")
    assert "v9z-4" in caught.value.help


def test_benchmark_names_and_default_axes_cover_every_tpu_generation() -> None:
    """Check the names that a benchmark knows without the compiler, and the axes in the language's help."""
    assert set(GENERATIONS.values()) == set(hardware.generations())
    names = [name for name in hardware.known_names() if not name.startswith("cpu-")]
    assert {name: default_axes(name) for name in names} == {
        name: {"fsdp": hardware.from_name(name).devices} for name in names
    }
