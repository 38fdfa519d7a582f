"""Where the weights are that the server loads: a folder, a gs:// address or a Hugging Face id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from recipec.compiler.lowering import catalog

if TYPE_CHECKING:
    from recipec.spec.language import Recipe

Kind = Literal["folder", "bucket", "hub"]

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
"""What a Hugging Face id looks like."""

OWN_MODELS = "recipec/"
"""The start of the ids of models that this project writes itself, which are on no hub."""


@dataclass(frozen=True)
class ServedWeights:
    """Weights of a model or of an adapter.

    Attributes:
        kind: a "folder" of the machine, a "bucket" that they are copied from, or the "hub".
        address: a folder relative to the artifact's, absolute or below ~/; a gs:// address; a Hugging Face
            id. "" for a folder that no recipe can know, which whoever starts the server names.
        revision: of the Hugging Face repository, None for its main branch.
    """

    kind: Kind
    address: str
    revision: str | None = None

    @property
    def local(self) -> bool:
        """Whether the server finds them on the machine, without asking the hub."""
        return self.kind != "hub"


def model_weights(recipe: Recipe) -> ServedWeights:
    """The weights that vLLM is started with: the merged ones, or an adapter's base."""
    serve = recipe.server
    if serve.model is not None:
        return _weights(serve.model, recipe.model.revision if serve.model == recipe.model.id else None)
    if serve.weights == "merged":
        return _output(recipe.merge.output)
    if catalog.is_directory(recipe.model.id) and not recipe.model.id.startswith(("/", "~/")):
        # Relative to the recipe's folder, which the artifact's machine does not have.
        return ServedWeights("folder", "")
    return _weights(recipe.model.id, recipe.model.revision)


def adapter_weights(recipe: Recipe) -> ServedWeights | None:
    """The PEFT adapter that merge.py writes, None where merged weights are served."""
    if recipe.server.weights == "merged":
        return None
    return _output(recipe.merge.output.rstrip("/") + "-adapter")


def _output(address: str) -> ServedWeights:
    """What merge.py writes: below the artifact's folder, or to an address."""
    address = address.rstrip("/")
    if address.startswith("gs://"):
        return ServedWeights("bucket", address)
    # Other addresses than gs:// are not copied: the folder that they were copied to has to be named.
    return ServedWeights("folder", "" if "://" in address else address)


def _weights(text: str, revision: str | None) -> ServedWeights:
    if text.startswith("gs://"):
        return ServedWeights("bucket", text.rstrip("/"))
    if text.startswith(OWN_MODELS) or "://" in text:
        return ServedWeights("folder", "")
    if not catalog.is_directory(text) and HUB_ID.fullmatch(text):
        return ServedWeights("hub", text, revision)
    # ~ alone and ~user are no folders of weights that every shell and engine reads alike.
    return ServedWeights(
        "folder", "" if text.startswith("~") and not text.startswith("~/") else text.rstrip("/")
    )
