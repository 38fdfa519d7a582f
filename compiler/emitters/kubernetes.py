"""Emit serve/k8s.yaml: the server on Google Kubernetes Engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.render import render
from recipec.compiler.serving.container import SHARED_MEMORY_GB, Container

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

DRAIN_SECONDS = 15
"""Seconds between the order to stop and SIGTERM, in which the service stops sending requests to the pod."""

GROUP = 1000
"""The user that fills the disks, and the group that owns them: the user cloudsdk of Google's image.

`gcloud storage rsync` fails with a KeyError for a user that /etc/passwd does not have.
"""

XLA_CACHE_GIB = 10
"""Size of the cache. Compiled programs of all batch sizes take a few GiB at most."""

SPARE_GIB = 10
"""Space for what is downloaded in addition to weights. The smallest Hyperdisk has 4."""

SUFFIX = "-serve"

NAME_LENGTH = 52
"""The longest name of a stateful set. Its pods' label adds 11 characters, and may have 63 at most."""

DEFAULT_DISK = "pd-balanced"
"""The disk type of a GKE cluster's storage class where a claim names no class."""


def emit_kubernetes(program: Program, server: Container) -> dict[str, str]:
    """Return k8s.yaml; {} if GKE has no node of the accelerator's size."""
    recipe, accelerator = program.recipe, program.serve_accelerator
    assert recipe.serve is not None and accelerator is not None
    if accelerator.gke_machine is None:
        return {}
    app = serving_name(server.name)
    autoscaling = recipe.serve.autoscaling
    replicas = autoscaling.min_replicas if autoscaling else 1
    hyperdisk = accelerator.gke_disk != DEFAULT_DISK
    values = {
        "server": server,
        "name": server.name,
        "app": app,
        "accelerator": accelerator,
        "command": _command(server),
        "everywhere": _everywhere(server),
        "storage_class": f"{app}-{accelerator.gke_disk}" if hyperdisk else None,
        "group": GROUP,
        "disks": _disks(program, server),
        "drain_seconds": DRAIN_SECONDS,
        "shared_memory_gib": SHARED_MEMORY_GB,
        "autoscaling": autoscaling,
        "budget": "maxUnavailable" if replicas > 1 else "minAvailable",
    }
    return {"serve/k8s.yaml": render("serve/k8s.yaml", **values)}


def serving_name(name: str) -> str:
    """Return the name of the objects, the node pool and the VM that serve a recipe of this name.

    It differs from the name of the objects that train the recipe, because both may be in one cluster.
    """
    return name[: NAME_LENGTH - len(SUFFIX)].rstrip("-") + SUFFIX


def _command(server: Container) -> list[str]:
    """Return the pod's command: the image's words, with an address that probes and the service can reach."""
    words = list(server.entrypoint)
    if not _everywhere(server):
        words[words.index("--host") + 1] = "0.0.0.0"
    return words


def _everywhere(server: Container) -> bool:
    return server.host in ("0.0.0.0", "::")


def _disks(program: Program, server: Container) -> list[dict[str, Any]]:
    """Return the disks of a replica: mount path, size, and whether the user has to fill them."""
    weights = program.base_parameters * (4 if program.recipe.merge.dtype == "float32" else 2)
    # An adapter that starts from the weights is exported with twice the rank.
    adapter = program.trainable_parameters * (8 if program.lora is not None and program.lora.principal else 4)
    gib = _with_room(weights)
    sizes = {"model": gib, "hub-cache": gib, "adapter": _with_room(adapter), "xla-cache": XLA_CACHE_GIB}
    disks = []
    for volume in server.volumes:
        name = volume.source if volume.kind == "volume" else volume.target.strip("/")
        disks.append(
            {
                "name": name,
                "target": volume.target,
                "read_only": volume.read_only,
                "gib": sizes[name],
                "by_hand": volume.kind == "bind",
            }
        )
    return disks


def _with_room(size: int) -> int:
    """Return the GiB of a disk for files of `size` bytes, with room for the file system and other files."""
    return math.ceil(size * 1.1 / 2**30) + SPARE_GIB
