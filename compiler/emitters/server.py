"""Emit serve/: a server in a container, on Kubernetes or on a TPU VM, and the scripts that send it requests.

The container image, its compose file, serve.sh and k8s.yaml all start the same server, which
compiler.vllm.container describes. smoke.sh has the requests that test a new server before its clients use
it, bench.sh the recipe's benchmark sweep, eval.sh the recipe's prompts and tasks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recipec.compiler import catalog
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.references import asks_chats
from recipec.compiler.render import render, shell_word, yaml_string
from recipec.compiler.vllm.bench_flags import bench_flags
from recipec.compiler.vllm.container import (
    ADAPTER,
    ADAPTER_TEMPLATE,
    MODEL,
    SHARED_MEMORY_GB,
    Container,
    Volume,
    container,
    own_address,
)
from recipec.compiler.vllm.weights import ServedWeights
from recipec.runtime.clients.evaluate_prompts import parse
from recipec.runtime.clients.hosts import is_loopback
from recipec.runtime.data.stops import GENERATION

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Recipe


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
    address = own_address(host).strip("[]")
    return address if is_loopback(address) else None


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
        "files": ["config.json"] if part == "model" else ["adapter_config.json", GENERATION],
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


def assignment(part: str, weights: ServedWeights, name: str, argument: bool = False) -> list[str]:
    """Return lines that set the variable `part` to the folder in MODEL_DIR or ADAPTER_DIR, or the recipe's.

    The lines may use `here`, the script's own folder. If the recipe does not determine the folder, it is "".

    Args:
        part: "model" or "adapter".
        name: of the recipe.
        argument: whether the script's first argument, if given, takes precedence.
    """
    start, path = _place(part, weights, name)
    default, lines = f"{start}{path}", []
    if shell_word(path) not in (path, '""'):
        # Quotes and braces of the path itself would be special within the braces of a default value.
        lines.append(f'default_{part}="{start}{shell_word(path)[1:]}')
        default = f"$default_{part}"
    folder = f"${{{part.upper()}_DIR:-{default}}}"
    if argument:
        folder = f"${{1:-{folder}}}"
    return [*lines, f'{part}="{folder}"']


def _place(part: str, weights: ServedWeights, name: str) -> tuple[str, str]:
    """Return a shell variable, and the path relative to it."""
    if weights.kind == "bucket":
        return "$HOME", f"/.cache/{name}/{part}"
    if weights.address.startswith("~/"):
        return "$HOME", weights.address[1:]
    if weights.address.startswith("/") or not weights.address:
        return "", weights.address
    return "$here", f"/../{weights.address}"


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
        "grace_seconds": DRAIN_SECONDS + server.stop_grace_seconds,
        "startup_seconds": 60 * server.startup_minutes,
        # A probe every ten seconds.
        "startup_probes": 6 * server.startup_minutes,
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


TAKEN = 3
"""The number of evaluation prompts that smoke.sh sends too."""

LONGEST = 200
"""The most characters of such a prompt, because it is part of a script."""


def emit_smoke(program: Program) -> dict[str, str]:
    """Return smoke.sh by its path; {} without a `serve` section."""
    recipe = program.recipe
    if recipe.serve is None:
        return {}
    server = container(recipe, program.family.name)
    text = render(
        "serve/smoke.sh",
        url=server.health_url.removesuffix("/health"),
        name=server.name,
        base=f"{server.name}-base" if recipe.serve.weights == "adapter" else None,
        wait=server.startup_minutes,
        vllm=pins.sets()["serve"]["vllm-tpu"],
        api_key=server.api_key,
        text=not asks_chats(recipe),
        picture=program.architecture.vision is not None,
        must_differ=recipe.serve.smoke_prompts,
        prompts=[] if recipe.serve.smoke_prompts else _evaluated(program),
    )
    return {"serve/smoke.sh": text}


def _evaluated(program: Program) -> list[str]:
    """Return the first short prompts of evaluate.prompts; [] if the file is elsewhere or cannot be read."""
    path = program.recipe.evaluate.prompts
    if path is None or "://" in path:
        return []
    chat = asks_chats(program.recipe)
    prompts, _ = parse(program.source.parent / path, chat)
    texts = (_turn(prompt.messages) if chat else prompt.text for prompt in prompts)
    return [text for text in texts if text and text.isprintable() and len(text) <= LONGEST][:TAKEN]


def _turn(messages: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return the text of a chat that is one turn of the user, else None."""
    turn = messages[0] if messages is not None and len(messages) == 1 else {}
    text = turn.get("content")
    return text if turn.get("role") == "user" and isinstance(text, str) else None


def emit_bench(program: Program) -> dict[str, str]:
    """Return the benchmark's script by its path; {} without a `serve` section."""
    recipe, accelerator = program.recipe, program.serve_accelerator
    if recipe.serve is None or accelerator is None:
        return {}
    server = container(recipe, program.family.name)
    benchmark = recipe.benchmark
    text = render(
        "serve/bench.sh",
        accelerator=accelerator.name,
        points=len(benchmark.input_lengths) * len(benchmark.request_rates),
        hub=shell_word(server.model.address) if not server.model.local else None,
        weights=_served_folder(server.model, server.name),
        model=MODEL,
        lines=[[shell_word(word) for word in line] for line in bench_flags(recipe, accelerator)],
    )
    return {"serve/bench.sh": text}


def _served_folder(weights: ServedWeights, name: str) -> list[str]:
    """Return lines that set `model` to the folder of the weights on a VM without Docker, as serve.sh does."""
    if weights.kind == "folder" and not weights.address:
        return ['model="${MODEL_DIR:?names the folder of the weights}"']
    return assignment("model", weights, name)


PYTHON = "3.11 to 3.13"
"""The Python versions on which lm-eval's pinned packages install."""


def emit_evaluate(program: Program) -> dict[str, str]:
    """Return the files by path; {} without a `serve` section, or with nothing to evaluate."""
    recipe = program.recipe
    serve, evaluate = recipe.serve, recipe.evaluate
    if serve is None or not (evaluate.prompts or evaluate.tasks):
        return {}
    server = container(recipe, program.family.name)
    chat = asks_chats(recipe)
    files = {
        "serve/eval.sh": render(
            "serve/eval.sh",
            url=server.health_url.removesuffix("/health"),
            name=server.name,
            base=f"{server.name}-base" if serve.weights == "adapter" else None,
            prompts=evaluate.prompts,
            text=not chat,
            samples=evaluate.num_generations,
            temperature=evaluate.temperature,
            max_tokens=evaluate.max_tokens,
            tasks=evaluate.tasks,
            task_api="chat" if chat else "completions",
            tokenizer=_tokenizer(recipe) if not chat else None,
            max_length=serve.max_model_len,
            limit=evaluate.limit,
        )
    }
    if evaluate.tasks:
        packages = pins.evaluation()
        files["requirements-eval.txt"] = render(
            "requirements-eval.txt", python=PYTHON, direct=packages.direct, transitive=packages.transitive
        )
    return files


def _tokenizer(recipe: Recipe) -> str | None:
    """Return lm-eval's tokenizer as a shell word: an id on the hub, or the folder of the merged weights.

    None if only the user who runs eval.sh knows it; then --tokenizer is required.
    """
    name = recipe.model.tokenizer or recipe.model.id
    if not (catalog.is_directory(name) or "://" in name or recipe.model.add_tokens):
        return shell_word(name)
    if "://" in recipe.merge.output:
        return None
    return '"$here/../"' + shell_word(recipe.merge.output)
