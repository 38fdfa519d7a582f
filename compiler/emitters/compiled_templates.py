"""Keeps compiled templates beside their sources, as Python keeps its modules: a seventh of a build's time."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import BytecodeCache

if TYPE_CHECKING:
    from jinja2.bccache import Bucket


class CompiledTemplates(BytecodeCache):
    """Bytecode in FOLDER/__pycache__, where that can be written; elsewhere templates are compiled each time.

    Jinja itself recognises bytecode of another version of Python, of Jinja or of a template.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "__pycache__"

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):
            bucket.load_bytecode(BytesIO(self._file(bucket).read_bytes()))

    def dump_bytecode(self, bucket: Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        content = bucket.bytecode_to_string()
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            # Whole or not at all: others may build at the same time.
            number, temporary = tempfile.mkstemp(dir=self._folder)
            try:
                with open(number, "wb") as file:
                    file.write(content)
                os.chmod(temporary, 0o644)
                os.replace(temporary, self._file(bucket))
            except OSError:
                os.unlink(temporary)

    def _file(self, bucket: Bucket) -> Path:
        return self._folder / f"{bucket.key}.{sys.implementation.cache_tag}.jinja"
