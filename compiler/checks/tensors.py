"""Check an added model before anyone downloads the weights: its files against its lock, its config.json
against the catalog's, and every tensor of the checkpoint against the family. A folder's tensors are checked
too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import groupby

from recipec.compiler import catalog
from recipec.compiler.catalog import E0813, Listed, Model, UnknownModel
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.wording import listing, plural
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.weights.agreement import Fault, Kind, embeddings, faults, prefix_of
from recipec.runtime.weights.quantized_formats import Unpaired, format_of
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

WHERE = "model.id"


E0811 = Code(
    "E0811",
    "tensor missing in the checkpoint",
    cause="The list of tensors from `recipe models add` lacks a tensor of the model, or has no text "
    "model at all. config.json and the weights belong to different models, or the tensors have "
    "other names than the family's.",
    cure="Use the model's original, or a checkpoint saved by transformers.",
)

E0812 = Code(
    "E0812",
    "tensor has another shape",
    cause="A tensor of the checkpoint does not have the shape that the keys of config.json in the "
    "message give.",
    cure="Use another revision or another checkpoint. config.json and the weights must belong together.",
)

E0814 = Code(
    "E0814",
    "tensor of a layer that the model does not have",
    cause="The checkpoint has more layers than num_hidden_layers of its config.json.",
    cure="Use another revision or another checkpoint. config.json and the weights must belong together.",
)

CODES = {
    Kind.MISSING: E0811,
    Kind.SHAPE: E0812,
    Kind.TYPE: E0813,
    Kind.LAYER: E0814,
}

OTHER = "use another revision or another checkpoint: its config.json describes other tensors"


def check(facts: Facts) -> Iterator[Diagnostic]:
    if facts.model is None:
        return
    model = facts.model.published or facts.model
    if model.added is not None:
        yield from _against_catalog(model)
    try:
        listed = model.tensors(facts.folder)
    except UnknownModel as error:
        yield Diagnostic(error.code, str(error), WHERE, error.help)
        return
    if listed is not None:
        yield from _tensors(model, *listed, facts.model.architecture.vision is not None)


W0816 = Code(
    "W0816",
    "added model differs from the catalog",
    cause="The config.json from `recipe models add` has other sizes than the catalog has for the id, "
    "or for the model of which it is a copy. The added one is used, because its weights are loaded.",
    cure="Nothing, if this is intended. Otherwise remove the folder, and the catalog is used.",
)


def _against_catalog(model: Model) -> Iterator[Diagnostic]:
    """Report where the added config.json differs from the catalog's, which would be used without the added
    model."""
    entry = catalog.entry_of(model.id)
    if entry is None or "config" not in entry:
        return
    known = FAMILIES[entry["family"]].architecture(entry["config"])
    ours, theirs = asdict(model.architecture), asdict(known)
    names = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    if names:
        yield Diagnostic(
            W0816,
            f"{listing(sorted(names))} in {model.origin} {'differs' if len(names) == 1 else 'differ'} from "
            f"the catalog's for `{model.id}`: the added model is used",
            WHERE,
            f"remove {model.added.name if model.added else ''} to use the catalog's",
        )


def _tensors(model: Model, place: str, listed: Mapping[str, Listed], seeing: bool) -> Iterator[Diagnostic]:
    """Yield one diagnostic for each kind of fault, with the first tensor and the number of further ones.

    Args:
        place: the file or folder that lists the tensors.
        seeing: whether the recipe trains on pictures, and so reads the vision tower.
    """
    form = format_of(model.family, model.config)
    if form is not None:
        try:
            listed = form.unpacked(listed, lambda codes, _, shape: Listed(codes.file, "BF16", shape))
        except Unpaired as error:
            yield _said(model, place, error.fault.kind, [error.fault])
            return
    prefix = prefix_of(model.family, listed)
    if prefix is None:
        looked_for = listing((name for _, name in embeddings(model.family)), "or")
        yield Diagnostic(
            E0811,
            f"{place}: none of the {len(listed):,} tensors is a text embedding, which would be {looked_for}",
            WHERE,
            OTHER,
        )
        return
    # The tensors' names show whether each expert has its own tensor or all experts share one.
    shapes = {name: tensor.shape for name, tensor in listed.items()}
    architecture = model.family.architecture_of(model.config, shapes)
    if seeing and (tower := model.family.vision(model.config, shapes)) is not None:
        architecture = replace(architecture, vision=tower)
    mismatches = faults(model.family, architecture, model.config, listed, prefix)
    order = [*Kind]
    for kind, members in groupby(
        sorted(mismatches, key=lambda mismatch: order.index(mismatch.kind)), lambda mismatch: mismatch.kind
    ):
        yield _said(model, place, kind, [*members])


def _said(model: Model, place: str, kind: Kind, mismatches: list[Fault]) -> Diagnostic:
    first = mismatches[0]
    file = f" ({first.file})" if first.file else ""
    more = len(mismatches) - 1
    others = f", and {plural(more, 'other')} too" if more else ""
    help = model.unquantized if kind is Kind.TYPE else OTHER
    return Diagnostic(CODES[kind], f"{place}: {first.text}{file}{others}", WHERE, help)
