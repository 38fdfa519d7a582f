"""What a merge has written so far, so that a second run goes on where the first was stopped.

While a folder is written it holds JOURNAL, which names the merge and each file that is whole, with its size
and SHA-256. What the folder needs to be loaded comes last, and then the journal goes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import UserError
from runtime.export.folder import OutputFolder, stale
from runtime.progress import Progress

JOURNAL = "merge.partial.json"
RECORD = "merge.json"
"""What a finished folder was made of."""

Files = dict[str, dict[str, Any]]
"""{"size": bytes, "sha256": hexadecimal digits} by a file's name."""


@dataclass
class Journal:
    """Of one merge into one folder.

    Attributes:
        folder: that it writes.
        identity: of the merge: whatever its output depends on.
        files: those that are whole.
    """

    folder: OutputFolder
    identity: Mapping[str, Any]
    files: Files

    def add(self, name: str, size: int, sha256: str) -> None:
        """Notes a file that has its name."""
        self.files[name] = {"size": size, "sha256": sha256}
        self.save()

    def save(self) -> None:
        """Writes the journal."""
        value = {"identity": dict(self.identity), "files": self.files}
        self.folder.write(JOURNAL, _encoded(value))

    def end(self) -> None:
        """Says that the folder is whole."""
        self.folder.remove(JOURNAL)


def finished(folder: OutputFolder, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record of a folder that holds this very merge, whole; else None."""
    names = folder.names()
    if RECORD not in names or JOURNAL in names:
        return None
    record = _parsed(folder.read(RECORD))
    if record is None or record.get("identity") != identity:
        return None
    files: Mapping[str, Any] = record.get("files", {})
    whole = all(name in names and folder.size(name) == entry["size"] for name, entry in files.items())
    return record if whole else None


def begin(folder: OutputFolder, identity: Mapping[str, Any], planned: Collection[str]) -> Journal:
    """Begins to write a folder, or goes on with one that this very merge began.

    Files that the journal names and that are as it says are kept; what a killed process left is removed.

    Args:
        folder: locked by this process.
        planned: names of all files that the merge writes.

    Raises:
        UserError: when the folder holds anything else.
    """
    names = folder.names()
    if not names:
        journal = Journal(folder, identity, {})
        journal.save()
        return journal
    partial = stale(names)
    files: Files = {}
    if JOURNAL in names:
        found = _parsed(folder.read(JOURNAL))
        if found is None or found.get("identity") != identity:
            what = _difference((found or {}).get("identity") or {}, identity)
            raise UserError(
                f"{folder.name}: holds another merge that was begun and not finished ({what})",
                "finish that one, or remove the folder, or choose another with --output",
            )
        files = found.get("files", {})
    else:
        # A kill between the first file's temporary name and its final one leaves nothing else.
        if set(names) - set(partial):
            raise UserError(
                f"{folder.name}: is not empty", "remove it, or choose another folder with --output"
            )
    foreign = sorted(set(names) - {JOURNAL} - set(planned) - set(partial))
    if foreign:
        raise UserError(
            f"{folder.name}: holds {foreign[0]}, which is no part of a merge",
            "move it away, or choose another folder with --output",
        )
    for name in partial:
        folder.remove(name)
    journal = Journal(folder, identity, _whole(folder, files))
    journal.save()
    return journal


def _whole(folder: OutputFolder, files: Files) -> Files:
    """Those of the files that are still what was written."""
    out = {}
    with Progress("checking what is there", sum(entry["size"] for entry in files.values())) as progress:
        for name, entry in files.items():
            if folder.size(name) == entry["size"] and folder.sha256(name) == entry["sha256"]:
                out[name] = entry
            progress.advance(entry["size"])
    return out


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    keys = [key for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)]
    return ", ".join(f"another {key}" for key in keys) or "it cannot be read"


def _encoded(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
