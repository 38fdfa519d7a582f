"""The folders in which a TPU VM keeps what a run reads and writes, besides its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipec.compiler.vllm.weights import OWN_MODELS

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

LARGE_MODEL = 30e9
"""Above this size in bytes, two copies of the weights do not fit a TPU VM's boot disk of 97 GB, next to the
operating system."""


@dataclass(frozen=True)
class Places:
    """Folders and flags, all relative to the folder that holds the artifact.

    Attributes:
        size: size of the base's weights in bfloat16, in bytes.
        large: whether base and merged weights are too large for the boot disk, so that both use the RAM disk.
        staging: the folder of the base's weights, named after the model; on a RAM disk.
        merged: the folder or address of the merged model.
        merge_flags: flags of merge.py besides --model, with their values.
    """

    size: int
    large: bool
    staging: str
    merged: str
    merge_flags: Mapping[str, str]


def places(program: Program) -> Places:
    """Return the places of a recipe's run."""
    recipe = program.recipe
    size = program.base_parameters * 2
    large = size > LARGE_MODEL and program.accelerator.platform != "cpu"
    # Two copies of a large model are on the RAM disk: the base and the merged weights.
    work = f"/dev/shm/{program.name}" if large else program.name
    merged = _below(work, recipe.merge.output.rstrip("/"))
    flags = {"output": work} if large else {}
    if large and "://" not in recipe.checkpoint.directory:
        flags["checkpoint"] = in_artifact(program, recipe.checkpoint.directory)
    return Places(size, large, _staging(program), merged, flags)


def in_artifact(program: Program, path: str) -> str:
    """Return a folder of the recipe relative to the artifact's parent folder. Absolute paths and addresses
    stay."""
    return _below(program.name, path)


def _below(folder: str, path: str) -> str:
    return path if "://" in path or path.startswith(("/", "~")) else f"{folder}/{path}"


def is_hub_id(model: str) -> bool:
    """Return whether a model is named by its Hugging Face id rather than by a folder or an address."""
    return not model.startswith((".", "/", "~", OWN_MODELS))


def _staging(program: Program) -> str:
    if program.accelerator.platform == "cpu":
        return "MODEL_DIR"
    name = program.recipe.model.id.rstrip("/").rpartition("/")[2]
    return "/dev/shm/" + re.sub(r"[^A-Za-z0-9._-]+", "-", name)
