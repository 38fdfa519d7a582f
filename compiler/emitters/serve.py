"""Emit serve/: a container image, its compose file and a script for a TPU VM without Docker.

All of them start the same server, which compiler.serving.container describes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.folders import assignment
from recipec.compiler.emitters.kubernetes import emit_kubernetes
from recipec.compiler.emitters.render import render, shell_word, yaml_string
from recipec.compiler.lowering import pins
from recipec.compiler.serving.container import (
    ADAPTER,
    ADAPTER_TEMPLATE,
    Container,
    Volume,
    container,
    own_address,
)
from recipec.compiler.serving.weights import ServedWeights
from recipec.runtime.serving.hosts import is_loopback

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

CONTAINER_PLACES = ("VLLM_XLA_CACHE_PATH", "HF_HOME")
"""Variables for the locations of the container's volumes; serve.sh keeps the defaults."""


def emit_serve(program: Program) -> dict[str, str]:
    """Return the files of serve/ that start a server; {} without a `serve` section."""
    accelerator = program.serve_accelerator
    if program.recipe.serve is None or accelerator is None:
        return {}
    server = container(program.recipe, program.family.name)
    values = {
        "server": server,
        "name": server.name,
        "accelerator": accelerator.name,
    }
    return {
        "serve/Dockerfile": render("serve/Dockerfile", **values),
        "serve/compose.yaml": render("serve/compose.yaml", **values, sources=_sources(server)),
        "serve/serve.sh": render("serve/serve.sh", **values, **_script(server, program)),
        **emit_kubernetes(program, server),
    }


def _sources(server: Container) -> dict[str, str]:
    """Return the sources of the mounts in compose.yaml, by their folder within the container."""
    return {v.target: v.source if v.kind == "volume" else _folder(v) for v in server.volumes}


def _folder(volume: Volume) -> str:
    """Return the folder that the volume's variable names, with the recipe's folder as the default."""
    folder = volume.source
    # A default value ends at the first }, however it is quoted, and has to be one line.
    if not folder or re.search(r"[}\n]", folder):
        return f"${{{volume.variable}:?the folder of {volume.holds}}}"
    start = "" if folder.startswith("/") else "${HOME}" if folder.startswith("~/") else "../"
    rest = folder.removeprefix("~").replace("$", "$$")
    text = f"${{{volume.variable}:-{start}{rest}}}"
    return text if re.fullmatch("[A-Za-z0-9._/-]+", rest) else yaml_string(text)


def _script(server: Container, program: Program) -> dict[str, Any]:
    """Return the parts that only serve.sh has: folders of this machine instead of the container's."""
    assert program.recipe.serve is not None
    folders = []
    if server.model.local:
        merges = program.recipe.serve.weights == "merged" and program.recipe.serve.model is None
        folders.append(_script_folder("model", server.model, server.name, merges))
    if server.adapter is not None:
        folders.append(_script_folder("adapter", server.adapter, server.name, merges=True))
    return {
        "folders": folders,
        "relative": any("$here" in line for folder in folders for line in folder["lines"]),
        "model": '"$model"' if server.model.local else shell_word(server.model.address),
        "flags": [_script_words(words, server.name) for words in server.flags],
        "environment": {
            key: value
            for key, value in server.environment.items()
            if key in program.recipe.serve.env or key not in CONTAINER_PLACES
        },
        "own_address": _asked(server.host),
        "vllm": pins.sets()["serve"]["vllm-tpu"],
    }


def _asked(host: str) -> str | None:
    """Return the address at which a listener on the port can be tested; None if it may be another
    machine's."""
    own = own_address(host).strip("[]")
    return own if is_loopback(own) else None


def _script_folder(part: str, weights: ServedWeights, name: str, merges: bool) -> dict[str, Any]:
    """Return how serve.sh finds the model or the adapter, and what it says if there is none.

    Args:
        merges: whether merge.py writes it.
    """
    variable = f"{part.upper()}_DIR"
    return {
        "part": part,
        "lines": assignment(part, weights, name, argument=part == "model"),
        "address": weights.address if weights.kind == "bucket" else None,
        "file": "config.json" if part == "model" else "adapter_config.json",
        "help": f"run merge.py first, or name the folder in {variable}"
        if merges
        else f"name the folder in {variable}",
        "named": bool(weights.address),
        "holds": "weights" if part == "model" else "an adapter",
    }


def _script_words(words: tuple[str, ...], name: str) -> list[str]:
    if words[0] == "--lora-modules":
        return [words[0], f'{name}="$adapter"']
    if words[1:] in ((ADAPTER,), (ADAPTER_TEMPLATE,)):
        return [words[0], f'"$adapter{words[1].removeprefix(ADAPTER)}"']
    return [shell_word(word) for word in words]
