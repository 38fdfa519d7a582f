"""Build the runtime as a wheel: a separate package that `recipe build --runtime wheel` names by version and
hash.

A wheel is a zip of the package's files with metadata. Nothing is compressed and every entry has the same
date, so the same runtime gives the same bytes on every machine, with any version of zlib.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import zipfile
from collections.abc import Mapping

from recipec.compiler import __version__
from recipec.compiler.artifacts.runtime import runtime_files

NAME = "recipec-runtime"
FILE = f"{NAME.replace('-', '_')}-{__version__}-py3-none-any.whl"
REQUIREMENT = f"{NAME}=={__version__}"
INFO = f"{NAME.replace('-', '_')}-{__version__}.dist-info"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip can store."""

METADATA = f"""\
Metadata-Version: 2.1
Name: {NAME}
Version: {__version__}
Summary: What the scripts run on that recipec emits
License: Apache-2.0
Requires-Python: >=3.11
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: recipec
Root-Is-Purelib: true
Tag: py3-none-any
"""

REQUIREMENTS = "runtime.txt"
"""The file that names the wheel, once per folder of artifacts."""


@functools.cache
def wheel() -> bytes:
    """Return the wheel of this version's runtime."""
    return zipped({f"runtime/{path}": content for path, content in runtime_files().items()})


def zipped(package: Mapping[str, bytes]) -> bytes:
    """Return a wheel of these files, by their paths in site-packages."""
    files = {**package, f"{INFO}/METADATA": METADATA.encode(), f"{INFO}/WHEEL": WHEEL.encode()}
    record = [f"{path},sha256={_hash(files[path])},{len(files[path])}" for path in sorted(files)]
    files[f"{INFO}/RECORD"] = "\n".join([*record, f"{INFO}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.create_system = 3  # Unix, on every machine
            entry.external_attr = (0o755 if path.endswith(".sh") else 0o644) << 16
            archive.writestr(entry, content)
    return buffer.getvalue()


def _hash(content: bytes) -> str:
    """Return a digest in the format of RECORD."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def requirements() -> bytes:
    """Return the text of runtime.txt."""
    return f"""\
# What the artifacts of this folder run on: {NAME}, a wheel that `recipe pack` puts next to this file.
# In this folder:
#     pip install -r {REQUIREMENTS}
./{FILE} --hash=sha256:{hashlib.sha256(wheel()).hexdigest()}
""".encode()
