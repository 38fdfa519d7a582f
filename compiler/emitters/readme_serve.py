"""The Serve section of an artifact's README.md."""

from __future__ import annotations

from pathlib import PurePosixPath
from textwrap import fill
from typing import TYPE_CHECKING, Any

from compiler.emitters.kubernetes import serving_name
from compiler.render import code_span, shell_word
from compiler.serving.container import SHUTDOWN_MARGIN_SECONDS, Container, container, own_address

if TYPE_CHECKING:
    from compiler.program import Program
    from compiler.serving.weights import Weights

POOL_NAME = 40
"""The longest name of a node pool."""

ANY_FOLDER = "WEIGHTS_DIR"
"""In commands, a folder that the recipe does not know."""


def serve_section(program: Program, merged: str, elsewhere: bool) -> dict[str, Any]:
    """The values of parts/serve.md; none without a `serve` section.

    Args:
        merged: where the commands before leave the merged weights.
        elsewhere: whether another machine serves than trains.
    """
    recipe = program.recipe
    serve, accelerator = recipe.serve, program.serve_accelerator
    if serve is None or accelerator is None:
        return {"server": None, "kept": merged, "kubernetes": False}
    server, app = container(recipe, program.family.name), serving_name(program.name)
    # What merging wrote and the server reads, None where that is on no disk of the machine.
    kept = f"{merged}-adapter" if server.adapter else merged
    written = server.adapter or (server.model if serve.model is None else None)
    taken = kept if written is not None and written.kind == "folder" else None
    there = f"/dev/shm/{PurePosixPath(kept).name}" if elsewhere else kept
    return {
        "server": server,
        "kept": kept,
        "taken": taken,
        "taken_from": kept
        if "://" in kept
        else f"gs://BUCKET/models/{recipe.name}/{PurePosixPath(kept).name}",
        "serve_weights": _weights(server, written is server.model),
        "exports": _exports(server, there if taken else None),
        "finish_seconds": server.stop_grace_seconds - SHUTDOWN_MARGIN_SECONDS,
        "url": f"http://{own_address(server.host)}:{server.port}",
        "evaluates": bool(recipe.evaluate.prompts or recipe.evaluate.tasks),
        "tasks": bool(recipe.evaluate.tasks),
        "kubernetes": accelerator.gke_machine is not None,
        "app": app,
        "pool": app[:POOL_NAME].rstrip("-"),
        "zone": shell_word(recipe.launch.zone or "ZONE"),
        "buckets": _buckets(server),
        "by_hand": _by_hand(server, kept if taken else None),
    }


def _weights(server: Container, merges: bool) -> str:
    """A paragraph: where the server finds what it loads; "" where the commands show it."""
    model, adapter = server.model, server.adapter
    sentences = []
    if adapter is not None:
        sentences.append(f"It serves the adapter as `{server.name}` beside its base, `{server.name}-base`.")
    if model.kind == "hub":
        sentences.append(
            f"vLLM downloads {code_span(model.address)} from the Hugging Face hub; where its licence has to "
            "be accepted, do that on its page and set `HF_TOKEN`."
        )
    elif model.kind == "folder" and not merges:
        place = f"are in {code_span(model.address)}; `MODEL_DIR` names another folder"
        folder = place if model.address else ""
        sentences.append(f"Its weights {folder or 'are where `MODEL_DIR` says'}.")
    for weights in _copied(server):
        sentences.append(
            f"What is in {code_span(weights.address)} is copied before the server starts, by the account "
            "that the machine runs as; what is there already is not copied again."
        )
    return fill(" ".join(sentences), width=118, break_long_words=False, break_on_hyphens=False)


def _exports(server: Container, taken: str | None) -> list[str]:
    """The folders that docker compose and serve.sh are told of.

    Args:
        taken: where the machine has what merging wrote, None where it needs none.
    """
    lines = []
    written = "MODEL_DIR" if server.adapter is None else "ADAPTER_DIR"
    if server.adapter is not None and server.model.kind == "folder" and not server.model.address:
        lines.append(f"export MODEL_DIR={ANY_FOLDER}")
    if taken is not None:
        # docker compose reads a relative folder from its own file.
        lines.append(f"export {written}={'' if taken.startswith('/') else '$PWD/'}{shell_word(taken)}")
    return lines


def _by_hand(server: Container, taken: str | None) -> list[dict[str, str]]:
    """The disks of k8s.yaml that have to be filled, and for a shell from which folder."""
    disks = []
    for volume in server.volumes:
        if volume.kind == "bind":
            name = volume.target.strip("/")
            own = taken if name == ("model" if server.adapter is None else "adapter") else None
            folder = shell_word(own) if own else _beside(server.name, volume.source)
            disks.append({"name": name, "target": volume.target, "folder": folder})
    return disks


def _beside(artifact: str, folder: str) -> str:
    """A folder of the recipe as seen from beside the artifact, for a shell."""
    if not folder:
        return ANY_FOLDER
    if folder.startswith("~/"):
        return "~/" + shell_word(folder[2:])
    return shell_word(str(PurePosixPath(artifact, folder)))


def _copied(server: Container) -> list[Weights]:
    return [w for w in (server.model, server.adapter) if w is not None and w.kind == "bucket"]


def _buckets(server: Container) -> list[str]:
    """Each bucket that weights are copied from, once."""
    return [*dict.fromkeys("/".join(weights.address.split("/")[:3]) for weights in _copied(server))]
