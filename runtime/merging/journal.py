"""The journal of a merge: a second run continues where the first was stopped.

While a folder is written it holds JOURNAL, which names the merge and each complete file with its size and
SHA-256. The files that make the folder loadable come last. Then the journal is removed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..progress import Progress
from .output_folder import PARTIAL, OutputFolder, stale

JOURNAL = "merge.partial.json"
RECORD = "merge.json"
"""The record of a finished folder."""

Files = dict[str, dict[str, Any]]
"""{"size": bytes, "sha256": hexadecimal digits} by a file's name."""


@dataclass
class Journal:
    """The journal of one merge into one folder.

    Attributes:
        folder: the folder that the merge writes.
        identity: of the merge: everything that its output depends on.
        files: the complete files.
    """

    folder: OutputFolder
    identity: Mapping[str, Any]
    files: Files

    def add(self, name: str, size: int, sha256: str) -> None:
        """Add a file that is complete under its final name."""
        self.files[name] = {"size": size, "sha256": sha256}
        self.save()

    def save(self) -> None:
        """Write the journal."""
        value = {"identity": dict(self.identity), "files": self.files}
        self.folder.write(JOURNAL, encoded(value))

    def discard(self, planned: Collection[str]) -> None:
        """Remove all files of the merge. If this is killed, a second run treats none of them as complete."""
        self.files = {}
        self.save()
        for name in planned:
            self.folder.remove(name)
        self.end()

    def end(self) -> None:
        """Remove the journal: the folder is complete, or empty."""
        self.folder.remove(JOURNAL)


def finished(folder: OutputFolder, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the record of a folder that holds this same merge, complete; otherwise None."""
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
    """Begin to write a folder, or continue one that this same merge began.

    Files that match the journal are kept. Unfinished files of a killed process are removed.

    Args:
        folder: locked by this process.
        planned: names of all files of the merge.

    Raises:
        UserError: as `examine`.
    """
    files, partial = examine(folder, identity, planned)
    for name in partial:
        folder.remove(name)
    journal = Journal(folder, identity, _whole(folder, files))
    journal.save()
    return journal


def examine(
    folder: OutputFolder, identity: Mapping[str, Any], planned: Collection[str]
) -> tuple[Files, list[str]]:
    """Return the content of a folder that the merge has not finished: complete files, and stale files.

    Raises:
        UserError: when the folder has any other content.
    """
    names = folder.names()
    if JOURNAL not in names:
        # A kill while the first file is renamed leaves nothing else.
        if set(names) - {f".{JOURNAL}{PARTIAL}"}:
            raise _occupied(folder, names, identity)
        return {}, names
    begun = _parsed(folder.read(JOURNAL)) or {}
    if begun.get("identity") != identity:
        raise UserError(
            f"{folder.name}: holds another merge, which did not finish "
            f"({_difference(begun.get('identity'), identity)})",
            "finish that merge, or remove the folder, or choose another with --output",
        )
    partial = [name for name in stale(names) if _begun(name) in {JOURNAL, *planned}]
    foreign = sorted(set(names) - {JOURNAL} - set(planned) - set(partial))
    if foreign:
        raise UserError(
            f"{folder.name}: holds {foreign[0]}, which is not part of a merge",
            "move it away, or choose another folder with --output",
        )
    return begun.get("files", {}), partial


def _occupied(folder: OutputFolder, names: Collection[str], identity: Mapping[str, Any]) -> UserError:
    """Return the error for a folder that belongs to no merge in progress."""
    what = "is not empty"
    record = (_parsed(folder.read(RECORD)) if RECORD in names else None) or {}
    if record.get("identity") == identity:
        broken = next(name for name, entry in record["files"].items() if folder.size(name) != entry["size"])
        size = folder.size(broken)
        what = f"holds this merge, but {broken} is "
        what += "missing" if size is None else f"{size} bytes, not {record['files'][broken]['size']}"
    elif isinstance(record.get("identity"), dict):
        what = f"holds another merge ({_difference(record['identity'], identity)})"
    return UserError(f"{folder.name}: {what}", "remove it, or choose another folder with --output")


def _begun(name: str) -> str:
    """Return the final name of a stale file."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/" * bool(folder) + last.removeprefix(".").removesuffix(PARTIAL)


def _whole(folder: OutputFolder, files: Files) -> Files:
    """Return the files that still match what was written."""
    out = {}
    with Progress(
        "checking the files in the folder", sum(entry["size"] for entry in files.values())
    ) as progress:
        for name, entry in files.items():
            if folder.size(name) == entry["size"] and folder.sha256(name) == entry["sha256"]:
                out[name] = entry
            progress.advance(entry["size"])
    return out


def _difference(recorded: Any, wanted: Mapping[str, Any]) -> str:
    if not isinstance(recorded, dict):
        return "it cannot be read"
    keys = [key for key in sorted(recorded.keys() | wanted.keys()) if recorded.get(key) != wanted.get(key)]
    return ", ".join(f"another {key}" for key in keys)


def encoded(value: Mapping[str, Any]) -> bytes:
    """Return the bytes of a journal or a record."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
