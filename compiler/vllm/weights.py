"""The location of the weights that the server loads: a folder, a gs:// address or a Hugging Face id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from recipec.compiler import catalog

if TYPE_CHECKING:
    from recipec.spec.language import Recipe

Kind = Literal["folder", "bucket", "hub"]

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
"""Matches a Hugging Face id."""

OWN_MODELS = "recipec/"
"""Prefix for the ids of models that this project writes itself and that are not on the hub."""


@dataclass(frozen=True)
class ServedWeights:
    """Weights of a model or of an adapter.

    Attributes:
        kind: a "folder" of the machine, a "bucket" to copy them from, or the "hub".
        address: a folder relative to the artifact's, absolute or below ~/; a gs:// address; a Hugging Face
            id. "" for a folder that the recipe cannot know; the user names it when starting the server.
        revision: of the Hugging Face repository, None for its main branch.
    """

    kind: Kind
    address: str
    revision: str | None = None

    @property
    def local(self) -> bool:
        """Whether the server finds them on the machine, without contacting the hub."""
        return self.kind != "hub"


def model_weights(recipe: Recipe) -> ServedWeights:
    """Return the weights that vLLM starts with: the merged ones, or an adapter's base model."""
    serve = recipe.server
    if serve.model is not None:
        return _weights(serve.model, recipe.model.revision if serve.model == recipe.model.id else None)
    if serve.weights == "merged":
        return _output(recipe.merge.output)
    if catalog.is_directory(recipe.model.id) and not recipe.model.id.startswith(("/", "~/")):
        # The path is relative to the recipe's folder, which the artifact's machine does not have.
        return ServedWeights("folder", "")
    return _weights(recipe.model.id, recipe.model.revision)


def adapter_weights(recipe: Recipe) -> ServedWeights | None:
    """Return the PEFT adapter that merge.py writes; None if the server loads merged weights."""
    if recipe.server.weights == "merged":
        return None
    return _output(recipe.merge.output.rstrip("/") + "-adapter")


def _output(address: str) -> ServedWeights:
    """Return the output of merge.py: below the artifact's folder, or at an address."""
    address = address.rstrip("/")
    if address.startswith("gs://"):
        return ServedWeights("bucket", address)
    # Only gs:// addresses are copied. For others, the user has to name the folder of the copy.
    return ServedWeights("folder", "" if "://" in address else address)


def _weights(text: str, revision: str | None) -> ServedWeights:
    if text.startswith("gs://"):
        return ServedWeights("bucket", text.rstrip("/"))
    if text.startswith(OWN_MODELS) or "://" in text:
        return ServedWeights("folder", "")
    if not catalog.is_directory(text) and HUB_ID.fullmatch(text):
        return ServedWeights("hub", text, revision)
    # ~ alone and ~user are excluded: shells and engines read them differently.
    return ServedWeights(
        "folder", "" if text.startswith("~") and not text.startswith("~/") else text.rstrip("/")
    )
