"""Fill the templates. Jinja is imported on first use, so that commands that emit nothing stay fast."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec import templates

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(templates.__file__).parent


def render(template: str, **values: Any) -> str:
    """Return `templates/TEMPLATE.j2` filled with `values`; an unknown name in the template is an error."""
    return _environment().get_template(f"{template}.j2").render(**values)


def docker_value(text: str) -> str:
    """Quote a value for a Dockerfile's ENV or ARG."""
    return '"' + re.sub(r'(["\\$])', r"\\\1", text) + '"'


def exec_form(words: Sequence[str]) -> str:
    """Write words in a Dockerfile's exec form, without the brackets."""
    return ", ".join(json.dumps(word, ensure_ascii=False) for word in words)


def yaml_string(text: str) -> str:
    """Write a YAML string, in quotes if a reader would take it for something else."""
    if PLAIN_YAML.fullmatch(text) and text.lower() not in OTHER_YAML:
        return text
    return '"' + "".join(map(_yaml_character, text)) + '"'


PLAIN_YAML = re.compile(r"(--)?[A-Za-z/][A-Za-z0-9._/-]*(:[A-Za-z0-9._/-]+)*(@sha256:[0-9a-f]+)?")
"""Matches strings that every reader of YAML takes for strings, unless they are in OTHER_YAML."""

OTHER_YAML = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def compose_string(text: str) -> str:
    """Write a YAML string that docker compose, which substitutes variables at $, reads as `text`."""
    return yaml_string(text.replace("$", "$$"))


def kubernetes_string(text: str) -> str:
    """Write a YAML string of a container's command or environment, where Kubernetes substitutes $(NAME)."""
    return yaml_string(text.replace("$", "$$"))


def _yaml_character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def code_span(text: str) -> str:
    """Format text as code in Markdown, also in a table, whichever backticks and bars it contains."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, blank = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{blank}{text}{blank}{fence}".replace("|", "\\|")


def shell_word(text: str) -> str:
    """Return a word of a shell command, in double quotes if necessary."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:./-]+", text):
        return text
    return f'"{within_quotes(text)}"'


def command(words: Sequence[str]) -> str:
    """Return a Python string of a command's words that shlex.split splits into the same words."""
    return json.dumps(shlex.join(words), ensure_ascii=False)


def within_quotes(text: str) -> str:
    """Escape a part of a shell word that is in double quotes."""
    quoted = re.sub(r'(["\\$`])', r"\\\1", text)
    # Within double quotes in an array, bash puts an extra byte before these characters.
    return re.sub("[\x01\x7f]", lambda control: f"\"$'\\{ord(control[0]):03o}'\"", quoted)


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
    environment.filters.update(
        docker=docker_value,
        exec_form=exec_form,
        yaml=yaml_string,
        code=code_span,
        compose=compose_string,
        kubernetes=kubernetes_string,
        shell=shell_word,
        quoted=within_quotes,
        command=command,
    )
    return environment
