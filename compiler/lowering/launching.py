"""Choose the launchers that fit a recipe, and describe the machines of its accelerator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipec.compiler.lowering.hardware import Accelerator, from_name, generations
from recipec.compiler.wording import plural
from recipec.spec.language.launch import KINDS

if TYPE_CHECKING:
    from recipec.spec.language import Recipe


@dataclass(frozen=True)
class Obstacle:
    """The reason why a launcher cannot run a recipe.

    Attributes:
        reason: a sentence without its full stop.
        cure: what to change.
    """

    reason: str
    cure: str


@dataclass(frozen=True)
class Machines:
    """The machines of a recipe's accelerator.

    Attributes:
        slices, hosts_per_slice, chips_per_host: counts.
        gke_machine: the machine type of a host on GKE, None where GKE has none of that size.
    """

    slices: int
    hosts_per_slice: int
    chips_per_host: int
    gke_machine: str | None


def machines(accelerator: Accelerator) -> Machines:
    """Return the machines of a TPU accelerator."""
    hosts = accelerator.hosts // accelerator.slices
    chips = accelerator.chips // accelerator.hosts
    types = generations()[accelerator.generation]["gke"]["machines"]
    return Machines(accelerator.slices, hosts, chips, types.get(str(chips)))


def launchers(recipe: Recipe, accelerator: Accelerator) -> list[str]:
    """Return the kinds of launchers to emit, in the order of `KINDS`."""
    wanted = [kind for kind in KINDS if kind in recipe.launch.kind]
    return [kind for kind in wanted if obstacle(kind, recipe, accelerator) is None]


def obstacle(kind: str, recipe: Recipe, accelerator: Accelerator) -> Obstacle | None:
    """Return what keeps a launcher from running the recipe; None if nothing does."""
    if accelerator.platform != "tpu":
        return Obstacle(f"{accelerator.name} is this machine's own CPU", "leave launch.kind out")
    on_vms = kind in ("tpu-vm", "skypilot")
    hindrance = _vm_obstacle(accelerator) if on_vms else _gke_obstacle(kind, accelerator)
    if hindrance is None and kind != "tpu-vm" and bucket_of(recipe.checkpoint.directory) is None:
        hindrance = Obstacle(
            f"{TITLES[kind]} starts a run again on other machines, which do not have the folder "
            f"`{recipe.checkpoint.directory}` of its checkpoints",
            "checkpoint: {directory: gs://bucket/run}",
        )
    if (
        hindrance is None
        and kind == "skypilot"
        and accelerator.slices > 1
        and accelerator.hosts > accelerator.slices
    ):
        hindrance = Obstacle(
            "SkyPilot numbers the hosts of several slices in an order that is not the slices' own",
            "kind: [tpu-vm, gke]",
        )
    return hindrance


TITLES = {
    "tpu-vm": "A Cloud TPU VM",
    "gke": "a JobSet",
    "skypilot": "a managed job",
    "xpk": "a workload of xpk",
}


def _vm_obstacle(accelerator: Accelerator) -> Obstacle | None:
    if accelerator.runtime_version is None:
        title = generations()[accelerator.generation]["title"]
        return Obstacle(f"Cloud TPU has no VMs of {title}", "kind: [gke]")
    hosts_of_name = from_name(accelerator.name).hosts
    if accelerator.hosts != hosts_of_name * accelerator.slices:
        of_slice = " each" if accelerator.slices > 1 else ""
        return Obstacle(
            f"as Cloud TPU VMs {accelerator.name} is {plural(hosts_of_name, 'machine')}{of_slice}, not "
            f"{accelerator.hosts // accelerator.slices}",
            "leave mesh.hosts out, or kind: [gke]",
        )
    return None


def _gke_obstacle(kind: str, accelerator: Accelerator) -> Obstacle | None:
    pool = machines(accelerator)
    title = generations()[accelerator.generation]["title"]
    if pool.gke_machine is None:
        return Obstacle(
            f"GKE has no machine with {pool.chips_per_host} chips of {title}",
            "kind: [tpu-vm]",
        )
    pairs = accelerator.slices * math.ceil(accelerator.chips // accelerator.slices / 4)
    if kind == "xpk" and pool.chips_per_host > 4:
        return Obstacle(
            f"xpk makes {accelerator.name} of machines with 4 chips",
            f"mesh: {{hosts: {pairs}}}, or kind: [tpu-vm, gke]",
        )
    if pool.slices > 1 and pool.hosts_per_slice == 1:
        possible = accelerator.chips // accelerator.slices > 4
        return Obstacle(
            "GKE joins only slices of several machines, and each of these is one machine",
            f"mesh: {{hosts: {pairs}}}" if possible else "kind: [tpu-vm]",
        )
    return None


def bucket_of(address: str) -> str | None:
    """Return the bucket of a gs:// address, as an address; None for other paths."""
    return "/".join(address.split("/")[:3]) if address.startswith("gs://") else None
