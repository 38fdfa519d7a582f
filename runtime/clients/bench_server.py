"""What a benchmark measures: the server's facts, its artifact's settings, and the machine that it runs on."""

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
"""Labels of the metric vllm:cache_config_info that are settings. Other labels, such as the number of blocks,
differ slightly at every start."""

NOT_MEASURED = ("host", "port", "smoke_prompts", "autoscaling")
"""Keys of a recipe's `serve` that do not change the measured figures."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server reports about itself.

    Attributes:
        vllm: its version; None if the server does not report it.
        root: folder or id of the weights that the server loaded.
        max_model_len: largest sum of prompt and answer, in tokens.
        cache: settings of its key/value cache.
    """

    vllm: str | None
    root: str | None
    max_model_len: int | None
    cache: dict[str, str]


def ask(client: Client, model: str) -> ServerFacts:
    """Ask a server about itself.

    Raises:
        UserError: the server does not answer, or serves other models.
    """
    client.text("/health")
    named = client.cards()
    if model not in named:
        served = ", ".join(named) or "no model"
        raise UserError(f"the server at {client.url} serves {served}, not {model}", "is it another recipe's?")
    entry = named[model]
    # The entry of an adapter has no max_model_len; its base model's entry has.
    lengths = [described.get("max_model_len") for described in (entry, *named.values())]
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
    """Read the settings of the server from an artifact's recipe.lock.json; {} if there is no file.

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
"""The PCI vendor id of Google."""

GENERATIONS = {
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}
"""Generations of TPU chips by PCI device id, as in JAX."""


@dataclass(frozen=True)
class ServerMachine:
    """The machine that answers at an address.

    Attributes:
        identity: distinguishes machines whose results must not be mixed.
        described: the machine in words, for a sentence.
        chips: number of TPU chips by generation ({"v6e": 8}); {} for none, None if it cannot be found out.
    """

    identity: str
    described: str
    chips: dict[str, int] | None


def look(url: str, devices: Path = DEVICES) -> ServerMachine:
    """Describe the machine behind an address, with its TPU chips if the address is this machine's own."""
    host = (urlsplit(url).hostname or "").lower()
    if not is_loopback(host):
        return ServerMachine(f"the machine at {host}", f"the machine that answered at {url}", None)
    counts: Counter[str] = Counter()
    for vendor in devices.glob("*/vendor"):
        try:
            if vendor.read_text().strip() == GOOGLE:
                counts[GENERATIONS.get((vendor.parent / "device").read_text().strip(), "")] += 1
        except OSError:
            continue
    counts.pop("", None)
    name = socket.gethostname()
    if not counts:
        return ServerMachine(f"{name} without a TPU", f"{name}, which shows no TPU and answered at {url}", {})
    chips = " and ".join(f"{count} {kind} chip{'s' * (count > 1)}" for kind, count in sorted(counts.items()))
    return ServerMachine(
        f"{name} with {chips}", f"{name}, which shows {chips} and answered at {url}", dict(counts)
    )
