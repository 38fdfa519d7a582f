"""serve/k8s.yaml: the server on Google Kubernetes Engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.render import render
from recipec.compiler.serving.container import SHARED_MEMORY_GB, Container

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

DRAIN_SECONDS = 15
"""From the order to stop to SIGTERM: meanwhile the service forgets the pod, and no request is sent to it."""

GROUP = 1000
"""Who fills the disks, and the group that they belong to: the user cloudsdk of Google's image.

`gcloud storage rsync` ends with a KeyError as a user that /etc/passwd does not have.
"""

XLA_CACHE_GIB = 10
"""Compiled programs of every batch size take a few GiB at most."""

ADAPTER_GIB = 10
"""More than any adapter; the smallest Hyperdisk has 4."""

SUFFIX = "-serve"

NAME_LENGTH = 52
"""The longest name of a stateful set: its pods carry it with 11 characters more, in a label of 63 at most."""

DEFAULT_DISK = "pd-balanced"
"""What the storage class of a GKE cluster makes where a claim names none."""


def emit_kubernetes(program: Program, server: Container) -> dict[str, str]:
    """k8s.yaml; none for what GKE has no node of."""
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
    """What the objects, the node pool and the VM are called that serve a recipe of this name.

    Its own name is that of what trains it: both are applied to one cluster.
    """
    return name[: NAME_LENGTH - len(SUFFIX)].rstrip("-") + SUFFIX


def _command(server: Container) -> list[str]:
    """What the pod runs: the image's words, listening where probes and the service reach it."""
    words = list(server.entrypoint)
    if not _everywhere(server):
        words[words.index("--host") + 1] = "0.0.0.0"
    return words


def _everywhere(server: Container) -> bool:
    return server.host in ("0.0.0.0", "::")


def _disks(program: Program, server: Container) -> list[dict[str, Any]]:
    """The disks of a replica: where they are mounted, how large they are, and whether a hand fills them."""
    weights = program.base_parameters * (4 if program.recipe.merge.dtype == "float32" else 2)
    # With room for the file system, and for what is downloaded beside the weights.
    gib = math.ceil(weights * 1.1 / 2**30) + 10
    sizes = {"model": gib, "hub-cache": gib, "adapter": ADAPTER_GIB, "xla-cache": XLA_CACHE_GIB}
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
