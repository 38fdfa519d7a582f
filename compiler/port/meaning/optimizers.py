"""The optimizers that the tools name, as the recipe's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.port.keys import Keys


@dataclass(frozen=True)
class Translation:
    """What a name of an optimizer means here.

    Attributes:
        name: of the recipe's optimizer that comes nearest.
        note: how it differs, "" where the arithmetic is the same.
        same: whether it is the same rule, though in other precision: another rule's updates are an error.
    """

    name: str
    note: str = ""
    same: bool = True


ADAMW = Translation("adamw")


def _another(name: str, note: str) -> Translation:
    return Translation(name, note, same=False)


_FULL = "its state is kept in float32 here, not in {bits} bits: the same rule, more precise, with more memory"
_EIGHT = Translation("adamw", _FULL.format(bits=8))
_FOUR = Translation("adamw", _FULL.format(bits=4))
_LOW_RANK = (
    "gradients are not projected to a low rank here: this is plain AdamW, whose updates are others and "
    "whose state is larger"
)

NAMES: Mapping[str, Translation] = {
    # PyTorch's, and other implementations of the same arithmetic.
    **dict.fromkeys(("adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_torch_xla"), ADAMW),
    **dict.fromkeys(("adamw_torch_npu_fused", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit"), ADAMW),
    "pagedadamw": ADAMW,
    "adafactor": Translation("adafactor"),
    "sgd": Translation("sgd"),
    **dict.fromkeys(
        ("lion", "lion_pytorch", "lion_32bit", "paged_lion", "paged_lion_32bit"), Translation("lion")
    ),
    "pagedlion": Translation("lion"),
    # States in few bits.
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), _EIGHT),
    **dict.fromkeys(("adamw8bit", "pagedadamw8bit", "ao_adamw_8bit", "ao_adamw_fp8", "adamwfp8"), _EIGHT),
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit", "adamw4bit"), _FOUR),
    **dict.fromkeys(
        ("lion_8bit", "paged_lion_8bit", "lion8bit", "pagedlion8bit"),
        Translation("lion", _FULL.format(bits=8)),
    ),
    # Others of the same kin.
    "adam": Translation(
        "adamw", "Adam adds its weight decay to the gradient, AdamW takes it from the weights"
    ),
    "cpuoffloadoptimizer": Translation("adamw", "its state stays on the devices here, not on the host"),
    "adamw_anyprecision": Translation("adamw", "its state is kept in float32 here, without Kahan summation"),
    "optimi_adamw": Translation("adamw", "the update is done in float32 here, without Kahan summation"),
    # Other rules.
    **dict.fromkeys(
        ("galore_adamw", "galore_adamw_8bit", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise"),
        _another("adamw", _LOW_RANK),
    ),
    **dict.fromkeys(
        ("apollo_adamw", "apollo_adamw_layerwise", "q_galore_adamw8bit"), _another("adamw", _LOW_RANK)
    ),
    **dict.fromkeys(
        ("galore_adafactor", "galore_adafactor_layerwise"),
        _another("adafactor", _LOW_RANK.replace("AdamW", "Adafactor")),
    ),
    "schedule_free_adamw": _another("adamw", "AdamW with its schedule: weights are not averaged here"),
    "schedule_free_sgd": _another("sgd", "SGD with its schedule: weights are not averaged here"),
    "stable_adamw": _another("adamw", "updates are not clipped by their root mean square here"),
    "grokadamw": _another("adamw", "gradients are not filtered or amplified here"),
    **dict.fromkeys(
        ("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
        _another("adamw", "AdamW in its place: there is no second, slow mean of the gradients"),
    ),
    "came_pytorch": _another(
        "adafactor", "Adafactor in its place: updates are not scaled by their confidence"
    ),
    "adopt_adamw": _another("adamw", "AdamW in its place: ADOPT normalises before the momentum"),
}
"""By the names that transformers, Axolotl, torchtune and litgpt use, in lower case."""


def translate(name: str) -> Translation:
    """What the recipe's optimizer is called.

    Args:
        name: as transformers' and Axolotl's `optim` or `optimizer` has it ("adamw_torch_fused"), or a class
            ("torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit").
    """
    last = name.strip().rsplit(".", 1)[-1].lower()
    return NAMES.get(last, _another("adamw", "AdamW in its place makes other updates"))


def say(keys: Keys, key: str, name: str, found: Translation, help: str) -> None:
    """Says what becomes of an optimizer; one of another rule is an error.

    Args:
        key: that names it.
        help: a name that there is.
    """
    sets = {"train.optimizer.name": found.name}
    if not found.same:
        message = f"the optimizer {name} has no counterpart here: {found.note}"
        keys.refuse(key, "E1163", message, f"{key}: {help}")
    keys.say(key, sets, found.note)


def arguments(text: str | Mapping[str, object] | None) -> dict[str, str]:
    """`optim_args` ("beta1=0.9, eps=1e-6", or a mapping) as a mapping of texts.

    Raises:
        ValueError: when a piece of the text is no NAME=VALUE.
    """
    if not text:
        return {}
    if isinstance(text, Mapping):
        return {str(key): str(value) for key, value in text.items()}
    if not isinstance(text, str):
        raise ValueError(f"`{text}` is neither text nor a mapping")
    out = {}
    for piece in text.replace(" ", "").split(","):
        name, equals, value = piece.partition("=")
        if not equals:
            raise ValueError(f"`{piece}` is not NAME=VALUE")
        out[name] = value
    return out
