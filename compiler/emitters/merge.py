"""merge.py: from the trained adapters and the base to merged weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.emitters.data_files import template_file
from recipec.compiler.emitters.python_text import Name, Value, assignment, docstring, string
from recipec.compiler.emitters.render import render
from recipec.compiler.emitters.settings import about, base_settings

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program


def emit_merge(program: Program) -> str:
    """The text of merge.py."""
    recipe = program.recipe
    constants: dict[str, Value] = {
        "MODEL": base_settings(program),
        "CHECKPOINT": recipe.checkpoint.directory,
        "OUTPUT": recipe.merge.output,
        "DTYPE": recipe.merge.dtype,
        "MAX_SHARD_SIZE": recipe.merge.max_shard_size,
    }
    adapter = recipe.merge.adapter and program.lora is not None
    if adapter:
        constants["ADAPTER"] = True
    if recipe.merge.quantization is not None:
        constants["QUANTIZATION"] = recipe.merge.quantization
    template = template_file(program)
    return render(
        "merge.py",
        title=docstring(f"{_purpose(program)} {recipe.model.id}."),
        about=about(program),
        adapters=program.lora is not None,
        chat_template=template and assignment("CHAT_TEMPLATE", Name(f"ARTIFACT / {string(template)}")),
        adapter=adapter,
        quantization=recipe.merge.quantization,
        constants=[assignment(name, value) for name, value in constants.items()],
    )


def _purpose(program: Program) -> str:
    if program.lora is None:
        return "Writes the weights that train.py makes in the format of"
    return "Merges the adapters that train.py makes into"
