"""LoRA as in PEFT: target modules, ranks, features without a counterpart, and how the frozen base is stored.

The tools match names against transformers' modules ("model.language_model.layers.7.self_attn.q_proj") as PEFT
does. An entry of a list is a full name, or the end of one after a dot. A text is a regular expression for the
full name. This module matches them in the same way, on transformers' names of the model's modules, and
expresses the result in the recipe's terms.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipec.compiler.catalog import Model
from recipec.compiler.lowering.facts import short_name
from recipec.compiler.wording import listing
from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, as_number, table
from recipec.port.meaning import experts, images
from recipec.port.refusals import E1145, E1146, E1148, E1160, E1164
from recipec.port.tool_names import known, of_model
from recipec.runtime.model.adapters import meant
from recipec.runtime.model.families.decoder_family import DecoderArchitecture
from recipec.runtime.model.families.family import linear_layers
from recipec.runtime.model.families.towers import HOLDER
from recipec.runtime.peft.adapter import EMBEDDED
from recipec.spec.core_schema import flow
from recipec.spec.language.lora import PROJECTIONS

KINDS = table("""
switch use_rslora -> lora.rslora: alpha / sqrt(rank)
switch use_dora -> lora.kind=dora
""")
"""PEFT's switches for the kind of adapter."""
FEATURES = table("""
learned lora_bias=null/false bias=null/none layer_replication=null alora_invocation_tokens=null
    use_qalora=null/false use_bdlora=null/false arrow_config=null kasa_config=null monteclora_config=null
    velora_config=null
""")
"""Keys of PEFT that go beyond A and B and have no counterpart."""


def default_targets(model: Model | None) -> str | list[str] | None:
    """Return PEFT's default target_modules, or None for a model without a default."""
    if model is None:
        return ["q_proj", "v_proj"]
    targets: str | list[str] | None = of_model("peft", "targets", model=model)
    of_text = isinstance(targets, list) and model.family.name not in known("peft", "wrapped")
    return None if is_multimodal(model) and of_text else targets


def say_targets(
    keys: Keys,
    key: str,
    model: Model | None,
    spec: str | Sequence[str] | None,
    layers: Sequence[int] | None = None,
    exclude: str | Sequence[str] | None = None,
    parameters: Sequence[str] = (),
) -> Statements[Chosen | None]:
    """State PEFT's target modules: set `lora.targets` and `lora.layers`.

    Args:
        key: the key that names them.
        spec: its value; None for PEFT's default, which becomes the key's default.
        parameters: PEFT's target_parameters.

    Returns:
        The targets on the model; None if they are not known.
    """
    if spec is None:
        spec = default_targets(model)
        keys.defaults = {**keys.defaults, key: spec}
    if spec is None:
        message = "PEFT has no target modules of its own for this model"
        yield keys.refuse(key, E1148, message, f"{key}: all-linear")
        return None
    also: list[str] = []
    if keys.tool == UNSLOTH and not isinstance(spec, str):
        also, spec = [n for n in spec if n in TABLES], [n for n in spec if n not in TABLES]
    if model is None:
        if spec or not parameters:
            yield from _without_model(keys, key, spec, also)
        return None
    try:
        chosen = choose(model, spec, layers, exclude, parameters)
    except re.error as error:
        yield keys.refuse(key, E1164, f"not a regular expression: {error}", f"{key}: all-linear")
        return None
    except experts.Halved as error:
        yield keys.refuse(key, E1145, str(error), f"name {listing(error.others)} too, or neither")
        return None
    seen = chosen.vision and images.trained_on(keys)
    if not chosen.targets and not (seen and chosen.tower):
        known = listing(PROJECTIONS)
        message = f"no module of {model.title} that can carry an adapter has these names"
        yield keys.refuse(key, E1164, message, f"its projections are {known}")
        return None
    notes = []
    beyond = (*chosen.beyond, *((VISION,) if seen and not chosen.tower else ()))
    if beyond:
        notes.append(f"recipec puts no adapter on {listing(beyond)}: it trains fewer parameters")
    if chosen.unmatched:
        notes.append(f"{model.title} has no module {listing(chosen.unmatched)}")
    sets: dict[str, Any] = {"lora.targets": list(chosen.targets), "lora.layers": chosen.layers}
    if seen and chosen.tower:
        sets |= {"lora.targets": with_tower(model, chosen.targets, chosen.tower), "lora.vision": True}
    if chosen.doubled:
        sets |= _doubled(keys, chosen.doubled)
    if also:
        sources = (s for p in model.family.parameters(model.architecture) for s in p.sources)
        if model.family.names.head not in {source.module for source in sources}:
            notes.append(
                "the output head is the embedding: recipec trains one tensor, Unsloth a copy of each"
            )
            also = ["embed_tokens"]
        sets["lora.modules_to_save"] = also
    if notes and keys.given(key):
        yield keys.say(key, sets, "; ".join(notes))
    elif also:
        yield keys.same(key, sets, f"Unsloth trains {listing(also)} whole, without adapters")
    elif chosen.vision and not images.trained_on(keys):
        yield keys.same(key, sets, "these include the vision tower, which the model in recipec does not have")
    elif chosen.doubled and keys.given(key):
        yield keys.same(key, sets, DOUBLED)
    else:
        yield keys.say(key, sets)
    return chosen


UNSLOTH = "Unsloth"
TABLES = ("embed_tokens", "lm_head")
"""Modules that Unsloth trains whole if they are among target_modules, as its continued pretraining does."""
DOUBLED = "transformers stores an expert's gate and up as one parameter, and PEFT gives it both ranks"


def _doubled(keys: Keys, names: Sequence[str]) -> dict[str, Any]:
    """Return twice the rank and alpha for parameters that hold two of the named modules."""
    out = {}
    for name, kind in (("rank", int), ("alpha", float)):
        value = keys.ledger.value(f"lora.{name}")
        if value is not None:
            pattern = {module: kind(2 * value) for module in names}
            out[f"lora.{name}_pattern"] = {**(keys.ledger.value(f"lora.{name}_pattern") or {}), **pattern}
    return out


def say_parameters(keys: Keys, key: str, chosen: Chosen | None) -> Says:
    """State PEFT's target_parameters, which `say_targets` was given."""
    if not keys.value(key):
        yield keys.same(key, note="no parameters besides the modules")
    elif chosen is None:
        help = "--set 'lora.targets=[q_proj, v_proj, experts]' in the recipe, once its model is known"
        yield keys.refuse(
            key, E1164, "recipec can resolve names of parameters only if it knows the model", help
        )
    elif chosen.parameters:
        sets = {"lora.targets": list(chosen.targets), "lora.layers": chosen.layers}
        lost = f"recipec puts no adapter on {listing(chosen.nothing)}" if chosen.nothing else ""
        yield keys.say(key, sets, lost)
    else:
        yield keys.unless(key, (), "recipec puts no adapter on parameters with these names")


def say_tokens(keys: Keys, key: str) -> Says:
    """State PEFT's trainable_token_indices, a list of tokens or one for each named embedding."""
    indices = keys.value(key)
    if isinstance(indices, Mapping):
        if [str(name).rpartition(".")[2] in EMBEDDED for name in indices] != [True]:
            yield keys.learned(
                key, (), "recipec trains single rows of the token embedding, and of no other module"
            )
            return
        (indices,) = indices.values()
    if not isinstance(indices, list) or not all(type(token) is int for token in indices):
        yield keys.refuse(key, E1160, f"`{key}` must be a list of tokens' numbers", f"{key}: [128256]")
        return
    yield keys.say(key, {"lora.trainable_tokens": list(dict.fromkeys(indices))})


USUAL: tuple[Any, ...] = ("layers", ["layers"], [], "", None)
"""The values of PEFT's layers_pattern that name the decoder's layers."""


def layers_of(keys: Keys) -> Statements[list[int] | None]:
    """Return PEFT's layers_to_transform, None for all layers."""
    layers = keys.value("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if layers is not None and not (isinstance(layers, list) and all(isinstance(n, int) for n in layers)):
        message = f"layers_to_transform is {flow(layers)}, which is not a list of numbers"
        yield keys.refuse("layers_to_transform", E1160, message, "layers_to_transform: [0, 1, 2]")
        return None
    return layers if keys.texts("layers_pattern") in USUAL else None


def say_patterns(keys: Keys) -> Says:
    """State rank_pattern, alpha_pattern. A key is the end of a module's name, or a regular expression."""
    for key, target, kind in (
        ("rank_pattern", "lora.rank_pattern", int),
        ("alpha_pattern", "lora.alpha_pattern", float),
    ):
        patterns = keys.mapping(key)
        values: dict[str, Any] = {}
        for name, value in patterns.items():
            number = as_number(value)
            if number is None or isinstance(value, str) or number <= 0:
                message = f"{key}: {value!r} is not a number above zero"
                yield keys.refuse(key, E1160, message, f"{key}: {{{name}: 16}}")
                break
            values[_spelling(str(name))] = kind(number)
        yield keys.same(key, {target: values} if values else None, "one value for all" if not values else "")


def _spelling(name: str) -> str:
    """Remove from a PEFT pattern the prefix of full names, which a recipe's targets do not have."""
    return re.sub(r"^\^?(?:model\.)?(?:language_model\.)?(?=layers\.|layers\\\.)", "", name)


def say_dropout(keys: Keys, chosen: Chosen | None) -> Says:
    """State `lora_dropout`. PEFT raises an error for it if it adapts parameters."""
    dropout = keys.number("lora_dropout") or 0.0
    if dropout and chosen is not None and chosen.parameters:
        message = f"a dropout of {dropout:g} with adapters on parameters, for which PEFT has no dropout"
        yield keys.refuse("lora_dropout", E1145, message, "lora_dropout: 0")
    yield keys.say("lora_dropout", {"lora.dropout": dropout})


INITS = {
    "orthogonal": "recipec starts A uniform and B at zero; the tool starts both with orthogonal rows",
    "eva": "recipec starts A uniform; the tool starts it with the directions of the activations",
}
"""Initializations of A that leave the base unchanged, and how they differ."""


PRINCIPAL = re.compile(r"olora|pissa(_niter_[1-9]\d{0,2})?")
"""Matches initializations that take a part out of the base's weights. PEFT's names are also ours."""


def say_loftq(keys: Keys, key: str, config: Any) -> Says:
    """State LoftQ, after which nf4 represents the base's weights exactly."""
    config = config if isinstance(config, Mapping) else {}
    bits, iterations = config.get("loftq_bits", 4), config.get("loftq_iter", 1)
    if bits != 4:
        yield keys.learned(key, (), f"recipec computes LoftQ only for nf4, not for {bits} bits")
        return
    notes = [] if iterations == 1 else [f"recipec makes one iteration, not {iterations}"]
    if keys.ledger.value("lora.alpha") != keys.ledger.value("lora.rank"):
        notes.append(
            "in recipec, B A times alpha / rank makes up for nf4's error; in the tool, B A alone does"
        )
    yield keys.say(key, {"lora.init": "loftq", "model.quantization": "nf4"}, "; ".join(notes))


def say_init(keys: Keys, key: str, init: Any) -> Says:
    """State PEFT's `init_lora_weights`."""
    name = str(init).lower()
    if init is True or name == "true":
        yield keys.say(key, {"lora.init": "peft"})
    elif name == "gaussian":
        yield keys.say(key, {"lora.init": "gaussian"})
    elif name in INITS:
        yield keys.say(key, {"lora.init": "peft"}, INITS[name])
    elif PRINCIPAL.fullmatch(name):
        yield keys.say(key, {"lora.init": name})
    elif name == "loftq":
        yield from say_loftq(keys, key, keys.value("loftq_config"))
        yield keys.same("loftq_config", note="its settings")
    elif init is False or name == "false":
        yield keys.say(key, {"lora.init": "peft"}, "recipec starts B at zero, not at random")
    else:
        note = (
            f"{name} starts from other weights of the base model; recipec starts from the "
            "checkpoint's own, with B at zero"
        )
        yield keys.learned(key, (), note)
        yield keys.sets("lora.init", "peft")


def say_head(keys: Keys, key: str) -> Says:
    """State a switch for an adapter on the output head."""
    if keys.flag(key):
        yield keys.say(key, {}, "recipec puts no adapter on lm_head: it trains fewer parameters")
    yield keys.same(key, note="off")


def say_pattern(
    keys: Keys, key: str, pattern: str, paths: Mapping[str, Sequence[str]], help: str
) -> Statements[list[str]]:
    """State the pattern of the modules that get adapters, and return the projections that it names.

    Args:
        pattern: the key's value, or its default. As in Qwix, it has to match the whole path of a module.
        paths: the paths of each projection's modules.
        help: a pattern that matches some.
    """
    try:
        targets = [name for name in paths if any(re.fullmatch(pattern, path) for path in paths[name])]
    except re.error as error:
        yield keys.refuse(key, E1164, f"not a regular expression: {error}", f"{key}: {help}")
        targets = list(paths)
    if not targets:
        message = "no module that can carry an adapter has these names"
        yield keys.refuse(key, E1164, message, f"{key}: {help}")
    yield keys.say(key, {"lora.targets": targets} if targets else None)
    return targets


def say_qwix(keys: Keys, kind: str, tile: str) -> Says:
    """Translate Qwix's type of frozen weights and the size of its tiles to model.quantization."""
    code = keys.choice(kind, ("nf4", "int8"))
    size = keys.integer(tile)
    wide = f"recipec stores one scale for 64 weights; the tool stores one for {size or 'a whole channel'}"
    note = {
        None: "",
        "nf4": "" if size == 64 else wide,
        "int8": "recipec stores one scale for each output channel",
    }[code]
    if code:
        yield keys.say(kind, {"model.quantization": code}, note)
    yield from keys.passive((kind, tile), "part of model.quantization" if code else "not quantized")


def say_bits(
    keys: Keys, key: str, bits: int | None, kind: str, nested: bool, model: Model | None
) -> Statements[Quantization]:
    """State the switch for a frozen base in 4 or 8 bits, and return the recipe's quantization.

    Args:
        kind: bitsandbytes' format of 4 bits; one that it does not have counts as nf4.
        nested: whether the scales are quantized too.
    """
    left = experts.has_experts(model)
    quantization = quantized(bits, kind if kind in ("nf4", "fp4") else "nf4", nested, left)
    if quantization.value is not None:
        yield keys.say(key, {"model.quantization": quantization.value}, quantization.note)
    return quantization


def refuse_quantized(keys: Keys, key: str, help: str) -> Says:
    """Refuse a switch for a quantized base if there are no adapters to train on it."""
    if keys.flag(key) if isinstance(keys.value(key), bool) else keys.given(key):
        message = f"`{key}` with full fine-tuning: a quantized base model cannot be trained itself"
        yield keys.refuse(key, E1146, message, help)


def fused(model: Model | None, names: Sequence[str]) -> tuple[list[str], str]:
    """Replace Llama's names of projections by the model's own. Some models have one projection for several,
    and a plain feed-forward block has none for `gate_proj`.

    Returns:
        The names, and the resulting difference, "" for none.
    """
    if model is None:
        return list(names), ""
    sites = linear_layers(model.family, model.architecture)
    projections = {site.projection.rpartition(".")[2] for site in sites}
    called = model.family.names
    holders = dict.fromkeys(("q_proj", "k_proj", "v_proj"), called.qkv)
    holders |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
    parts = [name for name in names if name not in projections and holders.get(name) in projections]
    plain = called.plain[0] in projections
    others = {"o_proj": called.out, **dict(zip(("up_proj", "down_proj"), called.plain, strict=True))}
    others = {
        name: other for name, other in others.items() if name not in projections and other in projections
    }
    others |= {name: holders[name] for name in parts}
    kept = [name for name in names if name in projections or name != "gate_proj" or not plain]
    fused_names = list(dict.fromkeys(others.get(name, name) for name in kept))
    whole = listing(dict.fromkeys(holders[name] for name in parts))
    note = (
        f"{listing(parts)} are parts of {whole}, which has one A for all of its parts, and "
        "one B of its full size"
    )
    return fused_names, note if parts else ""


def _without_model(keys: Keys, key: str, spec: str | Sequence[str], also: Sequence[str]) -> Says:
    whole = {"lora.modules_to_save": list(also)} if also else {}
    if not isinstance(spec, str) and set(spec) <= set(PROJECTIONS):
        yield keys.say(key, {"lora.targets": list(spec), **whole})
    elif spec == "all-linear":
        yield keys.say(key, {"lora.targets": list(PROJECTIONS)})
    else:
        what = "recipec can resolve names of modules only if it knows the model"
        help = f"port it with --set 'lora.targets=[{PROJECTIONS[0]}, {PROJECTIONS[2]}]'"
        yield keys.refuse(key, E1164, what, help)


VISION = "vision tower"


@dataclass(frozen=True)
class Module:
    """One of transformers' modules that PEFT could adapt.

    Attributes:
        name: the full name.
        site: the projection as the recipe's targets match it ("layers.7.self_attn.q_proj"); None for a module
            that carries no adapter here.
        linear: whether it is a torch.nn.Linear; embeddings are not.
        parameter: whether it is a parameter, which `target_parameters` names, and not a module.
        what: its kind if it has no site: "lm_head", "embed_tokens", "router", ..., VISION.
        tower: the projection of a vision tower that carries an adapter with `lora.vision`; "" for none.
    """

    name: str
    site: str | None
    linear: bool = True
    what: str = ""
    parameter: bool = False
    tower: str = ""

    @property
    def tensor(self) -> str:
        """The name of the parameter that an adapter is added to."""
        return self.name if self.parameter else f"{self.name}.weight"

    @property
    def former(self) -> str:
        """The module that a parameter belongs to, or was in transformers 4."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True)
class Chosen:
    """A tool's targets on a model.

    Attributes:
        targets: the value of `lora.targets`; empty if no projection is among them.
        layers: the value of `lora.layers`: "all", "20-59" or a list.
        sites: the projections themselves.
        beyond: modules that the tool adapts and a recipe cannot, by `Module.what`, without the vision tower.
        vision: whether parts of a vision tower are among them. Text does not train these.
        tower: those that carry adapters with `lora.vision`.
        unmatched: entries of the list that match no module.
        parameters: whether some of the sites are parameters instead of linear layers.
        nothing: given names of parameters that do not exist here, or carry no adapter.
        doubled: projections that hold two of the named modules, and have the sum of their ranks.
    """

    targets: tuple[str, ...]
    layers: str | list[int]
    sites: tuple[str, ...]
    beyond: tuple[str, ...] = ()
    vision: bool = False
    unmatched: tuple[str, ...] = ()
    parameters: bool = False
    nothing: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    tower: tuple[str, ...] = ()


def modules(model: Model) -> list[Module]:
    """Return a model's transformers modules that PEFT could adapt, the language model's in layer order.

    Of a vision tower that is not computed here only a few modules are listed. They stand for all, because its
    layers are numbered in the same way.
    """
    prefix = prefix_of(model)
    called = model.family.names
    out = [Module(prefix + called.embedding, None, linear=False, what="embed_tokens")]
    for site in linear_layers(model.family, model.architecture):
        out.append(Module(f"{prefix}{site.name}", site.name))
    for site in model.family.expert_targets(model.architecture):
        name = f"{prefix}layers.{site.layer}.{site.parameter or site.projection}"
        linear = not site.parameter
        out.append(Module(name, site.name, linear, parameter=not linear))
    out += [Module(prefix + name, None, what=name.rpartition(".")[2]) for name in _others(model)]
    if is_multimodal(model):
        known = _trained_tower(model)
        out += [*known, *(Module(name, None, what=VISION) for name in _tower(model))]
    return [*out, Module(called.head, None, what="lm_head")]


def is_multimodal(model: Model) -> bool:
    """Return whether transformers loads the checkpoint with a vision tower and a language model."""
    return "text_config" in model.config or "vision_config" in model.multimodal


def prefix_of(model: Model) -> str:
    """Return the prefix of the language model's module names in transformers."""
    return model.family.prefixes[0 if is_multimodal(model) else -1]


def choose(
    model: Model,
    spec: str | Sequence[str],
    layers: Iterable[int] | None = None,
    exclude: str | Sequence[str] | None = None,
    parameters: Sequence[str] = (),
) -> Chosen:
    """Match PEFT's target_modules and target_parameters on a model.

    Args:
        spec: a list of names and their ends, or a text: "all-linear" or a regular expression.
        layers: PEFT's layers_to_transform, which applies only to a list of modules; None or empty for all.
        exclude: PEFT's exclude_modules, in the form of `spec`.
        parameters: names of parameters and their ends.

    Raises:
        re.error: a text is not a regular expression.
        experts.Halved: only one of two modules is named that are one parameter.
    """
    together = modules(model)
    every = [module for module in together if not module.parameter]
    names = [name for module in together for name in {module.name: 0, module.former: 0}]
    linear = [module.name for module in together if module.linear and module.what != "lm_head"]
    read = experts.read(model, spec, linear, names)
    matched = [module for module in every if _matches(read.modules, module.name)]
    if not isinstance(read.modules, str) and (wanted := set(layers or ())):
        matched = [module for module in matched if _layer(module.name) in wanted]
    if exclude:
        matched = [module for module in matched if not _matches(exclude, module.name)]
    named = (*parameters, *read.parameters)
    weights = [module for module in together if _matches(named, module.tensor)]
    unmatched = () if isinstance(read.modules, str) else _unmatched(read.modules, [m.name for m in every])
    nothing = _unmatched(named, [module.tensor for module in weights if module.site is not None])
    matched = list(dict.fromkeys([*matched, *(module for module in weights if module.site is not None)]))
    sites = tuple(module.site for module in matched if module.site is not None)
    targets, chosen_layers = express(model, sites)
    beyond = dict.fromkeys(module.what for module in matched if module.site is None and module.what != VISION)
    vision = any(module.what == VISION for module in matched)
    experts_of = model.family.expert_targets(model.architecture)
    doubled = [site.projection for site in experts_of if site.projection.rpartition(".")[2] in read.doubled]
    return Chosen(
        targets,
        chosen_layers,
        sites,
        tuple(beyond),
        vision,
        unmatched,
        any(module in weights for module in matched),
        nothing,
        tuple(dict.fromkeys(doubled)),
        tuple(dict.fromkeys(module.tower for module in matched if module.tower)),
    )


LAYERS_OF = {
    "finetune_vision_layers": ("vision", "image", "visual", "patch"),
    "finetune_language_layers": ("language", "text"),
}
MODULES_OF = {
    "finetune_attention_modules": ("self_attn", "attention", "attn"),
    "finetune_mlp_modules": ("mlp", "feed_forward", "ffn", "dense"),
}
"""Unsloth's switches for what gets adapters in a model with a vision tower, with the words in the names of
its modules by which it finds them."""


def unsloth_targets(model: Model, off: Collection[str]) -> str:
    """Return the regular expression by which Unsloth selects the modules of a model with a vision tower.

    It matches the linear layers whose last name occurs more than once in the model.

    Args:
        off: the switches that are off.
    """
    names = {module.name for module in modules(model) if module.linear and not module.parameter}
    last = Counter(name.rpartition(".")[2] for name in names)
    leaves = "|".join(re.escape(name) for name, count in last.items() if count > 1)
    places, kinds = (
        "|".join(word for switch, words in of.items() if switch not in off for word in words)
        for of in (LAYERS_OF, MODULES_OF)
    )
    return rf".*({places}).*({kinds}).*\.({leaves})(\..*)?"


def with_tower(model: Model, targets: Sequence[str], tower: Sequence[str]) -> list[str]:
    """Return the `lora.targets` that mean these projections of a vision tower too, and no others of it.

    Args:
        targets: of the language model.
        tower: the projections of the tower, by their names in the model.
    """
    assert model.tower is not None
    sites, text = model.tower.targets(), model.family.all_targets(model.architecture)
    wanted = set(tower)

    def reached(names: Sequence[str], among: Iterable[Any]) -> set[str]:
        return {site.name for site in among if any(meant(name, site) for name in names)}

    names = list(dict.fromkeys([*targets, *(short_name(site) for site in sites if site.name in wanted)]))
    if reached(names, sites) == wanted and reached(names, text) == reached(targets, text):
        return names
    if reached(targets, sites) - wanted:
        holder = model.family.names.layers
        targets = [rf"{holder}\.\d+\.(.+\.)?{name}" if name.isidentifier() else name for name in targets]
    stems: dict[str, list[str]] = {}
    for site in sites:
        numbered = re.fullmatch(r"(.+?\.)\d+\..+", site.name)
        stems.setdefault(numbered[1] if numbered else "", []).append(site.name)
    out = list(targets)
    for stem, of_stem in stems.items():
        if stem and wanted.issuperset(of_stem):
            out.append(rf"{re.escape(stem)}\d+\..+")
            continue
        slots = dict.fromkeys(name.removeprefix(stem).partition(".")[2] if stem else name for name in of_stem)
        for slot in slots:
            here = [name for name in of_stem if name.endswith(slot) and name in wanted]
            every = [name for name in of_stem if name.endswith(slot)]
            if stem and here == every:
                out.append(rf"{re.escape(stem)}\d+\.{re.escape(slot)}")
            else:
                out += [re.escape(name) for name in here]
    return out


def express(model: Model, sites: Sequence[str]) -> tuple[tuple[str, ...], str | list[int]]:
    """Return the `lora.targets` and `lora.layers` that mean exactly these projections.

    The result is names of projections, or `experts` and `router`, if all are adapted in the same layers.
    Otherwise it is a regular expression for each.
    """
    everywhere: dict[str, list[tuple[int, str]]] = {}
    for site in model.family.all_targets(model.architecture):
        if site.layer is None:
            continue  # a vision tower's: `lora.vision` adapts all of them or none
        name = site.words[0] if site.words else site.projection.rpartition(".")[2]
        everywhere.setdefault(name, []).append((site.layer, site.projection))
    wanted, holder = set(sites), model.family.names.layers
    by_name = {
        name: [(layer, slot) for layer, slot in of if f"{holder}.{layer}.{slot}" in wanted]
        for name, of in everywhere.items()
    }
    by_name = {name: sites_of for name, sites_of in by_name.items() if sites_of}
    chosen = sorted({layer for sites_of in by_name.values() for layer, _ in sites_of})
    if all(
        sites_of == [place for place in everywhere[name] if place[0] in chosen]
        for name, sites_of in by_name.items()
    ):
        whole = all(len(sites_of) == len(everywhere[name]) for name, sites_of in by_name.items())
        return tuple(by_name), "all" if whole else _layers(chosen)
    out = []
    for name, sites_of in by_name.items():
        if len(sites_of) == len(everywhere[name]):
            out.append(name)
            continue
        for slot in dict.fromkeys(slot for _, slot in sites_of):
            layers = [layer for layer, its in sites_of if its == slot]
            all_of_them = len(layers) == sum(its == slot for _, its in everywhere[name])
            numbers = r"\d+" if all_of_them else f"({'|'.join(map(str, sorted(layers)))})"
            out.append(rf"{holder}\.{numbers}\.{re.escape(slot)}")
    return tuple(out), "all"


def _layers(chosen: list[int]) -> str | list[int]:
    if len(chosen) > 2 and chosen == list(range(chosen[0], chosen[-1] + 1)):
        return f"{chosen[0]}-{chosen[-1]}"
    return chosen


def _matches(spec: str | Sequence[str], name: str) -> bool:
    if isinstance(spec, str):
        return re.fullmatch(spec, name) is not None
    return name in spec or name.endswith(tuple(f".{entry}" for entry in spec))


def _unmatched(spec: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    def matched(entry: str) -> bool:
        end = f".{entry}"
        return any(name == entry or name.endswith(end) for name in names)

    return tuple(entry for entry in spec if not matched(entry))


def _layer(name: str) -> int | None:
    """Return the index of a module's layer: the first number that is a later part of its name, or None."""
    match = re.match(r"(?:.*?\.)?[^.]*\.(\d+)\.", name)
    return int(match[1]) if match else None


def _others(model: Model) -> Iterable[str]:
    """Yield the language model's Linear modules without an adapter here, relative to its prefix."""
    layers = range(model.architecture.num_layers)
    if getattr(model.architecture, "per_layer_input", 0):
        for layer in layers:
            yield f"layers.{layer}.per_layer_input_gate"
            yield f"layers.{layer}.per_layer_projection"
        yield "per_layer_model_projection"
    if isinstance(a := model.architecture, DecoderArchitecture):
        for layer in layers:
            if (mixture := a.experts_of(layer)) is not None and mixture.shared_gate:
                yield f"layers.{layer}.{mixture.tensors.block}.shared_expert_gate"


def _trained_tower(model: Model) -> Iterator[Module]:
    """Yield the modules of a vision tower that carry adapters here, and the modules that wrap them."""
    for site in () if model.tower is None else model.tower.targets():
        name = HOLDER + site.projection
        yield Module(name, None, what=VISION, tower=site.projection)
        if site.inner:
            yield Module(name.removesuffix(site.inner), None, False, VISION, tower=site.projection)


def _tower(model: Model) -> Iterable[str]:
    tower: Iterable[str] = of_model("peft", "towers", model=model) or ()
    return tower


@dataclass(frozen=True)
class Quantization:
    """The meaning of a quantized base here.

    Attributes:
        value: the value of `model.quantization`: "nf4", "int8", or None for weights in model.dtype.
        note: how it differs, "" if the weights are the same.
    """

    value: str | None
    note: str = ""


NESTED = "recipec stores scales in float32: weights are a little more precise, 0.4 bits larger"
INT8 = "recipec's activations are in model.dtype; LLM.int8()'s are int8, with outliers in float16"
FP4 = "recipec uses nf4 instead: the same size and blocks, other code points"


def quantized(bits: int | None, kind: str = "nf4", nested: bool = False, left: bool = False) -> Quantization:
    """Return the recipe's quantization for that of bitsandbytes.

    Args:
        bits: 4 or 8; None or at least 16 for none.
        kind: the format of 4 bits: "nf4" or "fp4".
        nested: whether the scales are quantized too (`bnb_4bit_use_double_quant`).
        left: whether there are experts, which the tool does not quantize.

    Raises:
        ValueError: for other bits, or another kind.
    """
    if bits is None or bits >= 16:
        return Quantization(None)
    if bits == 8:
        return Quantization("int8", "; ".join([INT8, *([experts.LEFT] if left else [])]))
    if bits != 4 or kind not in ("nf4", "fp4"):
        raise ValueError(f"{kind} in {bits} bits")
    notes = [
        *([FP4] if kind == "fp4" else []),
        *([NESTED] if nested else []),
        *([experts.LEFT] if left else []),
    ]
    return Quantization("nf4", "; ".join(notes))
