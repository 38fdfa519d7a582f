"""Check sharding rules against the model's parameters, and every split dimension against its axis."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator

from recipec.compiler.lowering.divided import Indivisible, indivisible
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.hardware import arranged
from recipec.compiler.wording import anywhere, divisors, grouped, listing, split_layer
from recipec.runtime.model.adapters import placed
from recipec.runtime.model.families.family import Spec
from recipec.runtime.model.older_names import mentioned
from recipec.runtime.model.partition_rules import TOKENS, axes_of
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic

NAMED = 3
"""The number of kinds of parameters that a message names; further ones are counted."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
"""Weights that tp splits by heads: the mesh's check reports those."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _rules(facts)
    yield from _divisibility(facts)


E0208 = Code(
    "E0208",
    "sharding rule matches nothing",
    cause="The rule's expression must match the whole path of a parameter, and it matches none.",
    cure="`recipe explain RECIPE mesh` lists the paths. Add `.*` at either end of the expression.",
)

E0209 = Code(
    "E0209",
    "sharding spec of the wrong length",
    cause="A spec needs one entry, an axis or null, for each dimension of the parameters that its "
    "rule matches.",
    cure="Give as many entries as the message says.",
)

E0211 = Code(
    "E0211",
    "axis twice in one spec",
    cause="One mesh axis can split only one dimension of an array.",
    cure="Write null for the other dimension.",
)

E0212 = Code(
    "E0212",
    "sharding rule never applies",
    cause="Earlier rules match all parameters of this rule, and the first matching rule is used.",
    cure="Move the rule up, or remove it.",
)

N0213 = Code(
    "N0213",
    "sharding rule changes nothing",
    cause="The rule repeats the model's default.",
    cure="Remove it.",
)


def _rules(facts: Facts) -> Iterator[Diagnostic]:
    if not facts.defaults:
        return
    taken: dict[str, int] = {}
    for index, (match, spec) in enumerate(facts.rules):
        where = f"sharding.rules[{index}]"
        axes = [axis for axis in spec if axis is not None]
        for axis in dict.fromkeys(axis for axis in axes if axes.count(axis) > 1):
            yield Diagnostic(
                E0211,
                f"the axis {axis} is in the spec of `{match}` twice: it can split only one dimension",
                f"{where}.spec",
                f"spec: {flow(_once(spec))} keeps the other dimensions whole",
            )
        pattern = re.compile(match)
        matched = [p for p in facts.defaults if pattern.fullmatch(p.path)]
        if not matched:
            yield Diagnostic(
                E0208, f"the rule `{match}` matches no parameter", f"{where}.match", _near(facts, match)
            )
            continue
        fresh = [p for p in matched if p.path not in taken]
        if not fresh:
            earlier = sorted({taken[p.path] for p in matched})
            yield Diagnostic(
                E0212,
                f"the rule `{match}` never applies: {'rule' if len(earlier) == 1 else 'rules'} "
                f"{listing(earlier)} (counted from 0) already match{'es' if len(earlier) == 1 else ''} all "
                "of its parameters, and the first matching rule is used",
                f"{where}.match",
                "move it above them, or remove it",
            )
        for p in fresh:
            taken[p.path] = index
        wrong = [p for p in fresh if len(p.shape) != len(spec)]
        if wrong:
            yield Diagnostic(
                E0209,
                f"the spec of `{match}` has {len(spec)} entries, and "
                f"{_names([p.path for p in wrong])} {'has' if len(wrong) == 1 else 'have'} "
                f"{len(wrong[0].shape)} dimensions",
                f"{where}.spec",
                f"spec: {flow(list(wrong[0].spec))} is the default",
            )
        elif fresh and all(tuple(p.spec) == tuple(spec) for p in fresh):
            yield Diagnostic(
                N0213,
                f"the rule `{match}` changes nothing: {flow(list(spec))} is already the default",
                where,
                "remove it",
            )


E0204 = Code(
    "E0204",
    "axis does not divide a dimension",
    cause="The mesh axis cannot split a dimension of a parameter or an adapter evenly.",
    cure="Choose another size of the axis, or write `on_indivisible: replicate` under `sharding`.",
)

W0204 = Code(
    "W0204",
    "dimension is kept whole",
    cause="A mesh axis does not divide the dimension, and `on_indivisible: replicate` keeps a full "
    "copy on every device.",
    cure="Nothing, if this is intended.",
)


def _divisibility(facts: Facts) -> Iterator[Diagnostic]:
    """Yield one diagnostic for each length that an axis does not divide, for any number of arrays."""
    misfits: dict[tuple[str, int, str], list[Indivisible]] = {}
    axes = facts.axes

    @functools.cache  # layers are alike
    def divided(shape: tuple[int, ...], spec: Spec) -> bool:
        return not indivisible("", shape, spec, axes)

    specs = {p.path: p.spec for p in facts.ruled}
    arrays = [(p.path, p.shape, p.spec) for p in facts.ruled]
    weights = {path for path, shape, spec in arrays if not divided(shape, spec)}
    for adapter in facts.adapters or ():
        weight = adapter.target.weight
        if weight not in weights:  # else the weight's own dimension is already reported
            arrays += placed(adapter, specs[weight]).arrays
    defaults = {p.path: p.spec for p in facts.defaults}
    for path, shape, spec in arrays:
        for misfit in () if divided(shape, spec) else indivisible(path, shape, spec, axes):
            ruled = path in defaults and defaults[path] != spec
            if ruled or not _splits_heads(misfit, spec):
                where = _rule_of(facts, path) if ruled else f"mesh.axes.{misfit.axis}"
                misfits.setdefault((where, misfit.length, misfit.axis), []).append(misfit)
    for (where, length, axis), unsplit in misfits.items():
        replicate = facts.recipe.sharding.on_indivisible == "replicate" or (
            facts.replicates and not where.startswith("sharding.")
        )
        over = f"{' x '.join(axes_of(axis, facts.axes))}={unsplit[0].size}"
        sentence = f"{over} does not divide {_called(facts, length)}: {_dimensions(unsplit)}"
        if replicate:
            yield Diagnostic(W0204, f"{sentence}, so every device keeps a full copy", where)
            continue
        wider = ""
        if length == facts.recipe.model.vocab_size:
            fits = -(-length // unsplit[0].size) * unsplit[0].size
            where, wider = "model.vocab_size", f"vocab_size: {fits} in model; or "
        yield Diagnostic(
            E0204,
            sentence,
            where,
            f"{wider}{_arrangements(facts)}sharding: {{on_indivisible: replicate}} keeps a full copy on "
            "every device",
        )


def _once(spec: Spec) -> list[str | None]:
    """Return a spec in which each axis appears only at its first position."""
    return [axis if axis not in spec[:index] else None for index, axis in enumerate(spec)]


def _rule_of(facts: Facts, path: str) -> str:
    """Return the recipe path of the rule that determines a parameter's sharding."""
    index = next(i for i, (match, _) in enumerate(facts.rules) if re.fullmatch(match, path))
    return f"sharding.rules[{index}].spec"


def _splits_heads(misfit: Indivisible, spec: Spec) -> bool:
    """Return whether the mesh's check has already reported this dimension as heads."""
    return misfit.axis == "tp" and misfit.path.split(".")[-2] in ATTENTION and spec[misfit.dimension] == "tp"


def _called(facts: Facts, length: int) -> str:
    """Name a length: "the hidden size 5,376"."""
    architecture = facts.model.architecture if facts.model else None
    for name, words in (
        ("hidden_size", "the hidden size"),
        ("intermediate_size", "the feed-forward size"),
        ("vocab_size", "the vocabulary of"),
    ):
        if getattr(architecture, name, None) == length:
            return f"{words} {length:,}"
    return f"{length:,}"


def _dimensions(misfits: list[Indivisible]) -> str:
    """Return where a length occurs: "dimension 0 of layers.*.mlp.gate_proj.kernel"."""
    kinds = dict.fromkeys((misfit.dimension, split_layer(misfit.path)[0]) for misfit in misfits)
    words = [f"dimension {dimension} of {pattern.replace('{}', '*')}" for dimension, pattern in kinds]
    rest = [f"{len(words) - NAMED} more"] if len(words) > NAMED else []
    return listing([*words[:NAMED], *rest])


def _arrangements(facts: Facts) -> str:
    """Return the axes that divide every dimension and use every device, as the start of a help."""
    accelerator = facts.accelerator
    if accelerator is None:
        return ""
    slice_devices = accelerator.devices // accelerator.slices
    cp = math.gcd(facts.axes.get(TOKENS, 1), slice_devices)
    possible = (
        arranged(accelerator.slices, slice_devices // cp // tp, tp, cp)
        for tp in divisors(slice_devices // cp)
    )
    fits = [
        flow(axes)
        for axes in possible
        if not any(indivisible(p.path, p.shape, p.spec, axes) for p in facts.ruled)
    ]
    return f"axes: {listing(fits, 'or')}; or " if fits else ""


def _names(paths: list[str]) -> str:
    """List parameters of a few kinds: "layers.*.mlp.up_proj.kernel and layers.*.mlp.down_proj.kernel"."""
    kinds = [pattern.replace("{}", "*") for pattern in grouped(paths)]
    rest = [f"{len(kinds) - NAMED} more"] if len(kinds) > NAMED else []
    return listing([*kinds[:NAMED], *rest])


def _near(facts: Facts, match: str) -> str:
    for before, after in mentioned(match):
        renamed = re.sub(rf"(?<![a-z_]){before}(?![a-z_])", after, match)
        return (
            f"match: {renamed}, because {before} is version 0.2's name of {after}, and its dimensions may be "
            "in another order"
        )
    inside = [p.path for p in facts.defaults if re.search(match, p.path)]
    if inside:
        return f"match: {anywhere(match)}, because it must match a whole path such as {inside[0]}"
    paths = list(dict.fromkeys(split_layer(p.path)[0].replace("{}", "0") for p in facts.defaults))
    return f"paths look like {listing(paths[:4])}; `recipe explain RECIPE mesh` lists them all"
