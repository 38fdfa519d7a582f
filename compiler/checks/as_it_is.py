"""Check recipes for models that no family describes, and say which features these models lack."""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler import catalog
from recipec.compiler.lowering.facts import Facts
from recipec.runtime.model.families.transformers import TransformersArchitecture
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

ONLY = "recipe build --backend torchax"


N0946 = Code(
    "N0946",
    "model without a family",
    cause="No family describes the model. The TorchAX backend trains it with transformers' own code, "
    "with the limits that the message lists.",
    cure="Nothing, or use a model of one of the families.",
)

E0947 = Code(
    "E0947",
    "model that cannot be packed",
    cause="Samples that share a row are separated by their positions, in the attention mask. Layers "
    "that carry a state from token to token do not use this mask. Other models are packed only if "
    "all their layers are known to use it.",
    cure="Write `data.packing: false`.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    model = facts.model
    if model is None or not isinstance(model.architecture, TransformersArchitecture):
        return
    architecture = model.architecture
    kind = architecture.model_type
    yield Diagnostic(
        N0946,
        f"no family describes {kind!r}, so `{ONLY}` trains it with transformers' own code. Attention has no "
        "kernel and stores all scores of a layer, which costs speed and memory. Samples of a packed row are "
        "separated only by their positions. Tensors are split over the mesh by their names, which "
        "`recipe explain RECIPE mesh` lists",
        "model.id",
    )
    if facts.recipe.data.packing and not packs(architecture):
        recurrent = architecture.recurrent
        yield Diagnostic(
            E0947,
            f"{kind!r} cannot be packed: "
            + (
                "some of its layers carry a state from token to token, across the border between samples"
                if recurrent
                else "its layers are not known to separate samples that share a row"
            ),
            "data.packing",
            "packing: false",
        )
    yield from _unavailable(facts, kind)


def packs(architecture: TransformersArchitecture) -> bool:
    """Return whether samples that share a row are known to stay apart."""
    return not architecture.recurrent and catalog.causal_models().get(architecture.model_type, False)


E0948 = Code(
    "E0948",
    "not available without a family",
    cause="For a model that no family describes, recipec trains only adapters, on weights in "
    "model.dtype, with transformers' own attention, on one host.",
    cure="Do what the help says, or use a model of one of the families.",
)


def _unavailable(facts: Facts, kind: str) -> Iterator[Diagnostic]:
    recipe, accelerator = facts.recipe, facts.accelerator

    def refused(what: str, path: str, help: str) -> Diagnostic:
        return Diagnostic(E0948, f"no family describes {kind!r}, and {what}", path, help)

    if recipe.lora is None:
        yield refused(
            "such models are trained only with adapters",
            "model.id",
            "lora: {rank: 16, targets: [q_proj, v_proj]}",
        )
    elif recipe.model.quantization is not None:
        yield refused("the weights of such models are not quantized", "model.quantization", "remove the line")
    if recipe.model.attention == "splash":
        yield refused("such models use transformers' own attention", "model.attention", "attention: dot")
    if accelerator is not None and accelerator.hosts > 1:
        yield refused(
            f"such models are trained on one host; {accelerator.name} has {accelerator.hosts}",
            facts.first_given("mesh.accelerator", "mesh.topology"),
            "use an accelerator with one host, such as v6e-8",
        )
    if recipe.checkpoint.local is not None:
        yield refused(
            "checkpoints of such models have a single location", "checkpoint.local", "remove the section"
        )
