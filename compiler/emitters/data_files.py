"""The files beside a recipe that its artifact takes along: chat template, transform, prompts to evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.lowering.sources import is_inline

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

INLINE_FILE = "chat_template.jinja"
"""Where a template that stands in the recipe itself is written."""


def template_file(program: Program) -> str | None:
    """The template's path in the artifact, None when the tokenizer's own is used."""
    template = program.recipe.data.chat_template
    if template is None:
        return None
    return INLINE_FILE if is_inline(template) else template


def data_files(program: Program) -> dict[str, bytes]:
    """Contents of those files by their path in the artifact."""
    data, files = program.recipe.data, {}
    path = template_file(program)
    if data.chat_template is not None and path is not None:
        inline = is_inline(data.chat_template)
        files[path] = data.chat_template.encode() if inline else _read(program, data.chat_template)
    for transform in data.transforms.values():
        path = transform.partition(":")[0]
        files[path] = _read(program, path)
    if program.recipe.evaluate.prompts is not None:
        files[program.recipe.evaluate.prompts] = _read(program, program.recipe.evaluate.prompts)
    return files


def _read(program: Program, path: str) -> bytes:
    return (program.source.parent / path).read_bytes()
