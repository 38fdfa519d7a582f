"""Fills the templates. Jinja is imported on first use, so that commands which emit nothing stay fast."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import templates

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(templates.__file__).parent


def render(template: str, **values: Any) -> str:
    """The text of `templates/TEMPLATE.j2` filled with `values`; an unknown name in it is an error."""
    return _environment().get_template(f"{template}.j2").render(**values)


def docker_value(text: str) -> str:
    """A value of a Dockerfile's ENV or ARG, quoted."""
    return '"' + re.sub(r'(["\\$])', r"\\\1", text) + '"'


def exec_form(words: list[str]) -> str:
    """Words of a Dockerfile's exec form, without the brackets."""
    return ", ".join(json.dumps(word, ensure_ascii=False) for word in words)


def yaml_name(name: str) -> str:
    """A recipe's name as a YAML string: in quotes where a reader would take it for another value."""
    return json.dumps(name) if name in OTHER_YAML else name


OTHER_YAML = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def shell_word(text: str) -> str:
    """A word of a shell command, in double quotes where it must be."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./-]+", text):
        return text
    return '"' + re.sub(r'(["\\$`])', r"\\\1", text) + '"'


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(docker=docker_value, exec_form=exec_form, yaml=yaml_name, shell=shell_word)
    return environment
