"""Copy a run's checkpoint to this machine, from a place where Orbax cannot read it itself."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..addresses import failed, open_address, read_by_orbax
from ..errors import UserError
from . import manifest
from .adapter_reader import ITEM, METRICS, choose_step, step_folders
from .record import INITIAL, LOCK


@contextmanager
def staged(directory: str, which: str) -> Iterator[str]:
    """Yield a folder from which one step of a run can be loaded, while the block runs.

    Local folders and gs:// are yielded unchanged. From another address, the record, the metrics and the
    chosen step's parameters are copied into a temporary folder, which is removed at the end. It also has
    folders named after the steps that follow the chosen one, but none for those before it.

    Args:
        directory: of the run's checkpoints: a path, or an address that fsspec can read.
        which: "latest", "best" or a step, as for `choose_step`.

    Raises:
        UserError: when there is no such step, its files are not those that were saved, the address cannot be
            read, or the copy does not fit on the disk. Errors raised in the block name the address, too.
    """
    if read_by_orbax(directory):
        yield directory
        return
    opened = open_address(directory) if "://" in directory else directory
    if not isinstance(opened, tuple):
        yield str(opened)
        return
    with tempfile.TemporaryDirectory(prefix="recipec-") as temporary:
        folder = str(Path(temporary).resolve())
        try:
            _copy(directory, *opened, Path(folder), which)
            yield folder
        except UserError as error:
            raise UserError(
                error.message.replace(folder, directory.rstrip("/")),
                error.help and error.help.replace(folder, directory.rstrip("/")),
            ) from error


def _copy(address: str, system: Any, root: str, folder: Path, which: str) -> None:
    """Copy the files that one step is loaded from."""
    sizes = _files(address, system, root)
    # Choose among empty folders of the same names, so that the choice is the same as everywhere else.
    for name in sizes:
        number, _, rest = name.partition("/")
        if number.isdecimal() and rest:
            item = ITEM if rest.startswith(f"{ITEM}/") else ""
            (folder / number / item).mkdir(parents=True, exist_ok=True)
    _get(address, system, root, folder, [name for name in (LOCK, METRICS, INITIAL) if name in sizes])
    step = choose_step(folder, which)
    before = [other for other in step_folders(folder) if other < step]
    for other in before:
        shutil.rmtree(folder / str(other))
    tree = f"{step}/{ITEM}/"
    wanted = {name: size for name, size in sizes.items() if name.startswith(tree)}
    _check_space(address, folder, wanted)
    _get(address, system, root, folder, list(wanted))
    _check_whole(folder, step, before)


def _files(address: str, system: Any, root: str) -> dict[str, int]:
    """Return the sizes of all files below a run's folder, by their names relative to it."""
    try:
        system.invalidate_cache()
        found = system.find(root, detail=True)
    except FileNotFoundError:
        return {}
    except Exception as error:  # from any library that reads the address
        raise failed(address, "read", error) from error
    prefix = root.strip("/") + "/"
    names = {str(path).strip("/").removeprefix(prefix): entry for path, entry in found.items()}
    return {name: int(entry["size"] or 0) for name, entry in names.items()}


def _get(address: str, system: Any, root: str, folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        if names:
            system.get([f"{root}/{name}" for name in names], [str(folder / name) for name in names])
    except Exception as error:  # from any library that reads the address
        raise failed(address, "copied", error) from error


def _check_space(address: str, folder: Path, sizes: Mapping[str, int]) -> None:
    need, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"{address}: its copy needs {need / 1e9:.1f} GB in {folder.parent}, {free / 1e9:.1f} GB are free",
            "free disk space there, or set TMPDIR to a folder on a larger disk",
        )


def _check_whole(folder: Path, step: int, before: list[int]) -> None:
    """Check a step here, because code that loads the copy knows of no earlier step to name."""
    tree = folder / str(step) / ITEM
    reason = manifest.damage(tree) if (tree / manifest.SUMS).exists() else None
    if reason is not None:
        raise UserError(
            f"{folder}: the checkpoint of step {step} is damaged ({reason})",
            f"try the one before it: --step {before[-1]}" if before else "there is no earlier one",
        )
