"""Check LoRA targets against the model's projections, layer by layer, and the adapters' settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from recipec.compiler.lowering.facts import Facts
from recipec.compiler.wording import anywhere, in_layers, listing, plural, ranges
from recipec.runtime.model.adapters import (
    EMBEDDING,
    NOT_A_PATTERN,
    PROJECTOR,
    Adapter,
    by_pattern,
    matches,
    meant,
    principal,
)
from recipec.runtime.model.families.family import LoraTarget
from recipec.runtime.model.reach import expert_layer, reach
from recipec.runtime.model.selection import trained_whole
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.spec import words
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import join

if TYPE_CHECKING:
    from recipec.spec.language import Lora

FUSED = {
    "qkv_einsum": ("q_proj", "k_proj", "v_proj"),
    "kv_einsum": ("k_proj", "v_proj"),
    "q_einsum": ("q_proj",),
    "k_einsum": ("k_proj",),
    "attn_vec_einsum": ("o_proj",),
}
"""Tunix's names of attention weights, longest first, and the projections that they hold."""

SENSIBLE_SCALE = 8.0
"""A ratio alpha / rank above this is probably a mistake: published LoRA runs use 1 or 2."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    section = facts.recipe.lora
    if section is None:
        return
    for index, target in enumerate(section.targets):
        yield from _target(facts, section, target, f"lora.targets[{index}]")
    yield from _nothing_adapted(facts, section)
    yield from _experts(facts)
    yield from _covered_twice(facts, section)
    yield from _patterns(facts, section)
    yield from _settings(facts, section)


E0301 = Code(
    "E0301",
    "target is a Tunix name",
    cause="Tunix fuses projections (`kv_einsum`). Its names differ from layer to layer, so a regex of "
    "them silently skips layers: in Gemma 4 31B, the keys of 10 of 60 layers.",
    cure="Use Hugging Face's names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.",
)

E0302 = Code(
    "E0302",
    "target matches nothing",
    cause="No projection of the model has that name, or the expression matches no complete module name.",
    cure="Use a name that the message lists. An expression must match a complete name such as "
    "`layers.7.self_attn.q_proj`, so it often starts with `.*`.",
)

E0303 = Code(
    "E0303",
    "target is not a regular expression",
    cause="A target that is not a plain name is read as a Python regular expression, and this one is "
    "malformed.",
    cure="Correct it, or name a projection.",
)

W0305 = Code(
    "W0305",
    "target in none of the chosen layers",
    cause="The layers in `lora.layers` do not have this projection.",
    cure="Choose other layers, or remove the target.",
)

N0307 = Code(
    "N0307",
    "layers whose keys are the values",
    cause="In the global layers of larger Gemma 4 models the keys are also the values, and there is no "
    "v_proj. Without the target k_proj, neither gets an adapter in these layers.",
    cure="Add k_proj to the targets.",
)


def _target(facts: Facts, section: Lora, target: str, path: str) -> Iterator[Diagnostic]:
    plain = re.fullmatch(r"\w+", target) is not None
    fused = _fused_names(target)
    if fused:
        yield Diagnostic(E0301, *_fused_message(facts, target, fused, path))
        return
    if not plain:
        try:
            re.compile(target)
        except NOT_A_PATTERN as error:
            yield Diagnostic(
                E0303,
                f"the target `{target}` is not a regular expression: {error}",
                path,
                r"use q_proj, another projection, or an expression such as '.*\.[0-9]\.self_attn\.q_proj'",
            )
            return
    if facts.model is None or facts.layers is None:
        return
    everywhere = {site.layer for site in facts.hits[target] if site.layer is not None}
    if not facts.hits[target]:
        yield Diagnostic(
            E0302,
            f"the target `{target}` matches no projection of {facts.model.title}",
            path,
            _in_tower(facts, target) or _nearest(facts, target),
        )
        return
    if any(site.of_tower for site in facts.hits[target]):
        return
    chosen = everywhere & set(facts.layers)
    missing = sorted(set(facts.layers) - everywhere)
    if missing and _keys_are_values(facts, target):
        if not any(matches(name, f"layers.{missing[0]}.self_attn.k_proj") for name in section.targets):
            layers = f"{plural(len(missing), 'layer')} of {facts.model.title} ({ranges(missing)})"
            yield Diagnostic(
                N0307,
                f"{layers} {'has' if len(missing) == 1 else 'have'} no v_proj: the keys are also the values "
                "there, and without the target k_proj neither gets an adapter",
                path,
                f"targets: {flow([*section.targets, 'k_proj'])}",
            )
    elif not chosen and not (plain and _said_by_kind(facts, section)):
        yield Diagnostic(
            W0305,
            f"none of the chosen layers has `{target}`: {facts.model.title} has it in "
            f"{in_layers(facts.model.architecture.layer_types, sorted(everywhere))}",
            path,
            "remove the target, or write layers: all",
        )


def _said_by_kind(facts: Facts, section: Lora) -> bool:
    """Return whether all projections are targets, so that a target is missing only in layers of another
    kind."""
    return all(
        any(matches(target, site.name) for target in section.targets)
        for site in facts.lora_targets
        if not site.words
    )


def _keys_are_values(facts: Facts, target: str) -> bool:
    assert facts.model is not None
    return target == "v_proj" and bool(getattr(facts.model.architecture, "k_eq_v", False))


def _fused_names(target: str) -> list[str]:
    """Return Tunix's names that occur in a target, also inside a regular expression."""
    rest, out = target, []
    for name in FUSED:
        if re.search(rf"(?<![a-z_]){name}(?![a-z_])", rest):
            out.append(name)
            rest = re.sub(rf"(?<![a-z_]){name}(?![a-z_])", "", rest)
    return out


def _fused_message(facts: Facts, target: str, fused: list[str], path: str) -> tuple[str, str, str]:
    projections = list(
        dict.fromkeys(
            p for p in ("q_proj", "k_proj", "v_proj", "o_proj") if any(p in FUSED[name] for name in fused)
        )
    )
    projections += [p for p in ("gate_proj", "up_proj", "down_proj") if p in target]
    lost = ""
    if facts.model is not None and "kv_einsum" in fused and "k_einsum" not in fused:
        a = facts.model.architecture
        other = [i for i in range(a.num_layers) if a.keys_as_values(i)]
        if other:
            lost = (
                f". In {plural(len(other), 'layer')} of {facts.model.title} ({ranges(other)}) the keys are "
                "in k_einsum and would get no adapter"
            )
    return (
        f"{listing(f'`{name}`' for name in fused)} "
        f"{'is a Tunix name' if len(fused) == 1 else 'are Tunix names'}, and targets are Hugging Face's "
        f"projections{lost}",
        path,
        f"targets: [{', '.join(projections)}]",
    )


E0305 = Code(
    "E0305",
    "nothing is adapted",
    cause="None of the layers in `lora.layers` has any of the targets.",
    cure="Choose other layers or other targets.",
)


def _nothing_adapted(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    """Report targets that exist in the model, but in none of the chosen layers."""
    layers = facts.layers
    if facts.model is None or layers is None:
        return
    hits = [facts.hits[target] for target in section.targets]
    if all(hits) and not any(facts.within(site) for matched in hits for site in matched):
        everywhere = sorted({site.layer for matched in hits for site in matched if site.layer is not None})
        yield Diagnostic(
            E0305,
            f"nothing would be trained: {facts.model.title} has the targets in "
            f"{in_layers(facts.model.architecture.layer_types, everywhere)}, and lora.layers names other "
            "layers",
            facts.first_given("lora.layers", "lora.targets"),
            "layers: all",
        )


N0315 = Code(
    "N0315",
    "experts without adapters",
    cause="Most weights of a mixture of experts belong to the experts, and no target names them. LoRA "
    "adapts only attention and the dense block that every token passes through.",
    cure="Nothing, if this is enough. The target `experts` adapts them too, each expert with its own "
    "A and B. Without the `lora` section all weights are trained.",
)

E0316 = Code(
    "E0316",
    "dropout with experts",
    cause="Adapters of experts have no dropout, and neither have adapters of routers that are not "
    "linear layers in transformers. PEFT computes W + scale * B A for them, so A has no separate "
    "input to drop.",
    cure="Write `dropout: 0`.",
)

W0317 = Code(
    "W0317",
    "router adapter that PEFT cannot run",
    cause="In transformers, the router of some models (GLM 4.5, DeepSeek V3, MiniMax M2) is a "
    "parameter next to a correction that its block reads. PEFT wraps the module of an adapted "
    "parameter, and the block then no longer finds the correction. PEFT loads the adapter that "
    "merge.py writes, but cannot run it.",
    cure="Write `adapter: false` in `merge`, which writes only merged weights, or remove the target "
    "`router`.",
)


def _experts(facts: Facts) -> Iterator[Diagnostic]:
    """Check targets of models with experts: whether the experts, which hold most of the weights, are
    targeted, and settings that experts do not support."""
    adapters = facts.adapters
    if facts.model is None or facts.lora is None or adapters is None:
        return
    if not any(map(expert_layer, facts.defaults)):
        return
    coverage = reach(facts.defaults, adapters)
    if adapters and coverage.expert_layers:
        more = f"targets: {flow([*facts.lora.targets, 'experts'])} with dropout: 0 also adapts them"
        if any(adapter.target.experts for adapter in adapters):
            more = "layers: all also adapts them"
        yield Diagnostic(
            N0315,
            f"LoRA reaches {coverage}",
            "lora.targets",
            f"{more}; change nothing if attention and the dense block are enough",
        )
    experts = getattr(facts.model.architecture, "experts", None)
    routers = [a for a in adapters if a.target.words[:1] == ("router",) and a.target.parameter]
    if routers and facts.recipe.merge.adapter and experts is not None and experts.correction:
        yield Diagnostic(
            W0317,
            f"PEFT cannot run {facts.model.title} with an adapter of its router: the PEFT adapter that "
            "merge.py writes can be loaded, but not run",
            "lora.targets",
            "adapter: false in merge, which writes only the merged weights; or remove the target router",
        )
    parameters = [a.target.words[0] for a in adapters if a.target.parameter]
    if facts.lora.dropout and parameters:
        yield Diagnostic(
            E0316,
            f"lora.dropout is {facts.lora.dropout:g}, and adapters of {listing(dict.fromkeys(parameters))} "
            "have no dropout: in transformers these are parameters, for which PEFT has none",
            facts.first_given("lora.dropout", "lora.targets"),
            "dropout: 0",
        )


W0306 = Code(
    "W0306",
    "target adds nothing",
    cause="Earlier targets already match all of its projections. In rank_pattern and alpha_pattern "
    "the first matching pattern is used, and earlier ones match all of this one's projections.",
    cure="Remove it, or move a pattern above the earlier ones.",
)


def _covered_twice(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    """Report a target whose projections all belong to an earlier target."""
    seen: set[str] = set()
    for index, target in enumerate(section.targets):
        hit = {site.name for site in facts.hits[target]}
        if hit and hit <= seen:
            yield Diagnostic(
                W0306,
                f"the target `{target}` adds nothing: earlier targets match all of its projections",
                f"lora.targets[{index}]",
                "remove it",
            )
        seen |= hit


E0313 = Code(
    "E0313",
    "pattern matches nothing",
    cause="A key of rank_pattern or alpha_pattern matches none of the adapted projections.",
    cure="Spell it as in `lora.targets`.",
)

E0314 = Code(
    "E0314",
    "shared A with different ranks",
    cause="`kv: shared` gives a layer's k_proj and v_proj one A, and rank_pattern or alpha_pattern gives "
    "them different ranks or alphas.",
    cure="Write `kv: independent`.",
)


def _patterns(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    """Report keys of rank_pattern and alpha_pattern that match nothing, and projections that share A but are
    given different values."""
    if facts.lora is None:
        return
    lora = facts.lora
    adapted = _adapted_modules(facts)
    projections = list(dict.fromkeys(name.rpartition(".")[2] for name in adapted))
    for key, patterns in (("rank_pattern", section.rank_pattern), ("alpha_pattern", section.alpha_pattern)):
        earlier: dict[str, int] = {}
        for pattern in patterns:
            where = join(("lora", key, pattern))
            try:
                re.compile(pattern)
            except NOT_A_PATTERN as error:
                yield Diagnostic(
                    E0303,
                    f"the pattern `{pattern}` is not a regular expression: {error}",
                    where,
                    "name a projection, for example q_proj: 8",
                    at_key=True,
                )
                continue
            matched = [name for name in adapted if by_pattern({pattern: 1}, name, 0)]
            if matched and all(by_pattern(earlier, name, 0) for name in matched):
                yield Diagnostic(
                    W0306,
                    f"the pattern `{pattern}` has no effect: earlier patterns match all of its projections",
                    where,
                    "move it above them, or remove it",
                    at_key=True,
                )
            earlier[pattern] = 1
            if not matched:
                close = words.slip(pattern, projections)
                hint = f"did you mean `{close}`? " if close else ""
                yield Diagnostic(
                    E0313,
                    f"the pattern `{pattern}` matches no projection that has an adapter",
                    where,
                    f"{hint}{listing(projections)} have adapters",
                    at_key=True,
                )
    if section.kv != "shared":
        return
    for names in _sharing(facts):
        if len({(lora.rank_of(name), lora.alpha_of(name)) for name in names}) > 1:
            yield Diagnostic(
                E0314,
                f"{listing(f'`{name}`' for name in names)} share one A with kv: shared, and cannot have "
                "different ranks or alphas",
                facts.first_given("lora.rank_pattern", "lora.alpha_pattern"),
                "kv: independent",
            )
            return


W0308 = Code(
    "W0308",
    "adapters in bfloat16",
    cause="In bfloat16, adapters and Adam's moments lose small updates. Over 20 steps the loss drifts "
    "from a float32 run twice as far as with float32 adapters.",
    cure="Write `lora.dtype: float32`. The base stays bfloat16.",
)

N0309 = Code(
    "N0309",
    "key and value share A",
    cause="`kv: shared` is what Qwix does in Tunix's Gemma models. PEFT trains a separate A for key and "
    "value.",
    cure="Write `kv: independent` to train the same adapters as PEFT.",
)

N0310 = Code(
    "N0310",
    "Qwix's initialization",
    cause="A starts within 2.4 times PEFT's bound.",
    cure="Write `init: peft` to compare runs with PEFT's.",
)

W0311 = Code(
    "W0311",
    "large alpha / rank",
    cause="The adapters' product is scaled by alpha / rank, and this value is far above the usual "
    "ones. If it was chosen for rsLoRA's alpha / sqrt(rank), it must be converted.",
    cure="Set alpha to the rank, or to twice the rank.",
)

W0312 = Code(
    "W0312",
    "rank larger than the weight",
    cause="An adapter of that rank has more numbers than the weight that it adapts.",
    cure="Use a smaller rank.",
)


def _adapted_modules(facts: Facts) -> list[str]:
    """Return the projections that get an adapter."""
    named = {site.name for sites in facts.hits.values() for site in sites}
    return [site.name for site in facts.lora_targets if facts.within(site) and site.name in named]


def _sharing(facts: Facts) -> list[tuple[str, str]]:
    """Return the keys and values of each layer that would share one A."""
    adapted = dict.fromkeys(_adapted_modules(facts))
    values = (module for module in adapted if module.endswith(".v_proj"))
    pairs = ((f"{module.removesuffix('v_proj')}k_proj", module) for module in values)
    return [pair for pair in pairs if pair[0] in adapted]


def _settings(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    if section.dtype == "bfloat16":
        yield Diagnostic(
            W0308,
            "the adapters and their optimizer state are kept in bfloat16, whose 8 bits of precision lose "
            "small updates; PEFT keeps them in float32",
            "lora.dtype",
            "dtype: float32",
        )
    trained = _sharing(facts) if section.kv == "shared" else []
    if trained:
        yield Diagnostic(
            N0309,
            f"key and value share one A in {plural(len(trained), 'layer')}, as in Qwix. This has fewer "
            "parameters than PEFT's adapters; the PEFT adapter that merge.py writes contains A twice",
            "lora.kv",
            "kv: independent trains the same adapters as PEFT",
        )
    if section.init == "qwix" and section.start_from is None:
        yield Diagnostic(
            N0310,
            "A starts uniform within sqrt(6 / fan_in), 2.4 times PEFT's bound of 1 / sqrt(fan_in): runs "
            "are not comparable with PEFT's at the same learning rate",
            "lora.init",
            "init: peft",
        )
    yield from _cancelled(facts, section)
    yield from _dora(facts, section)
    yield from _principal(facts, section)
    yield from _whole(facts, section)
    yield from _rows(facts, section)
    usual = round(section.rank**0.5) if section.rslora else section.rank
    scale = section.alpha / (section.rank**0.5 if section.rslora else section.rank)
    if scale > SENSIBLE_SCALE:
        yield Diagnostic(
            W0311,
            f"alpha / {'sqrt(rank)' if section.rslora else 'rank'} is {scale:g}, which multiplies the "
            "product of the adapters",
            facts.first_given("lora.alpha", "lora.rslora"),
            f"alpha: {usual:g} or {2 * usual:g} gives a factor of 1 or 2",
        )
    if facts.model is not None:
        narrowest = min(
            (
                min(size for size in (p.shape[0], p.shape[-1]))
                for p in facts.defaults
                if p.path.endswith("_proj.kernel")
            ),
            default=section.rank,
        )
        if section.rank > narrowest:
            yield Diagnostic(
                W0312,
                f"rank {section.rank} is above the width {narrowest} of a projection of "
                f"{facts.model.title}: the adapter has more numbers than the weight itself",
                "lora.rank",
                f"rank: {narrowest}",
            )


N0227 = Code(
    "N0227",
    "LoRA with all of a v5p-8 on fsdp",
    cause="In marin-community/marin's issue 4903, DPO runs (rank 64, learning rate 1e-6) on this mesh "
    "stay at a loss of 0.66 after nine steps, and runs with fsdp 2 x tp 2 reach 0.27. The issue "
    "traces it to the order of a sum over the chips, which cancels in B's first gradient. Whether "
    "other runs are affected is not known.",
    cure="`probe.py` compares B's first gradients on both meshes. Use `lora.init: zero_a` or fsdp 2 x "
    "tp 2. `recipe plan --set 'mesh.axes={fsdp: 2, tp: 2}'` shows the cost.",
)


def _cancelled(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    """Note a mesh on which LoRA with B = 0 was seen to learn less than on other meshes."""
    a = facts.accelerator
    if (
        a is None
        or section.init == "zero_a"
        or principal(section.init)
        or (a.generation, a.chips) != ("v5p", 4)
    ):
        return
    if facts.axes.get("fsdp", 1) == a.devices:
        yield Diagnostic(
            N0227,
            "all four chips of a v5p-8 are on fsdp. LoRA with B starting at zero learned less there than "
            "with fsdp 2 x tp 2 (github.com/marin-community/marin/issues/4903: DPO, learning rate 1e-6)",
            "mesh.axes",
            "init: zero_a, or axes: {fsdp: 2, tp: 2}",
        )


E0321 = Code(
    "E0321",
    "DoRA cannot be combined with this",
    cause="DoRA scales the outputs of each projection to trained magnitudes. PEFT has no DoRA for "
    "experts and routers, and with dropout it also drops inputs of the frozen product. With "
    "quantized weights and pissa, olora or loftq, the norms would not be those of the stored "
    "weights. vLLM does not serve DoRA adapters.",
    cure="Change the key that the message names, or write `kind: lora`.",
)


def _dora(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    """Report what DoRA's magnitudes cannot be combined with."""
    if section.kind != "dora":
        return
    serve = facts.recipe.serve
    served = serve is not None and serve.weights == "adapter"
    beyond = [
        site.words[0] for site in facts.lora_targets if site.parameter and _adapted(facts, section, site)
    ]
    names = listing(dict.fromkeys(beyond))
    for wrong, what, path, help in (
        (
            section.dropout,
            "dropout: PEFT also drops inputs of the frozen product",
            "dropout",
            "dropout: 0",
        ),
        (
            facts.recipe.model.quantization and section.init in ("pissa", "olora", "loftq"),
            f"quantized weights and init: {section.init}, whose norms are those before quantization",
            "init",
            "init: peft",
        ),
        (beyond, f"{names}, for which PEFT has no magnitudes", "targets", "use other targets"),
        (
            served,
            "serve.weights: adapter, since vLLM does not serve DoRA adapters",
            "kind",
            "weights: merged in serve",
        ),
    ):
        if wrong:
            key = facts.first_given(f"lora.{path}", "lora.kind")
            yield Diagnostic(
                E0321, f"kind: dora cannot be combined with {what}", key, f"{help}; or kind: lora"
            )


CORE_SECONDS = (6e-11, 5.5e-10)
"""CPU core seconds to find the largest singular values of a k x l weight (k the smaller), as factors of k^2 l
and of k^3. Measured once: 10 s for 2,048 x 8,192, 100 s for 5,376 x 21,504."""
LONG = 3600.0
"""From this number of core seconds on, the time is reported."""


E0330 = Code(
    "E0330",
    "init cannot be combined with this",
    cause="pissa, olora and loftq give each linear layer its own A and B, whose product is a part of "
    "its weight. Experts are not linear layers in transformers. k_proj and v_proj share one A with "
    "kv: shared. No part of a weight has a higher rank than the weight. The reference model of an "
    "objective would lack that part. loftq corrects the rounding of nf4, and start_from sets other "
    "values.",
    cure="Change what the message names, or write `init: peft`.",
)

W0331 = Code(
    "W0331",
    "first values that take long to compute",
    cause="With pissa and loftq the largest singular values of each weight are computed when the run "
    "begins, on the host of process 0, while its accelerators wait. The figure is an estimate, from "
    "what one weight of 5,376 x 21,504 took a CPU core. A resumed run reads the computed values. "
    "With several hosts, RECIPEC_BARRIER_TIMEOUT has to give the other hosts that time.",
    cure="Write `init: pissa_niter_4` or `pissa_niter_16`, PEFT's iterations, which give nearly the "
    "same values; or `init: olora`, which takes seconds.",
)


def _principal(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    """Check adapters that start as a part of the base's weights: conflicts with other settings, and the time
    to compute them."""
    if not principal(section.init):
        return
    train, init = facts.recipe.train, f"init: {section.init}"
    words = [s.words[0] for s in facts.lora_targets if s.parameter and _adapted(facts, section, s)]
    if facts.adapters is None and facts.model is not None and facts.lora is not None:
        return  # `_patterns` reports why
    linear = [a for a in facts.adapters or () if not a.target.parameter]
    sizes = {adapter.name: (adapter.rank, *_matrix(adapter)) for adapter in linear}
    narrow = next((name for name, (rank, *size) in sizes.items() if rank > min(size)), None)
    unstored = section.init == "loftq" and facts.recipe.model.quantization != "nf4"
    for wrong, what, path, help in (
        (
            words,
            f"{listing(dict.fromkeys(words))}, whose weights are not decomposed",
            "lora.targets",
            "targets without these",
        ),
        (any(a.shared for a in linear), "one A for k_proj and v_proj", "lora.kv", "kv: independent"),
        (
            OBJECTIVES[train.objective].refers(train.loss_type),
            f"{train.objective}, whose reference is the model before training: the frozen weights are "
            "different",
            "train.objective",
            "another objective",
        ),
        (unstored, "weights that are not stored in nf4", "model.quantization", "quantization: nf4"),
        (
            section.init == "loftq" and section.vision,
            "lora.vision: the tower's weights are not quantized",
            "lora.vision",
            "vision: false",
        ),
        (
            section.start_from,
            "start_from, whose adapter has its own values",
            "lora.start_from",
            "remove start_from",
        ),
        (
            narrow,
            f"a rank above the width {min(sizes[narrow][1:]) if narrow else 0} of {narrow}",
            "lora.rank",
            f"rank: {min(min(size) for _, *size in sizes.values())}" if narrow else "",
        ),
    ):
        if wrong:
            key = facts.first_given(path, "lora.init")
            yield Diagnostic(E0330, f"{init} cannot be combined with {what}", key, f"{help}; or init: peft")
    if section.init not in ("pissa", "loftq"):
        return
    squares, cubes = CORE_SECONDS
    shapes = [sorted(size) for _, *size in sizes.values()]
    seconds = sum(squares * k * k * wide + cubes * k**3 for k, wide in shapes)
    if seconds > LONG:
        faster = "pissa_niter_16" if section.init == "pissa" else "peft"
        yield Diagnostic(
            W0331,
            f"{init} finds the largest singular values of {len(sizes):,} weights before the first step: "
            f"about {seconds / 3600:.1f} hours of a CPU core, on the host of process 0 (an estimate)",
            "lora.init",
            f"init: {faster}",
        )


def _matrix(adapter: Adapter) -> tuple[int, int]:
    """Return the outputs and inputs of a projection."""
    low, high, *_ = adapter.peft_shapes
    return high[0], low[1]


E0322 = Code(
    "E0322",
    "module that modules_to_save cannot train",
    cause="modules_to_save is for embeddings, the output head and norms. Projections, experts and routers "
    "get adapters instead. A model that uses its embedding as head has no lm_head.",
    cure="Use a name that the message lists, or remove `modules_to_save`.",
)

N0323 = Code(
    "N0323",
    "embedding is also the output head",
    cause="The model uses its embedding as output head, so training one trains both. PEFT trains a "
    "copy of the embedding and keeps the head, unless ensure_weight_tying is set; the adapter that "
    "merge.py exports sets it.",
    cure="Nothing, if this is intended.",
)


def _whole(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    """Report modules of `modules_to_save` that cannot be trained in addition to the adapters."""
    if facts.model is None or facts.lora is None or not section.modules_to_save:
        return
    title, called = facts.model.title, facts.model.family.names
    weights = {site.weight for site in facts.lora_targets}
    others = [p for p in facts.defaults if p.trainable and p.path not in weights and not expert_layer(p)]
    names = list(dict.fromkeys(s.module.rpartition(".")[2] for p in others for s in p.sources))
    for index, name in enumerate(section.modules_to_save):
        modules = trained_whole(
            facts.defaults, replace(facts.lora, modules_to_save=(name,), trainable_tokens=())
        )
        path = f"lora.modules_to_save[{index}]"
        if name == PROJECTOR:
            continue  # images.py checks that there is one
        if not all(parameter in others for parameter in modules):
            message = f"`{name}` names projections of {title}, which get adapters instead"
            yield Diagnostic(E0322, message, path, f"targets: {flow([*section.targets, name])}")
        elif not modules:
            close = words.slip(name, names)
            hint = f"did you mean `{close}`? " if close else ""
            message = f"`{name}` matches no embedding, head or norm of {title}"
            yield Diagnostic(E0322, message, path, f"{hint}it has {listing(names)}")
        elif called.head not in names and any(
            s.module in called.of_embedding for p in modules for s in p.sources
        ):
            message = f"the output head of {title} is its embedding, and is trained with it"
            yield Diagnostic(N0323, message, path)


E0326 = Code(
    "E0326",
    "row of the embedding that cannot be trained",
    cause="trainable_tokens names rows of the embedding. A row must exist, and be trained once: "
    "modules_to_save may train the whole embedding instead. Texts are looked up in the tokenizer of the "
    "checkpoint, together with model.add_tokens.",
    cure="Use the line in the help.",
)


def _rows(facts: Facts, section: Lora) -> Iterator[Diagnostic]:
    """Report tokens of `trainable_tokens` whose rows of the embedding cannot be trained."""
    if facts.model is None or facts.lora is None or not section.trainable_tokens:
        return
    title, rows = facts.model.title, facts.model.architecture.vocab_size
    if not facts.model.family.tunix:
        message = f"no single rows are trained of {title}, which is trained with transformers' own model"
        yield Diagnostic(E0326, message, "lora.trainable_tokens", "trainable_tokens: []")
        return
    if facts.model.own_head is not None and facts.recipe.merge.adapter:
        message = (
            f"PEFT would put the rows into {facts.model.own_head} too, because config.json says that it is "
            "the embedding: an adapter would answer otherwise than the merged model"
        )
        help = "merge: {adapter: false}; or set tie_word_embeddings to false in the base's config.json"
        yield Diagnostic(E0326, message, "lora.trainable_tokens", help)
    ids = facts.token_ids
    added = facts.recipe.model.add_tokens
    seen: dict[int, int | str] = {}
    for index, token in enumerate(section.trainable_tokens):
        path = f"lora.trainable_tokens[{index}]"
        number = ids.get(token) if isinstance(token, str) and ids is not None else token
        if isinstance(token, int) and token >= rows:
            message = f"the embedding of {title} has {rows:,} rows, and token {token:,} would be beyond them"
            yield Diagnostic(E0326, message, path, f"a number from 0 to {rows - 1}; or model.vocab_size")
        elif isinstance(token, str) and token not in added and facts.recipe.model.tokenizer is not None:
            message = (
                f"`{token}` is looked up in the checkpoint's own tokenizer, but model.tokenizer is another"
            )
            yield Diagnostic(E0326, message, path, "write the token's number")
        elif number is None and token not in added:
            close = words.slip(str(token), [*(ids or ()), *added])
            hint = f"did you mean `{close}`? " if close else ""
            message = f"the tokenizer has no token `{token}`"
            yield Diagnostic(E0326, message, path, f"{hint}add_tokens in model adds tokens")
        elif isinstance(number, int):
            if number in seen:
                message = f"`{token}` and `{seen[number]}` are the same token, {number}"
                yield Diagnostic(E0326, message, path, "remove one of the two")
            seen.setdefault(number, token)
    whole = trained_whole(facts.defaults, replace(facts.lora, trainable_tokens=()))
    if any(parameter.path == EMBEDDING for parameter in whole):
        message = "modules_to_save trains the whole embedding, of which trainable_tokens names rows"
        yield Diagnostic(
            E0326, message, "lora.trainable_tokens", "remove trainable_tokens, or modules_to_save's embedding"
        )


def _adapted(facts: Facts, section: Lora, site: LoraTarget) -> bool:
    """Return whether any target of the section matches a weight in one of its layers."""
    return facts.within(site) and any(meant(target, site) for target in section.targets)


def _in_tower(facts: Facts, target: str) -> str:
    """Return the help for a target that only the vision tower has, "" for another."""
    tower = None if facts.model is None else facts.model.tower
    seen = tower is not None and facts.recipe.data.images is not None
    if tower is None or not seen or not any(meant(target, site) for site in tower.targets()):
        return ""
    return "vision: true in lora, since only the vision tower has it"


def _nearest(facts: Facts, target: str) -> str:
    whole = [site.name for site in facts.lora_targets]
    names = list(
        dict.fromkeys(
            site.words[0] if site.words else site.name.rpartition(".")[2] for site in facts.lora_targets
        )
    )
    if re.fullmatch(r"\w+", target) is None:
        if any(re.search(target, module) for module in whole):
            return f"{anywhere(target)}, because it must match a whole module name such as {whole[0]}"
        return f"module names look like {whole[0]} and {whole[-1]}"
    if foreign := words.value("lora.targets", target):
        return foreign
    close = words.slip(target, names)
    hint = f"did you mean `{close}`? " if close else ""
    return f"{hint}it has {listing(names)}"
