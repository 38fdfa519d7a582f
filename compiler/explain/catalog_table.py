"""`recipe models`: list the catalog's ids, with their sizes and what works with each."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipec.compiler import catalog
from recipec.compiler.catalog import E0801, E0803
from recipec.compiler.pages.document import Document, Section, Table, Text
from recipec.compiler.vllm.features import implementation
from recipec.compiler.wording import listing, quantity
from recipec.runtime.model.families import FAMILIES, Architecture, Family
from recipec.runtime.model.reach import reach
from recipec.spec.diagnostics import Diagnostic

SERVED = {"jax": "tpu-inference", "torch": "vLLM on torchax", "transformers": "transformers on torchax"}
"""The projects whose model vllm-tpu may run, in words."""
TRAINED = ("lora", "qlora", "full")
"""The methods by which every trainable model can be trained."""


@dataclass(frozen=True)
class KnownModel:
    """A model of the catalog.

    Attributes:
        family: in words.
        parameters: of the text model.
        chat: whether it is tuned for chat.
        trained: the methods by which it can be trained.
        splash: whether it trains with splash attention.
        served: whose model vllm-tpu runs; None if it has none.
        copy: the requested id if it is a copy, of which this is the original.
    """

    id: str
    family: str
    parameters: int
    chat: bool | None
    trained: tuple[str, ...]
    splash: bool
    served: str | None
    copy: str | None = None


def models(word: str) -> list[KnownModel]:
    """Return the models whose id or family contains a word, in the catalog's order; for a copy's id, its
    original.

    Args:
        word: upper and lower case are alike; "" for all.
    """
    ids = [id for id in catalog.entries() if word.lower() in f"{id}\n{_family(id)}".lower()]
    bare = _bare(word)
    if not ids and bare:  # "gemma4-31b" and "Gemma 4 31B" both match gemma-4-31B
        ids = [id for id in catalog.entries() if bare in _bare(id) or bare in _bare(_family(id))]
    if not ids and "/" in word and (original := catalog.original_of(word)):
        return [_known(original, word)]
    return [_known(id) for id in ids]


def document(models: Sequence[KnownModel]) -> Document:
    """Return the models as a table for each family, and for each kind of server within one."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for model in models:
        attention = "splash attention, " if model.splash else ""
        row = (model.id, quantity(model.parameters), "tuned for chat" if model.chat else "")
        groups.setdefault(f"{model.family}: {attention}served by {model.served}", []).append(row)
    sections = [Section("", title, (), [Table((), rows, words=(2,))]) for title, rows in groups.items()]
    return Document("", [*sections, Section("", "", (), [*map(Text, _sentences(models))])])


def _sentences(models: Sequence[KnownModel]) -> Iterator[str]:
    if models:
        yield (
            "Each is trained with LoRA, with QLoRA, or in all its weights; a copy is recognized as its "
            "original."
        )
    for model in models:
        if model.copy is not None:
            quantized = catalog.is_quantized(model.copy)
            why = f" whose weights are stored quantized: use {model.id}" if quantized else ""
            yield f"{model.copy} is a copy of {model.id}{why}"


def unknown(word: str) -> Diagnostic:
    """Explain why there is no model that matches a word."""
    known = f"known are checkpoints of {listing(catalog.family_titles())}"
    if others := catalog.untrainable_families(word):
        return Diagnostic(E0803, f"this version cannot train models of {listing(others, 'or')}", "", known)
    return Diagnostic(
        E0801,
        f"no model in the catalog has `{word}` in its id or family",
        "",
        f"{known}, which `recipe models` lists; `recipe models add OWNER/NAME` adds any "
        "other model of these families",
    )


def _known(id: str, copy: str | None = None) -> KnownModel:
    entry = catalog.entries()[id]
    family = FAMILIES[entry["family"]]
    return KnownModel(
        id=id,
        family=_family(id),
        parameters=_total(family, family.architecture(entry["config"])),
        chat=entry.get("chat"),
        trained=TRAINED,
        splash=family.flash_attention,
        served=SERVED.get(implementation(entry["config"]) or ""),
        copy=copy,
    )


@functools.cache
def _total(family: Family, architecture: Architecture) -> int:
    """Return a model's parameters; several entries have the same architecture."""
    return reach(family.parameters(architecture), ()).total


def _family(id: str) -> str:
    family = catalog.entries()[id].get("family")
    return FAMILIES[family].title if family else ""


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
