"""Emit merge.py, which makes merged weights from the trained adapters and the base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.emitters.python_text import Value, assignment, docstring
from recipec.compiler.emitters.render import render
from recipec.compiler.emitters.settings import about, base_settings, chat_template
from recipec.compiler.lowering.settings import model_settings

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program


def emit_merge(program: Program) -> str:
    """Return the text of merge.py."""
    recipe = program.recipe
    constants: dict[str, Value] = {
        "MODEL": base_settings(model_settings(recipe, program.family)),
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
    return render(
        "merge.py",
        title=docstring(f"{_purpose(program)} {recipe.model.id}."),
        about=about(program),
        wheel=program.installs_runtime,
        adapters=program.lora is not None,
        chat_template=chat_template(program),
        adapter=adapter,
        quantization=recipe.merge.quantization,
        constants=[assignment(name, value) for name, value in constants.items()],
    )


def _purpose(program: Program) -> str:
    if program.lora is None:
        return "Write the weights that train.py makes in the format of"
    return "Merge the adapters that train.py makes into"
