"""A disk cache of tokenized data, under keys computed from all inputs.

A folder CACHE/data/KEY holds one split: its arrays as .npy files, and split.json with their sizes, their
digest and the report. KEY is a digest of the sources' contents, of all settings that affect the result, and
of this package's own code. A folder is written next to its final place and then renamed, so it is either
complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import first_line, say
from ..settings import DataSettings, Source
from ..untrusted import check_ends
from .encoding import Coding
from .file_rows import HUB, TOLD, address_of, kind_of
from .image_processor import ImageSettings
from .pictures import stamps_of
from .row_counts import SplitReport
from .samples import Samples

ABOUT = "split.json"

PACKAGES = ("tokenizers", "jinja2", "datasets", "pyarrow", "pillow", "transformers")
"""Packages that affect how rows are read, rendered and tokenized."""


def key(
    sources: Sequence[str | Source],
    data: DataSettings,
    coding: Coding,
    data_dir: Path,
    part: Sequence[float] | None = None,
) -> tuple[str | None, str]:
    """Return the cache key of some tokenized sources.

    Args:
        part: the choice of rows, None for all.

    Returns:
        The key; or None and a reason, if a source's content cannot be identified without reading it.
    """
    contents = []
    for source_or_path in sources:
        source = Source(source_or_path) if isinstance(source_or_path, str) else source_or_path
        try:
            what = _content(source, data_dir)
        except Exception as error:  # any error; reading the source reports it better
            return None, f"{source.path}: {first_line(error)}"
        settings, transform = data.of(source), None
        if settings.transform is not None:
            name, _, function = settings.transform.rpartition(":")
            transform = [function, _sha256([data_dir / name]) if (data_dir / name).is_file() else None]
        kind = [settings.format, dict(settings.fields), transform]
        contents.append([source.path, source.split, source.config, source.limit, what, kind])
    inputs = {
        "sources": contents,
        "part": part,
        "coding": _identity(coding),
        "code": _sha256(sorted(Path(__file__).parent.glob("*.py"))),
        "packages": [installed(name) for name in PACKAGES],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:40], ""


def _identity(coding: Coding) -> dict[str, Any]:
    """Return what decides how samples become tokens, as JSON values."""
    if coding.images is None:
        return {key: value for key, value in asdict(coding).items() if key != "images"}
    return {**asdict(replace(coding, images=None)), "images": coding.images.identity}


def load(folder: Path, images: ImageSettings | None = None) -> tuple[Samples, SplitReport] | None:
    """Load a saved split; return None if it is absent, or if a picture's file has changed since.

    An incomplete one is reported and removed.
    """
    if not folder.is_dir():
        return None
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        arrays = {item.name: np.load(folder / f"{item.name}.npy", mmap_mode="r") for item in fields(Samples)}
        samples = Samples(**arrays | {"group": int(arrays["group"])})
        if _digest(samples) != about["sha256"]:
            raise ValueError("its contents have changed")
        if images is not None and (changed := _changed_pictures(samples, images)):
            raise ValueError(changed)
        return samples, SplitReport.from_dict(about["report"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
        say(f"note: the tokenized data in {folder} is incomplete ({first_line(error)}), and is made again")
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _changed_pictures(samples: Samples, images: ImageSettings) -> str:
    """Return a sentence on the pictures whose files have changed, "" for none."""
    places = [place.decode("utf-8") for place in samples.places.tolist()]
    changed = np.flatnonzero(np.array(stamps_of(places, Path(images.kept)), np.uint64) != samples.stamps)
    return f"{places[changed[0]]} has changed" if len(changed) else ""


def save(folder: Path, samples: Samples, report: SplitReport) -> None:
    """Save a split of at least one sample. A full or read-only disk is reported and stops nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name[:8]}-", dir=folder.parent))
    except OSError as error:
        _not_kept(folder, error)
        return
    try:
        for item in fields(Samples):
            np.save(unfinished / f"{item.name}.npy", getattr(samples, item.name), allow_pickle=False)
        about = {"sha256": _digest(samples), "report": report.to_dict()}
        (unfinished / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.is_dir():  # another process may have written it first
            _not_kept(folder, error)


def _content(source: Source, data_dir: Path) -> Any:
    if "://" in source.path:
        return remote_content(source)
    path = data_dir / Path(source.path).expanduser()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[str(file.relative_to(path)), _sha256([file])] for file in files]


def _digest(samples: Samples) -> str:
    origins = hashlib.sha256(np.ascontiguousarray(samples.origins).tobytes()).hexdigest()
    return f"{samples.digest} {origins}"


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        check_ends(file, str(file))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def remote_content(source: Source) -> Any:
    """Return an identification of the content of a source at an address.

    Raises:
        ValueError: its file system tells neither a checksum nor a time.
    """
    if source.path.startswith(HUB) and kind_of(source.path) is None:
        from huggingface_hub import HfApi

        name, revision = address_of(source.path)
        return HfApi().dataset_info(name, revision=revision).sha
    import fsspec

    system, path = fsspec.core.url_to_fs(source.path)
    names = sorted(system.find(path)) if system.isdir(path) else [path]
    told = (*TOLD, "mtime", "updated", "LastModified")
    infos = [(name, system.info(name)) for name in names]
    if not all(any(info.get(item) for item in told[1:]) for _, info in infos):
        raise ValueError("its file system gives neither a checksum nor a time")
    return [[name, *(str(info.get(item)) for item in told)] for name, info in infos]


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _not_kept(folder: Path, error: OSError) -> None:
    say(f"note: the tokenized data could not be kept in {folder}: {first_line(error)}")
