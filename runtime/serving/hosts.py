"""Addresses of hosts."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
