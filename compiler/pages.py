"""What the HTML pages that recipec writes share: templates that escape, and the policy on their scripts."""

from __future__ import annotations

import base64
import functools
import hashlib
from typing import TYPE_CHECKING

from recipec.compiler.emitters.render import FOLDER

if TYPE_CHECKING:
    from jinja2 import Environment


@functools.cache
def environment() -> Environment:
    """Unlike that of the artifacts' files, it escapes: names and settings come from users."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )


def script_hash(script: str) -> str:
    """As a content security policy names a script: no other one may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
