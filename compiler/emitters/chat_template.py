"""The chat template that a recipe names or holds, as a file of the artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.checks.data import is_inline

if TYPE_CHECKING:
    from compiler.program import Program

INLINE_FILE = "chat_template.jinja"
"""Where a template that stands in the recipe itself is written."""


def template_file(program: Program) -> str | None:
    """The template's path in the artifact, None when the tokenizer's own is used."""
    template = program.recipe.data.chat_template
    if template is None:
        return None
    return INLINE_FILE if is_inline(template) else template


def template_files(program: Program) -> dict[str, bytes]:
    """The template as a file of the artifact; nothing when the tokenizer's own is used."""
    template, path = program.recipe.data.chat_template, template_file(program)
    if template is None or path is None:
        return {}
    if is_inline(template):
        return {path: template.encode()}
    return {path: (program.source.parent / template).read_bytes()}
