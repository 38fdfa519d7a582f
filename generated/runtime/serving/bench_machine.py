"""Which machine is measured: what can be seen of it, and nothing more."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from runtime.serving.hosts import is_loopback

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
class Machine:
    """What answers at an address.

    Attributes:
        identity: tells machines apart whose results must not be mixed.
        described: for a sentence.
        chips: TPU chips by generation ("v6e": 8), {} where there are none; None where nobody can see.
    """

    identity: str
    described: str
    chips: dict[str, int] | None


def look(url: str, devices: Path = DEVICES) -> Machine:
    """The machine behind an address: this one, where the address is its own."""
    host = (urlsplit(url).hostname or "").lower()
    if not is_loopback(host):
        return Machine(f"the machine at {host}", f"the machine that answered at {url}", None)
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
        return Machine(f"{name} without a TPU", f"{name}, which shows no TPU and answered at {url}", {})
    chips = " and ".join(f"{count} {kind} chip{'s' * (count > 1)}" for kind, count in sorted(found.items()))
    return Machine(f"{name} with {chips}", f"{name}, which shows {chips} and answered at {url}", dict(found))
