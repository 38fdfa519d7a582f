"""Read rotary embeddings from a config.json, in its new or old spelling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..rope import KINDS, Rope
from .family import UnsupportedCheckpoint, built_in, integer, number, section

THETA = 10_000.0
"""transformers' default rotary base."""

ALIASES = {"su": "longrope", "mrope": "default"}
"""Older names. For text, positions are the same in all three of mrope's sections: a plain rotation."""

CONTEXT = "original_max_position_embeddings"
SHARE = "partial_rotary_factor"


def read_rope(
    config: Mapping[str, Any],
    model: str,
    *,
    head_dim: int | None = None,
    share: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """Read one rotary embedding for all layers, from either spelling of transformers: `rope_theta` and
    `rope_scaling`, or both in `rope_parameters`.

    A family whose default max_position_embeddings is not 2048 adds it to the config: it is the context length
    of a kind that does not give its own.

    Args:
        config: the text part of a config.json.
        model: the model's name in a message.
        head_dim: features of a head; None for the number that the config gives or implies.
        share: the family's default share of a head that rotates; None if the model rotates only whole heads.
        interleaved: whether the family's pairs are neighbors.

    Raises:
        UnsupportedCheckpoint: when the kind is not supported, differs between layers, or a value is missing
            or makes no sense.
    """
    key, scaling = _section(config)
    if _nested(scaling):
        raise UnsupportedCheckpoint(f"config.json: {key} differs between layers; {model} has one", key)
    if head_dim is None:
        hidden, heads = integer(config, "hidden_size", 4096), integer(config, "num_attention_heads", 32)
        head_dim = hidden // heads if config.get("head_dim") is None else integer(config, "head_dim")
    base = _theta(scaling if scaling.get("rope_theta") is not None else config)
    rope = Rope(base, share=_share(config, key, share, model), interleaved=interleaved)
    turned = rope.turned(head_dim)
    if turned < 2 or turned % 2:
        at_fault = "head_dim" if rope.share == 1.0 else SHARE
        raise UnsupportedCheckpoint(
            f"config.json: {at_fault}: of a head's {head_dim} features, {turned} would turn; "
            "they turn in pairs",
            at_fault,
        )
    return _scaled(rope, config, key, turned)


def read_ropes(
    config: Mapping[str, Any],
    layer_types: Iterable[str],
    model: str,
    *,
    head_dim: int | None = None,
    share: float | None = None,
    interleaved: bool = False,
) -> Mapping[str, Rope]:
    """Read a rotary embedding for each type of layer: from its section of `rope_parameters`, or one for all.

    Args:
        layer_types: of the layers that rotate.

    Raises:
        UnsupportedCheckpoint: as `read_rope`, and when a type of layer has no section.
    """
    key, scaling = _section(config)
    types = sorted(set(layer_types))
    nested = _nested(scaling)
    out = {}
    for kind in types:
        alone = config
        if nested:
            if not isinstance(scaling.get(kind), Mapping):
                raise UnsupportedCheckpoint(f"config.json: {key} has none for layers of {kind}", key)
            # As in transformers, a layer's own section must hold its context length itself.
            left_out = (CONTEXT, "rope_scaling")
            alone = {k: v for k, v in config.items() if k not in left_out} | {key: scaling[kind]}
        out[kind] = read_rope(alone, model, head_dim=head_dim, share=share, interleaved=interleaved)
    return out


def _section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the scaling's key and section."""
    scaling = section(config, "rope_scaling")
    return ("rope_scaling", scaling) if scaling else ("rope_parameters", section(config, "rope_parameters"))


def _nested(scaling: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in scaling.values())


def _theta(place: Mapping[str, Any]) -> float:
    theta = number(place, "rope_theta", THETA)
    if theta <= 1:
        raise UnsupportedCheckpoint(f"config.json: rope_theta is {theta:g}, not above 1", "rope_theta")
    return theta


def _share(config: Mapping[str, Any], key: str, default: float | None, model: str) -> float:
    """Return how much of a head rotates."""
    scaling = section(config, key)
    places = [place for place in (scaling, config) if place.get(SHARE) is not None]
    if default is None:
        for place in places:
            built_in(place, SHARE, 1.0, model)
        return 1.0
    shares = [number(place, SHARE, 1.0) for place in places] or [default]
    if max(shares) > 1:
        raise UnsupportedCheckpoint(f"config.json: {SHARE} is {max(shares):g}, above 1", SHARE)
    if len(set(shares)) > 1:
        raise UnsupportedCheckpoint(
            f"config.json: {SHARE} is {shares[0]:g} in {key} and {shares[1]:g} next to it",
            SHARE,
        )
    return shares[0]


def _scaled(rope: Rope, config: Mapping[str, Any], key: str, turned: int) -> Rope:
    """Apply the scaling of a config's section to a plain embedding."""
    scaling = section(config, key)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "yarn" and scaling.get("short_factor") is not None:
        kind = "longrope"  # An older name for it too, among Phi 3's.
    if kind not in KINDS:
        known = f"{', '.join(KINDS[:-1])} and {KINDS[-1]}"
        raise UnsupportedCheckpoint(f"config.json: {key} is of type {kind!r}; known are {known}", key)
    rope = replace(rope, kind=kind)
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, factor=_factor(scaling, key))
    if kind == "proportional":
        return replace(rope, factor=_factor(scaling, key) if scaling.get("factor") is not None else 1.0)
    if kind == "dynamic":
        if turned == 2:
            raise UnsupportedCheckpoint(
                f"config.json: {key}: dynamic scaling needs two pairs of features", key
            )
        return replace(rope, factor=_factor(scaling, key), original=_longest(config))
    rope = replace(rope, original=_original(config, scaling))
    if kind == "longrope":
        return _longrope(rope, config, scaling, key, turned)
    if kind == "yarn":
        return _yarn(rope, config, scaling, key)
    low, high = (_required(scaling, f"{name}_freq_factor", key) for name in ("low", "high"))
    if low != high:  # as Llama 4 Scout has them: nothing is interpolated
        _rising(low, high, ("low_freq_factor", "high_freq_factor"), key)
    return replace(rope, factor=_factor(scaling, key), low=low, high=high)


def _yarn(rope: Rope, config: Mapping[str, Any], scaling: Mapping[str, Any], key: str) -> Rope:
    if scaling.get("factor") is None:
        factor = _longest(config) / rope.original
        if factor < 1:
            raise UnsupportedCheckpoint(
                f"config.json: {key}: {CONTEXT} ({rope.original:g}) is above max_position_embeddings", key
            )
    else:
        factor = _factor(scaling, key)
    slow, fast = number(scaling, "beta_slow", 1.0), number(scaling, "beta_fast", 32.0)
    _rising(slow, fast, ("beta_slow", "beta_fast"), key)
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UnsupportedCheckpoint(
            f"config.json: truncate is {truncate!r}, neither true nor false", "truncate"
        )

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1

    # Zero means absent, as in transformers.
    names = ("mscale", "mscale_all_dim")
    factors = [number(scaling, name, 1.0) for name in names if scaling.get(name) not in (None, 0)]
    attention = scale(factors[0]) / scale(factors[1]) if len(factors) == 2 else scale(1.0)
    attention = number(scaling, "attention_factor", attention)
    return replace(rope, factor=factor, low=slow, high=fast, attention=attention, truncate=truncate)


def _longrope(
    rope: Rope, config: Mapping[str, Any], scaling: Mapping[str, Any], key: str, turned: int
) -> Rope:
    factor = _longest(config) / rope.original if scaling.get("factor") is None else _factor(scaling, key)
    attention = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(rope.original))
    lists = []
    for name in ("short_factor", "long_factor"):
        values = scaling.get(name)
        if not isinstance(values, list | tuple) or len(values) != turned // 2:
            long = f"{len(values)} numbers" if isinstance(values, list | tuple) else repr(values)
            raise UnsupportedCheckpoint(
                f"config.json: {key}: {name} is {long}, not one number for each of {turned // 2} frequencies",
                name,
            )
        lists.append(tuple(number({name: value}, name, math.nan) for value in values))
    attention = number(scaling, "attention_factor", attention)
    return replace(rope, attention=attention, short=lists[0], long=lists[1])


def _longest(config: Mapping[str, Any]) -> int:
    return integer(config, "max_position_embeddings", 2048)


def _original(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Return the context length before extension: next to the section, in it, or the longest position."""
    holder = config if config.get(CONTEXT) is not None else scaling
    original = _longest(config) if holder.get(CONTEXT) is None else integer(holder, CONTEXT)
    if original < 2:
        raise UnsupportedCheckpoint(f"config.json: {CONTEXT} is {original}, not a context length", CONTEXT)
    return original


def _factor(scaling: Mapping[str, Any], key: str) -> float:
    factor = _required(scaling, "factor", key)
    if factor < 1:
        raise UnsupportedCheckpoint(f"config.json: {key}: factor is {factor:g}, below 1", key)
    return factor


def _required(scaling: Mapping[str, Any], name: str, key: str) -> float:
    if scaling.get(name) is None:
        raise UnsupportedCheckpoint(f"config.json: {key} has no {name}", key)
    return number(scaling, name, 1.0)


def _rising(low: float, high: float, names: tuple[str, str], key: str) -> None:
    if low >= high:
        raise UnsupportedCheckpoint(
            f"config.json: {key}: {names[0]} ({low:g}) is not below {names[1]} ({high:g})", key
        )
