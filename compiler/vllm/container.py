"""The server that serve/ starts. Only this module decides its command line, environment and volumes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from recipec.compiler.catalog import facts_of
from recipec.compiler.vllm import blocks, features
from recipec.compiler.vllm import flags as vllm
from recipec.compiler.vllm.weights import ServedWeights, adapter_weights, model_weights
from recipec.runtime.clients.hosts import is_loopback
from recipec.runtime.data.reasoning import VARIABLES

if TYPE_CHECKING:
    from recipec.spec.language import Recipe, Serve

MODEL = "/model"
"""Folder in the container that holds the weights."""

ADAPTER = "/adapter"
"""Folder in the container that holds the PEFT adapter."""

ADAPTER_TEMPLATE = f"{ADAPTER}/chat_template.jinja"
"""The recipe's chat template, which merge.py writes next to the adapter."""

XLA_CACHE = "/cache/xla"
"""Folder in the container for compiled programs, so that a restart does not compile them again."""

HUB_CACHE = "/cache/huggingface"
"""Folder in the container for downloads from the Hugging Face hub."""

SHARED_MEMORY_GB = 16
"""Shared memory through which a server's processes exchange data. The default of 64 MB is too small."""

STARTUP_MINUTES = 30
"""Limit for loading and the first compilation of a large model; a 31B model compiled for about 8 min."""

SHUTDOWN_SECONDS = 120
"""How long requests in flight may take to finish after SIGTERM. By default vLLM aborts them at once."""

SHUTDOWN_MARGIN_SECONDS = 30
"""Time that the processes need to end after the last request."""

CLOUD_SDK_IMAGE = "google/cloud-sdk:587.0.0-slim"
"""Image that copies weights from gs://."""


@dataclass(frozen=True)
class Volume:
    """A folder or named volume that is mounted into the container.

    Attributes:
        kind: "bind" for a folder of the machine, "volume" for a volume that the engine keeps by name.
        source: for a volume, its name. For a folder, its path: relative to the artifact, absolute, or below
            ~/; "" if `variable` must name it.
        target: folder within the container.
        holds: a description of the content: "the merged weights".
        variable: environment variable that can name another folder; "" if there is none.
    """

    kind: Literal["bind", "volume"]
    source: str
    target: str
    read_only: bool
    holds: str
    variable: str = ""


@dataclass(frozen=True)
class Fetch:
    """A container that copies weights from gs:// into a volume before the server starts.

    Attributes:
        name: of the service: "fetch-model".
        image: an image with the Google Cloud CLI.
        command: the command line; no shell expands its words.
        volume: the volume it writes to. The server mounts the same volume read-only.
    """

    name: str
    image: str
    command: tuple[str, ...]
    volume: Volume


@dataclass(frozen=True)
class Container:
    """The server of serve/: Dockerfile, compose.yaml, k8s.yaml, serve.sh and `recipe serve up` all read this.

    Attributes:
        name: of the recipe; also the name of the image, the container and the served model.
        base_image: default of the Dockerfile's BASE_IMAGE.
        entrypoint: the image's command: ("vllm", "serve", "/model", "--served-model-name", ...).
        flags: the words of each flag of `entrypoint`, after the model.
        environment: environment variables that the image sets.
        secrets: environment variables passed through from the user's environment; never written to a file.
        volumes: the weights, the adapter, and the caches.
        fetches: containers that must finish before the server starts.
        model, adapter: where the weights come from.
        shared_memory: "16gb".
        stop_grace_seconds: time from SIGTERM to SIGKILL, in which requests in flight finish.
        health_url: URL that returns 200 once the server is ready, as seen from the server's own machine.
        api_key: whether VLLM_API_KEY is required, because other machines can reach the server.
    """

    name: str
    base_image: str
    entrypoint: tuple[str, ...]
    flags: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    volumes: tuple[Volume, ...]
    fetches: tuple[Fetch, ...]
    model: ServedWeights
    adapter: ServedWeights | None
    shared_memory: str
    privileged: bool
    network_mode: str
    stop_grace_seconds: int
    host: str
    port: int
    health_url: str
    startup_minutes: int
    api_key: bool


def container(recipe: Recipe, family: str) -> Container:
    """Build the description of the server of a recipe that has a `serve` section.

    Args:
        family: name of the model's family: "gemma4".
    """
    serve = recipe.server
    model, adapter = model_weights(recipe), adapter_weights(recipe)
    server_options = server_flags(recipe, family).items()
    flags = tuple(tuple(words) for name, value in server_options if (words := vllm.words(name, value)))
    environment = server_environment(serve, offline=model.local)
    volumes, fetches = _volumes(model, adapter, environment)
    target = model.address if model.kind == "hub" else MODEL
    return Container(
        name=recipe.name,
        base_image=serve.image,
        entrypoint=("vllm", "serve", target, *(word for words in flags for word in words)),
        flags=flags,
        environment=environment,
        secrets=("VLLM_API_KEY",) if model.local else ("VLLM_API_KEY", "HF_TOKEN"),
        volumes=volumes,
        fetches=fetches,
        model=model,
        adapter=adapter,
        shared_memory=f"{SHARED_MEMORY_GB}gb",
        privileged=True,
        network_mode="host",
        stop_grace_seconds=_shutdown_seconds(serve) + SHUTDOWN_MARGIN_SECONDS,
        host=serve.host,
        port=serve.port,
        health_url=f"http://{own_address(serve.host)}:{serve.port}/health",
        startup_minutes=STARTUP_MINUTES,
        api_key=not is_loopback(serve.host),
    )


def server_flags(recipe: Recipe, family: str) -> dict[str, Any]:
    """Return the flags of `vllm serve` by name, without dashes; True means a flag without a value.

    Args:
        family: name of the model's family.
    """
    serve = recipe.server
    adapter = serve.weights == "adapter"
    flags: dict[str, Any] = {}
    model = model_weights(recipe)
    if model.revision is not None:
        flags["revision"] = model.revision
    flags |= {
        # Clients request the fine-tuned model by the recipe's name, and an adapter's base by another name.
        "served-model-name": f"{recipe.name}-base" if adapter else recipe.name,
        "host": serve.host,
        "port": serve.port,
        "shutdown-timeout": SHUTDOWN_SECONDS,
        "tensor-parallel-size": serve.tensor_parallel_size,
    }
    if serve.data_parallel_size > 1:
        flags["data-parallel-size"] = serve.data_parallel_size
    flags |= {
        "max-model-len": serve.max_model_len,
        "max-num-seqs": serve.max_num_seqs,
        "max-num-batched-tokens": serve.max_num_batched_tokens,
        "kv-cache-dtype": serve.kv_cache_dtype,
    }
    if serve.quantization is not None:
        flags["quantization"] = serve.quantization
    if adapter:
        flags |= {
            "enable-lora": True,
            "max-lora-rank": features.max_lora_rank(recipe),
            "lora-modules": [f"{recipe.name}={ADAPTER}"],
            # merge.py writes it there, with the tokens that end an answer in training. vLLM takes them from
            # this file alone: its --override-generation-config changes no end tokens.
            "generation-config": ADAPTER,
        }
        # merge.py writes them next to the adapter, if the run did not use the base's.
        if recipe.model.tokenizer is not None or recipe.model.add_tokens:
            flags["tokenizer"] = ADAPTER
        if recipe.data.chat_template is not None:
            flags["chat-template"] = ADAPTER_TEMPLATE
    flags["enable-prefix-caching" if serve.prefix_caching else "no-enable-prefix-caching"] = True
    if variables := VARIABLES.get(recipe.data.reasoning or ""):
        flags["default-chat-template-kwargs"] = variables
    if serve.tool_call_parser is not None:
        flags |= {"enable-auto-tool-choice": True, "tool-call-parser": serve.tool_call_parser}
    flags |= facts_of(family).served.flags
    return flags | vllm.by_flag(serve.extra_args)


def server_environment(serve: Serve, offline: bool) -> dict[str, str]:
    """Return the environment variables of the server; the recipe's take precedence.

    Args:
        offline: whether all files are on the machine, so that the server need not contact the hub.
    """
    hub = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_HOME": HUB_CACHE}
    environment = {"VLLM_XLA_CACHE_PATH": XLA_CACHE, **hub, "VLLM_NO_USAGE_STATS": "1"}
    return environment | blocks.environment(serve)


def own_address(host: str) -> str:
    """Return the host part of a URL that reaches, from its own machine, a server listening on `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"


def _volumes(
    model: ServedWeights, adapter: ServedWeights | None, environment: Mapping[str, str]
) -> tuple[tuple[Volume, ...], tuple[Fetch, ...]]:
    volumes: list[Volume] = []
    fetches: list[Fetch] = []
    parts = [("model", model, MODEL, "the weights" if adapter is None else "the base's weights")]
    if adapter is not None:
        parts.append(("adapter", adapter, ADAPTER, "the adapter"))
    for name, weights, target, holds in parts:
        if weights.kind == "folder":
            variable = f"{name.upper()}_DIR"
            volumes.append(Volume("bind", weights.address, target, True, holds, variable))
        elif weights.kind == "bucket":
            volumes.append(Volume("volume", name, target, True, holds))
            written = Volume("volume", name, target, False, holds)
            fetches.append(Fetch(f"fetch-{name}", CLOUD_SDK_IMAGE, _copy_words(weights, target), written))
    programs = "compiled programs, so that a restart does not compile for minutes again"
    volumes.append(Volume("volume", "xla-cache", environment["VLLM_XLA_CACHE_PATH"], False, programs))
    if model.kind == "hub":
        volumes.append(
            Volume("volume", "hub-cache", environment["HF_HOME"], False, "what was downloaded from the hub")
        )
    return tuple(volumes), tuple(fetches)


def _copy_words(weights: ServedWeights, target: str) -> tuple[str, ...]:
    """Return a command that makes a folder equal to one at gs://, without copying existing files again.

    It deletes files that the bucket no longer has. Otherwise vLLM would also load another model's shards.
    """
    mirror = "--delete-unmatched-destination-objects"
    return ("gcloud", "storage", "rsync", "--recursive", mirror, weights.address, target)


def _shutdown_seconds(serve: Serve) -> int:
    timeout = vllm.by_flag(serve.extra_args).get("shutdown-timeout")
    return int(timeout) if timeout is not None else SHUTDOWN_SECONDS
