"""The files next to a recipe that its artifact copies: chat template, functions, schemas, prompts to
evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.lowering.references import functions, is_inline, schemas

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

INLINE_FILE = "chat_template.jinja"
"""Where a template is written that the recipe contains as text."""


def template_files(program: Program) -> dict[str, str]:
    """Return the paths in the artifact of all chat templates, by their name in the recipe or by their
    text."""
    paths: dict[str, str] = {}
    inline = 0
    for template in program.recipe.data.templates.values():
        paths[template] = template
        if is_inline(template):
            inline += 1
            paths[template] = INLINE_FILE if inline == 1 else f"chat_template_{inline}.jinja"
    return paths


def data_files(program: Program) -> dict[str, bytes]:
    """Return the contents of the copied files by their path in the artifact."""
    files = {}
    for template, path in template_files(program).items():
        files[path] = template.encode() if is_inline(template) else _read(program, template)
    for function in functions(program.recipe).values():
        path = function.partition(":")[0]
        files[path] = _read(program, path)
    for path in schemas(program.recipe).values():
        files[path] = _read(program, path)
    if program.recipe.evaluate.prompts is not None:
        files[program.recipe.evaluate.prompts] = _read(program, program.recipe.evaluate.prompts)
    return files


def _read(program: Program, path: str) -> bytes:
    return (program.source.parent / path).read_bytes()
