"""Find the chips that an accelerator's name or topology stands for.

The number in a name counts TensorCores for v4, v5p and tpu7x, and chips for v5e and v6e: v5p-8 is four
chips. Everything that is known about a generation is in its entry of data/hardware.json, each price with its
date:

- aliases: other spellings in the names that the Cloud console and tools show; gcloud: gcloud's spelling.
- compiler: libtpu's settings to compile for it. Its chip_config: set where libtpu's default differs from
  how Cloud TPU exposes a chip (v4's two TensorCores are one device). cycles_ghz: the clock behind libtpu's
  estimated cycles: the published peak divided by the work of the matrix units in one cycle.
- attention_block, windowed_attention_block: the block size of splash attention's kernel, without and with
  windows in the model. Without windows, blocks of 1024 have one kernel for the backward pass. By the formula
  fitted to published timings (compiler/plan/kernels.py), both passes then take 27 to 32 % less time on v5e
  than with blocks of 512 and two kernels, at lengths of 2048 and 4096. With windows there are two kernels,
  and larger blocks compute more scores that the window drops: on v6e and TPU7x they still take 10 to 24 %
  less time, on the others more.
- ici_gb_per_s: all links of a chip, in both directions. dcn_gbit_per_s: from a chip to other slices.
- vllm: support by tpu-inference's compatibility table: "advised" in helps, "tested", "experimental", or "no
  kernel" where its ragged paged attention raises NotImplementedError. name and kernel_version:
  tpu-inference's name of the chip, and the number that identifies the chip to its kernels.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.wording import plural

if TYPE_CHECKING:
    from recipec.spec.language import Mesh

DATA = Path(__file__).parents[1] / "data" / "hardware.json"


OF_A_GENERATION = (
    *("hbm_gib", "bf16_tflops", "eight_bits", "eight_bit_tflops", "usd_per_chip_hour", "price_date"),
    *("runtime_version", "name_counts", "tensorcores_per_chip", "fp8_kv_cache", "fp8_matmul"),
    *("hbm_gb_per_s", "ici_gb_per_s"),
    *("attention_block", "windowed_attention_block"),
)
"""What an accelerator has as its generation's entry of data/hardware.json says it."""


class UnknownAccelerator(ValueError):
    """A name or topology that the catalog does not have.

    Attributes:
        help: what to write instead.
    """

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


@dataclass(frozen=True)
class Accelerator:
    """One or more slices of a TPU generation, or virtual CPU devices.

    Attributes:
        name: as in the recipe, aliases resolved: "v5p-8", "cpu-8".
        generation: "v5p", "cpu".
        chips: physical chips of all slices; for a CPU the number of virtual devices.
        devices: the number of JAX devices: one per chip, two on tpu7x.
        hosts: machines of all slices: as Cloud TPU VMs, or as the recipe's mesh.hosts says.
        platform: "tpu" or "cpu".
        hbm_gib: memory of a chip that a program can use, in GiB, None for a CPU.
        bf16_tflops: peak of a chip in bfloat16, TFLOP/s, None for a CPU.
        eight_bits, eight_bit_tflops: the 8-bit type, "int8" or "fp8", whose products are faster than those in
            bfloat16, and their peak; None where no 8-bit type is faster, and for a CPU.
        topology: "2x2x1", None for a CPU.
        usd_per_chip_hour: on-demand list price, None where none is published.
        price_date: when that price was read.
        runtime_version: the image of the Cloud TPU VM, None when there is no such VM.
        name_counts: what the number in the name counts: "tensorcores", "chips" or "devices".
        tensorcores_per_chip: 0 for a CPU.
        fp8_kv_cache, fp8_matmul: whether vLLM can serve with these on this generation.
        hbm_gb_per_s, ici_gb_per_s: bandwidth of a chip's memory, and of its links in both directions, in
            10^9 bytes/s; None for a CPU.
        slices: the number of slices, joined over the data center's network (DCN).
        gke_accelerator: the generation in GKE's node label: "tpu-v6e-slice"; None for a CPU.
        gke_machine: the machine type of a node that has the whole slice, None where no single node has.
        gke_disk: the type of disk that its machines attach: "hyperdisk-balanced"; None for a CPU.
        attention_block, windowed_attention_block: tokens of splash attention's largest block, where the
            recipe sets none, for models whose layers all see every earlier token and for models with windows;
            None for a CPU.
    """

    name: str
    generation: str
    chips: int
    devices: int
    hosts: int
    platform: str
    hbm_gib: float | None = None
    bf16_tflops: float | None = None
    eight_bits: str | None = None
    eight_bit_tflops: float | None = None
    topology: str | None = None
    usd_per_chip_hour: float | None = None
    price_date: str | None = None
    runtime_version: str | None = None
    name_counts: str = "devices"
    tensorcores_per_chip: int = 0
    fp8_kv_cache: bool = False
    fp8_matmul: bool = False
    hbm_gb_per_s: float | None = None
    ici_gb_per_s: float | None = None
    slices: int = 1
    gke_accelerator: str | None = None
    gke_machine: str | None = None
    gke_disk: str | None = None
    attention_block: int | None = None
    windowed_attention_block: int | None = None

    @property
    def devices_per_chip(self) -> int:
        return self.devices // self.chips

    @property
    def hbm_bytes_per_device(self) -> float:
        """0 for a CPU."""
        return (self.hbm_gib or 0) * 2**30 / self.devices_per_chip

    @property
    def peak_flops_per_device(self) -> float:
        """FLOP/s in bfloat16; 0 for a CPU."""
        return (self.bf16_tflops or 0) * 1e12 / self.devices_per_chip

    @property
    def bandwidth_per_device(self) -> float:
        """Bytes/s of the device's memory; 0 for a CPU."""
        return (self.hbm_gb_per_s or 0) * 1e9 / self.devices_per_chip

    @property
    def usd_per_hour(self) -> float | None:
        """List price of all chips together in US$, None where none is published."""
        return None if self.usd_per_chip_hour is None else self.usd_per_chip_hour * self.chips

    def describe(self) -> str:
        """Return one phrase: "v5p-8: 4 chips (its 8 counts TensorCores), topology 2x2x1, 95 GiB each"."""
        if self.platform == "cpu":
            return f"{self.name}: {plural(self.devices, 'virtual CPU device')}"
        counted = " (the number in its name counts TensorCores)" if self.name_counts == "tensorcores" else ""
        devices = f", {self.devices} JAX devices" if self.devices != self.chips else ""
        shape = f"{self.slices} slices of topology" if self.slices > 1 else "topology"
        return (
            f"{self.name}: {plural(self.chips, 'chip')}{counted}{devices}, {shape} {self.topology}, "
            f"{self.hbm_gib:g} GiB each"
        )


@functools.cache
def generations() -> Mapping[str, Mapping[str, Any]]:
    """Return the generations of data/hardware.json by name."""
    data: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def known_generation(name: str) -> str:
    """Return a generation's name for its name or another spelling; an unknown name is returned unchanged."""
    return next((known for known, data in generations().items() if name in data["aliases"]), name)


def supported_by_vllm(*support: str) -> list[str]:
    """Return the generations with one of these levels of support by tpu-inference (see the module
    docstring)."""
    return [name for name, data in generations().items() if data["vllm"]["support"] in support]


def accelerator(mesh: Mesh) -> Accelerator:
    """Return the hardware that a recipe's `mesh` section asks for.

    Raises:
        UnknownAccelerator: the catalog does not have it.
    """
    hardware = from_topology(mesh.topology) if mesh.topology else from_name(mesh.accelerator or "")
    if hardware.platform == "cpu":
        return replace(hardware, hosts=mesh.hosts or 1)
    count = mesh.axes.get("dcn", 1)
    hosts = mesh.hosts or hardware.hosts * count
    return replace(
        hardware,
        chips=hardware.chips * count,
        devices=hardware.devices * count,
        hosts=hosts,
        slices=count,
        gke_machine=hardware.gke_machine if hosts == 1 else None,
    )


def arranged(slices: int, fsdp: int, tp: int, cp: int = 1) -> dict[str, int]:
    """Return the mesh axes as a recipe gives them: fsdp, cp and tp of each slice, and dcn if there are
    several."""
    several = {"dcn": slices} if slices > 1 else {}
    return {**several, "fsdp": fsdp, **({"cp": cp} if cp > 1 else {}), "tp": tp}


def host_counts(mesh: Mesh) -> list[int]:
    """Return the possible numbers of hosts of a recipe's accelerator.

    A TPU slice consists of Cloud TPU VMs, or on GKE of machines with 4 chips. Virtual CPU devices can be
    shared evenly by several processes.

    Raises:
        UnknownAccelerator: the catalog does not have it.
    """
    hardware = from_topology(mesh.topology) if mesh.topology else from_name(mesh.accelerator or "")
    if hardware.platform == "cpu":
        return [count for count in range(1, hardware.devices + 1) if hardware.devices % count == 0]
    count = mesh.axes.get("dcn", 1)
    quarters = hardware.chips // 4 if hardware.chips % 4 == 0 else hardware.hosts
    return sorted({hardware.hosts * count, max(hardware.hosts, quarters) * count})


def from_text(text: str) -> Accelerator:
    """Return an accelerator by its name, "v6e-8", or by its topology, "v6e:2x4".

    Raises:
        UnknownAccelerator: there is no such accelerator.
    """
    return from_topology(text) if ":" in text else from_name(text)


def from_name(name: str) -> Accelerator:
    """Return the hardware of a name such as "v5p-8", "v5litepod-8", "v6e-8", "tpu7x-8" or "cpu-8".

    Raises:
        UnknownAccelerator: the catalog does not have it.
    """
    match = re.fullmatch(r"([a-z][a-z0-9-]*)-([1-9][0-9]{0,5})", name.strip().lower())
    generation = known_generation(match[1]) if match else ""
    if match and generation == "cpu" and len(match[2]) > 3:
        raise UnknownAccelerator(f"`{name}` is too many virtual devices", "cpu-1 to cpu-999; cpu-8 is usual")
    if match and generation == "cpu":
        devices = int(match[2])
        return Accelerator(f"cpu-{devices}", "cpu", devices, devices, hosts=1, platform="cpu")
    if match is None or generation not in generations():
        close = get_close_matches(name.lower(), known_names(), n=1, cutoff=0.5)
        hint = f"did you mean `{close[0]}`? " if close else ""
        known = ", ".join(
            f"{known}-N" if data["gcloud"] == known else f"{known}-N ({data['gcloud']}-N)"
            for known, data in generations().items()
        )
        raise UnknownAccelerator(f"unknown accelerator `{name}`", f"{hint}known are {known} and cpu-N")
    data, number = generations()[generation], int(match[2])
    cores = _counted_per_chip(data)
    sizes = {_chips(shape) * cores: shape for shape in data["topologies"]}
    if number not in sizes:
        offered = ", ".join(f"{generation}-{size}" for size in sizes)
        raise UnknownAccelerator(f"there is no {data['title']} slice `{name}`", f"the slices are {offered}")
    return _tpu(generation, sizes[number])


def from_topology(topology: str) -> Accelerator:
    """Return the hardware of an explicit topology such as "v5p:2x2x1" or "v6e:2x4".

    Raises:
        UnknownAccelerator: the catalog does not have it.
    """
    generation, _, shape = topology.strip().lower().partition(":")
    generation = known_generation(generation)
    if generation not in generations():
        raise UnknownAccelerator(
            f"unknown TPU generation in topology `{topology}`",
            "write GENERATION:SHAPE, for example v5p:2x2x1 or v6e:2x4; generations are "
            + ", ".join(generations()),
        )
    shapes = generations()[generation]["topologies"]
    if shape not in shapes:
        raise UnknownAccelerator(
            f"{generations()[generation]['title']} has no topology `{shape}`",
            f"its topologies are {', '.join(shapes)}",
        )
    return _tpu(generation, shape)


def known_names() -> list[str]:
    """Return every accelerator name of the catalog, and the usual CPU names."""
    names = [f"cpu-{count}" for count in (1, 2, 4, 8)]
    for generation, data in generations().items():
        cores = _counted_per_chip(data)
        names += [f"{generation}-{_chips(shape) * cores}" for shape in data["topologies"]]
    return names


def _tpu(generation: str, shape: str) -> Accelerator:
    data = generations()[generation]
    chips = _chips(shape)
    cores = _counted_per_chip(data)
    return Accelerator(
        name=f"{generation}-{chips * cores}",
        generation=generation,
        chips=chips,
        devices=chips * data["devices_per_chip"],
        hosts=1 if chips in data["single_host_chips"] else math.ceil(chips / data["chips_per_host"]),
        platform="tpu",
        topology=shape,
        gke_accelerator=data["gke"]["accelerator"],
        gke_machine=data["gke"]["machines"].get(str(chips)),
        gke_disk=data["gke"]["disk"],
        **{name: data[name] for name in OF_A_GENERATION},
    )


def _counted_per_chip(data: Mapping[str, Any]) -> int:
    """Return how much one chip adds to the number in a name."""
    return int(data["tensorcores_per_chip"]) if data["name_counts"] == "tensorcores" else 1


def _chips(shape: str) -> int:
    return math.prod(int(size) for size in shape.split("x"))
