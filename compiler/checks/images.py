"""Check the pictures of the data against the model, the objective, the mesh and the other keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.format_keys import WITH_PICTURES
from recipec.compiler.wording import listing
from recipec.runtime.data.pictures import refused_setting
from recipec.runtime.model.adapters import PROJECTOR
from recipec.runtime.model.families.towers import READERS
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

IMAGES = "data.images"

E0480 = Code(
    "E0480",
    "pictures for a model without a vision tower here",
    cause="`data.images` trains on pictures. The model reads none, or this version does not have its vision "
    "tower.",
    cure="Use a model of a family that the message names, or remove `data.images` to train on text alone.",
)

E0481 = Code(
    "E0481",
    "pictures with another objective",
    cause="Pictures are trained on with `objective: sft`. The other objectives compare several answers, or "
    "two models, and these steps do not pass pictures.",
    cure="Write `objective: sft`, or remove `data.images`.",
)

E0482 = Code(
    "E0482",
    "splash attention over pictures",
    cause="In this model the tokens of a picture see each other in both directions. The mask depends on the "
    "places of the pictures, and splash attention compiles its mask once.",
    cure="Write `attention: dot`, or leave the key to `auto`.",
)

E0483 = Code(
    "E0483",
    "pictures with tokens split over devices",
    cause="The axis cp gives the tokens of a row to several devices. A picture's features are on the device "
    "of its row, and are not exchanged.",
    cure="Give the devices of cp to fsdp.",
)

E0484 = Code(
    "E0484",
    "data settings that do not go together with pictures",
    cause="Pictures are read from conversations of all data before the run. A stream and texts without a "
    "chat template have no place for them.",
    cure="Remove the key that the message names, or `data.images`.",
)

E0485 = Code(
    "E0485",
    "vision tower trained without pictures",
    cause="`lora.vision` trains adapters in the vision tower and its projector, and `projector` in "
    "`lora.modules_to_save` all of the projector. Both are in the trained model only with `data.images`.",
    cure="Add `data.images`, or remove the key.",
)

E0486 = Code(
    "E0486",
    "setting that the model's image processor does not have",
    cause="The image processor of the checkpoint makes a picture's tokens. Only some processors can limit "
    "them, and Gemma 4's accepts certain numbers.",
    cure="Write what the help says. `longest_side` and `max_pixels` scale pictures down for every model.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _tower(facts)
    recipe, data = facts.recipe, facts.recipe.data
    if data.images is None:
        return
    model = facts.model
    tower = None if model is None else model.tower
    if model is not None and tower is None:
        models = listing(sorted({title for title, _ in READERS.values()}), "or")
        help = f"use a model of {models}; or remove data.images"
        message = f"{model.title} has no vision tower in this version, and data.images trains on pictures"
        yield Diagnostic(E0480, message, IMAGES, help, at_key=True)
    elif model is not None and (
        refused := refused_setting(data.images.tokens, data.images.tiles, _processor(model.config))
    ):
        key, reason, help = refused
        yield Diagnostic(E0486, f"{key}: {reason}", key, help, at_key=True)
    if recipe.train.objective != "sft":
        message = f"objective {recipe.train.objective} does not train on pictures"
        yield Diagnostic(E0481, message, "train.objective", "objective: sft, or remove data.images")
    if tower is not None and tower.both_ways and recipe.model.attention == "splash":
        assert model is not None
        yield Diagnostic(
            E0482,
            f"the tokens of a picture see each other in both directions in {model.title}, and the mask of "
            "splash attention does not follow the pictures",
            "model.attention",
            "attention: dot",
        )
    if facts.axes.get("cp", 1) > 1:
        yield Diagnostic(
            E0483,
            "cp splits a row's tokens over devices, and the features of its pictures are not split with them",
            facts.first_given("mesh.axes.cp", "mesh.axes"),
            "give the devices of cp to fsdp",
        )
    yield from _settings(facts)


def _processor(config: Mapping[str, Any]) -> str:
    """Return the kind of a model's image processor, as `runtime.data.pictures` names it."""
    kind = str(config.get("model_type"))
    return "qwen_vl" if kind.startswith("qwen") else kind


def _tower(facts: Facts) -> Iterator[Diagnostic]:
    """Refuse to train the tower or its projector without pictures."""
    lora = facts.recipe.lora
    if lora is None or facts.recipe.data.images is not None:
        return
    trained = {"lora.vision": lora.vision}
    saved = enumerate(lora.modules_to_save)
    trained |= {f"lora.modules_to_save[{i}]": name == PROJECTOR for i, name in saved}
    for key in (key for key, trains in trained.items() if trains):
        message = "without pictures, the model is trained without its vision tower and projector"
        yield Diagnostic(E0485, message, key, "data: {images: {}}; or remove it")


def _settings(facts: Facts) -> Iterator[Diagnostic]:
    """Refuse settings of the data that pictures do not go together with."""
    recipe, data = facts.recipe, facts.recipe.data
    if data.stream_window is not None:
        place, help = "data.stream_window", "remove the line, or data.images"
        yield Diagnostic(E0484, "a stream does not read pictures", place, help, at_key=True)
    if recipe.train.objective == "sft" and not data.formats & set(WITH_PICTURES):
        message = f"no sample of the format {listing(sorted(data.formats))} has pictures"
        place = facts.first_given("data.format", "data.train[0].format")
        yield Diagnostic(E0484, message, place, "format: chat, with the pictures in the messages")
