"""The memory that this process may still take."""

from __future__ import annotations

from pathlib import Path

MEMORY = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that programs can take without swapping; None if the system does not say."""
    try:
        lines = MEMORY.read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    try:  # a container may have less than its machine
        limit = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(0, min(free, limit + int(stat["inactive_file"])))
    except (OSError, KeyError, ValueError):
        return free
