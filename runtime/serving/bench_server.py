"""What is measured: what the server says of itself and the artifact of it, and what the machine shows."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import UserError
from .client import Client, ServerError
from .hosts import is_loopback

CACHE_SETTINGS = (
    "block_size",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "sliding_window",
)
"""Labels of the metric vllm:cache_config_info that are settings. Others, such as the number of blocks, come
out a little different at every start."""

NOT_MEASURED = ("host", "port", "smoke_prompts", "autoscaling")
"""Keys of a recipe's `serve` that change nothing of what is measured."""


@dataclass(frozen=True)
class ServerFacts:
    """What it says of itself.

    Attributes:
        vllm: its version; None where it does not tell.
        root: folder or id of the weights that the model is served from.
        max_model_len: prompt and answer together, in tokens.
        cache: settings of its key/value cache.
    """

    vllm: str | None
    root: str | None
    max_model_len: int | None
    cache: dict[str, str]


def ask(client: Client, model: str) -> ServerFacts:
    """Asks a server about itself.

    Raises:
        UserError: it does not answer, or serves other models.
    """
    client.text("/health")
    named = client.cards()
    if model not in named:
        served = ", ".join(named) or "no model"
        raise UserError(
            f"the server at {client.url} serves {served}, and not {model}", "is it another recipe's?"
        )
    entry = named[model]
    # An adapter's entry has no length of its own.
    lengths = [one.get("max_model_len") for one in (entry, *named.values())]
    length = next((n for n in lengths if isinstance(n, int) and not isinstance(n, bool)), None)
    root = entry.get("root")
    return ServerFacts(client.version(), root if isinstance(root, str) else None, length, _cache(client))


def _cache(client: Client) -> dict[str, str]:
    try:
        match = re.search(r"^vllm:cache_config_info\{(.*)\}", client.text("/metrics"), re.MULTILINE)
    except ServerError:
        return {}
    labels = dict(re.findall(r'(\w+)="([^"]*)"', match[1])) if match else {}
    return {name: labels[name] for name in CACHE_SETTINGS if name in labels}


def recipe_settings(lock: Path | None) -> dict[str, Any]:
    """The settings of the server in an artifact's recipe.lock.json; {} without one.

    Raises:
        UserError: the file is damaged.
    """
    if lock is None or not lock.is_file():
        return {}
    try:
        serve = json.loads(lock.read_text(encoding="utf-8"))["recipe"]["serve"]
        return {key: value for key, value in serve.items() if key not in NOT_MEASURED}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{lock} is not an artifact's lock", "build the recipe again") from None


DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""The PCI vendor."""

GENERATIONS = {
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}
"""PCI devices of a TPU chip, as JAX knows them."""


@dataclass(frozen=True)
class ServerMachine:
    """What answers at an address.

    Attributes:
        identity: tells machines apart whose results must not be mixed.
        described: for a sentence.
        chips: TPU chips by generation ("v6e": 8), {} where there are none; None where nobody can see.
    """

    identity: str
    described: str
    chips: dict[str, int] | None


def look(url: str, devices: Path = DEVICES) -> ServerMachine:
    """The machine behind an address: this one, where the address is its own."""
    host = (urlsplit(url).hostname or "").lower()
    if not is_loopback(host):
        return ServerMachine(f"the machine at {host}", f"the machine that answered at {url}", None)
    found: Counter[str] = Counter()
    for vendor in devices.glob("*/vendor"):
        try:
            if vendor.read_text().strip() == GOOGLE:
                found[GENERATIONS.get((vendor.parent / "device").read_text().strip(), "")] += 1
        except OSError:
            continue
    found.pop("", None)
    name = socket.gethostname()
    if not found:
        return ServerMachine(f"{name} without a TPU", f"{name}, which shows no TPU and answered at {url}", {})
    chips = " and ".join(f"{count} {kind} chip{'s' * (count > 1)}" for kind, count in sorted(found.items()))
    return ServerMachine(
        f"{name} with {chips}", f"{name}, which shows {chips} and answered at {url}", dict(found)
    )
