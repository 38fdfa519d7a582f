"""What every artifact runs on: runtime/, whole, as the wheel of recipec-runtime or as its source.

The wheel's version ends in a digest of its files, so an environment never keeps another build of the same
release. requirements-train.txt names that version, and finds it by a page next to the artifacts, PAGE, which
has the sha256 of the wheel. pip checks the sha256 of a link in a page, and resolves the page's path against
the folder of the requirements file; of a path to a wheel it does neither.

A wheel is a zip of the package's files with metadata. Nothing is compressed and every entry has the same
date, so the same runtime gives the same bytes on every machine, with any version of zlib.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import io
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from recipec import runtime
from recipec.compiler import __version__
from recipec.runtime.build_check import LIST

NAME = "recipec-runtime"
STEM = NAME.replace("-", "_")
PAGE = f"{STEM}.html"
"""The page that links the wheels of a folder of artifacts, with their sha256."""
WHEELS = f"{STEM}-*.whl"
"""The pattern of the wheels' names."""

DIGITS = 12
"""The digits of the files' sha256 in the wheel's version."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip can store."""

METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: What the scripts run on that recipec emits
License: Apache-2.0
Requires-Python: >=3.10
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: recipec
Root-Is-Purelib: true
Tag: py3-none-any
"""
LINK = re.compile(r'<a href="([^"#]+)#sha256=([0-9a-f]{64})">')


@functools.cache
def runtime_files() -> dict[str, bytes]:
    """Return the modules and scripts of runtime/ by path relative to it, and their sha256 in SHA256SUMS."""
    folder = Path(runtime.__file__).parent
    return listed({path: (folder / path).read_bytes() for path in modules(folder)})


def listed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return files with the list of their sha256."""
    sums = (f"{hashlib.sha256(files[path]).hexdigest()}  {path}\n" for path in sorted(files))
    return {**files, LIST: "".join(sums).encode()}


def modules(folder: Path) -> list[str]:
    """Return the Python modules and shell scripts below a folder, relative to it, sorted."""
    paths = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        within = PurePosixPath(Path(place).relative_to(folder).as_posix())
        paths += [str(within / name) for name in names if name.endswith((".py", ".sh"))]
    return sorted(paths)


def runtime_digest() -> str:
    """Return the sha256 of runtime/SHA256SUMS, which stands for all files of the runtime."""
    return hashlib.sha256(runtime_files()[LIST]).hexdigest()


def version() -> str:
    """Return the version of the wheel: recipec's, and digits of the files' sha256."""
    return f"{__version__}+{runtime_digest()[:DIGITS]}"


def requirement() -> str:
    """Return the requirement of this version's runtime, for pip."""
    return f"{NAME}=={version()}"


def record() -> dict[str, str]:
    """Return what recipe.lock.json says of the runtime."""
    return {"package": requirement(), "sha256": runtime_digest()}


def wheel_file(package: str = "") -> str:
    """Return the file name of the wheel that a requirement names; by default of this version's."""
    return f"{STEM}-{(package or requirement()).removeprefix(f'{NAME}==')}-py3-none-any.whl"


def package_of(lock: Mapping[str, Any]) -> str | None:
    """Return the requirement of the runtime that a lock records; None for a lock of 0.2 or earlier, whose
    artifact runs on a copy or on a wheel without a page."""
    recorded = lock.get("runtime")
    package = recorded.get("package") if isinstance(recorded, dict) else None
    return package if isinstance(package, str) else None


def wheel() -> bytes:
    """Return the wheel of this version's runtime."""
    return _wheel(version())


@functools.lru_cache(maxsize=1)
def _wheel(version: str) -> bytes:
    info = f"{STEM}-{version}.dist-info"
    files = {f"runtime/{path}": content for path, content in runtime_files().items()}
    files |= {f"{info}/METADATA": METADATA.format(name=NAME, version=version).encode()}
    files |= {f"{info}/WHEEL": WHEEL.encode()}
    lines = [f"{path},sha256={_hash(files[path])},{len(files[path])}" for path in sorted(files)]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.create_system = 3  # Unix, on every machine
            entry.external_attr = (0o755 if path.endswith(".sh") else 0o644) << 16
            archive.writestr(entry, content)
    return buffer.getvalue()


def is_whole(path: Path) -> bool:
    """Return whether a file is a wheel of the runtime, of any version, that was not edited: whether its files
    are those of the digest in its name."""
    digits = path.name.removesuffix("-py3-none-any.whl").rpartition("+")[2]
    try:
        with zipfile.ZipFile(path) as archive:
            sums = archive.read(f"runtime/{LIST}")
            whole = archive.testzip() is None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return False
    return whole and hashlib.sha256(sums).hexdigest()[:DIGITS] == digits


def _hash(content: bytes) -> str:
    """Return a digest in the format of RECORD."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def page(older: Mapping[str, str] | None = None) -> bytes:
    """Return the text of PAGE.

    Args:
        older: file name and sha256 of wheels that other artifacts of the folder run on.
    """
    wheels = {**(older or {}), wheel_file(): hashlib.sha256(wheel()).hexdigest()}
    links = "".join(
        f'<a href="{quote(name)}#sha256={sha256}">{html.escape(name)}</a><br>\n'
        for name, sha256 in sorted(wheels.items())
    )
    return (
        "<!DOCTYPE html>\n"
        f"<!-- requirements-train.txt finds {NAME} here. `recipe build` writes this page and the wheel. -->\n"
        f"<title>{NAME}</title>\n{links}"
    ).encode()


def linked(page: bytes) -> dict[str, str]:
    """Return the wheels that a page links: their file names, with their sha256."""
    return {unquote(name): sha256 for name, sha256 in LINK.findall(page.decode("utf-8", "replace"))}
