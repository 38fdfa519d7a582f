"""Check that a PEFT adapter matches a recipe, and say which recipe would match it.

Nothing here imports numpy, because the compiler also uses this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UserError
from ..model.adapters import PROJECTOR, Adapter, LoraSettings, Value, build_adapters, by_pattern
from ..model.families.towers import is_of_tower
from ..untrusted import MATCH_SECONDS, TooLong, limit
from .adapter import AGAIN, LAYER, MERGE, ROWS, WHICH, PeftAdapter, PeftConfig
from .peft_names import (
    ADAPTER_CONFIG,
    Known,
    has_parameters,
    is_tied,
    keys_as_values,
    own_name,
    plain,
    refuse_rows,
    unwrapped,
    whole_sources,
)

BUILD = "build the recipe with {}"
"""The help if a recipe has other values."""


def fitting(adapter: PeftAdapter, base: Known, settings: LoraSettings) -> PeftAdapter:
    """Return the adapter under the recipe's names; it must be exactly what the recipe trains.

    Raises:
        UserError: naming the differences, and the lines of a recipe that trains this adapter.
    """
    if has_parameters(base):
        adapter = unwrapped(adapter, base)
    adapter = _without_copies(adapter, base)
    _check_known(adapter, base)
    refuse_rows(base, adapter.config.base or adapter.path, settings)
    adapters = build_adapters(base.family, base.architecture, settings)
    _check_settings(adapter, adapters, base, settings)
    _check_shapes(adapter, adapters)
    for source in whole_sources(base, settings, rows=True):
        name = own_name(base, source)
        if adapter.whole[name].shape != source.shape:
            raise _other_shape(adapter, name, adapter.whole[name].shape, source.shape)
    return adapter


def settings_of(adapter: PeftAdapter, base: Known) -> LoraSettings:
    """Return the `lora` section of a recipe that trains an adapter, in float32.

    Raises:
        UserError: when the base has no such projections.
    """
    if has_parameters(base):
        adapter = unwrapped(adapter, base)
    adapter = _without_copies(adapter, base)
    _check_known(adapter, base)
    config, (ranks, alphas) = adapter.config, _scales(adapter, base)
    called = {target.name: target.words[0] for target in base.family.expert_targets(base.architecture)}
    whole = (name for name in adapter.whole if not name.endswith(ROWS))
    return LoraSettings(
        rank=config.rank,
        alpha=config.alpha,
        rslora=config.rslora,
        rank_pattern={re.escape(name): rank for name, rank in ranks.items() if rank != config.rank},
        alpha_pattern={re.escape(name): alpha for name, alpha in alphas.items() if alpha != config.alpha},
        targets=tuple(sorted({called.get(name, name) for name in adapter.tensors})),
        modules_to_save=tuple(_saved(whole)),
        trainable_tokens=config.tokens,
        kind="dora" if config.dora else "lora",
        vision=any(map(is_of_tower, adapter.tensors)),
    )


def _saved(whole: Iterable[str]) -> list[str]:
    """Return a recipe's lora.modules_to_save for tensors that were trained whole."""
    return sorted({PROJECTOR if is_of_tower(name) else name.removesuffix(".weight") for name in whole})


def _check_known(adapter: PeftAdapter, base: Known) -> None:
    """Check that the adapter's modules are projections of the base; otherwise raise UserError."""
    layers = base.architecture.num_layers
    known = {target.name for target in base.family.all_targets(base.architecture)}
    for module in adapter.tensors:
        layer = LAYER.fullmatch(module)
        if layer and int(layer[1]) >= layers:
            raise UserError(
                f"{adapter.path}: {module} carries an adapter; the base has {layers} layers",
                _own_base(adapter.config),
            )
        if is_of_tower(module) and base.architecture.vision is None:
            raise UserError(
                f"{adapter.path}: {adapter.full_names[module]} carries an adapter, and the vision tower is "
                "no part of the trained model",
                BUILD.format("data.images: {}, lora.vision: true") + ", or " + MERGE,
            )
        if module not in known:
            raise UserError(
                f"{adapter.path}: {module} carries an adapter, but is not a projection that train.py trains",
                "train an adapter whose target_modules are projections of attention and the dense blocks, "
                "with experts as target_parameters; or " + MERGE,
            )


def _check_settings(
    peft_adapter: PeftAdapter, adapters: Sequence[Adapter], base: Known, settings: LoraSettings
) -> None:
    """Check the adapter's modules, ranks and alphas; raise UserError with all differences from the recipe."""
    config, present = peft_adapter.config, set(peft_adapter.tensors)
    ranks, alphas = _scales(peft_adapter, base)
    wanted = {adapter.name for adapter in adapters}
    parts: list[str] = []
    lines: list[str] = []
    if present != wanted:
        parts += _one_sided(wanted, present, "")
        lines += _targets(present, base, settings)
    saved, every = (
        {own_name(base, s) for s in whole_sources(base, settings, rows=rows)} for rows in (False, True)
    )
    rows = {name for name in peft_adapter.whole if name.endswith(ROWS)}
    whole = peft_adapter.whole.keys() - rows
    if saved != whole:
        parts += _one_sided(saved, whole, " whole")
        lines.append(f"lora.modules_to_save: {_yaml(_saved(whole))}")
    known = all(isinstance(token, int) for token in settings.trainable_tokens)
    if rows != every - saved or (known and {*config.tokens} != {*settings.trainable_tokens}):
        tokens, ours = _yaml(list(config.tokens)), _yaml(list(settings.trainable_tokens))
        parts.append(f"the adapter has the embedding's rows {tokens}, and the recipe trains {ours}")
        lines.append(f"lora.trainable_tokens: {tokens}")
    if config.dora != (settings.kind == "dora"):
        kind = "dora" if config.dora else "lora"
        parts.append(f"use_dora is {_yaml(config.dora)}, and lora.kind {settings.kind}")
        lines.append(f"lora.kind: {kind}")
    if config.rslora != settings.rslora:
        parts.append(f"use_rslora is {_yaml(config.rslora)}, and lora.rslora {_yaml(settings.rslora)}")
        lines.append(f"lora.rslora: {_yaml(config.rslora)}")
    _compare("rank", ranks, settings.rank_of, config.rank, config.rank_pattern, parts, lines)
    _compare("alpha", alphas, settings.alpha_of, config.alpha, config.alpha_pattern, parts, lines)
    if parts:
        raise UserError(
            f"{peft_adapter.path}: does not fit the recipe: {'; '.join(parts)}",
            BUILD.format(", ".join(lines)),
        )


def _one_sided(wanted: Collection[str], present: Collection[str], how: str) -> list[str]:
    """Describe the names that are in only one of two sets."""
    return [
        words.format(_some(names))
        for names, words in (
            (set(wanted) - set(present), f"the recipe trains {{}}{how}, which the adapter does not have"),
            (set(present) - set(wanted), f"the adapter has {{}}{how}, which the recipe does not train"),
        )
        if names
    ]


def _scales(adapter: PeftAdapter, base: Known) -> tuple[dict[str, int], dict[str, float]]:
    """Return rank and alpha of each module of the adapter, in the model's order; A must have its rank."""
    config = adapter.config
    sites = base.family.all_targets(base.architecture)
    experts = {site.name: site.experts for site in sites if site.name in adapter.tensors}
    try:
        with limit(MATCH_SECONDS):
            ranks = {module: config.rank_of(adapter.full_names[module]) for module in experts}
            alphas = {module: config.alpha_of(adapter.full_names[module]) for module in experts}
    except TooLong:
        raise UserError(
            f"{adapter.files.path(ADAPTER_CONFIG)}: its patterns were not matched within {MATCH_SECONDS:g} s",
            AGAIN,
        ) from None
    for module, rank in ranks.items():
        stored = adapter.tensors[module][0].shape[:1]
        if stored != (rank * max(1, experts[module]),):
            raise UserError(
                f"{adapter.path}: A of {module} has shape {list(adapter.tensors[module][0].shape)}; "
                f"{ADAPTER_CONFIG} gives it rank {rank}",
                "both files must be of one adapter, saved completely (with ZeRO-3 or FSDP: gathered first)",
            )
    return ranks, alphas


def _check_shapes(peft_adapter: PeftAdapter, adapters: Sequence[Adapter]) -> None:
    """Check that A and B fit the base's weights; otherwise raise UserError."""
    for adapter in adapters:
        tensors = peft_adapter.tensors[adapter.name]
        for which, tensor, shape in zip(WHICH, tensors, adapter.peft_shapes, strict=False):
            if tensor.shape != shape:
                raise _other_shape(peft_adapter, f"{which} of {adapter.name}", tensor.shape, shape)


def _other_shape(adapter: PeftAdapter, name: str, shape: Sequence[int], wanted: Sequence[int]) -> UserError:
    return UserError(
        f"{adapter.path}: {name} has shape {list(shape)}; the base's weight needs {list(wanted)}",
        _own_base(adapter.config),
    )


def _own_base(config: PeftConfig) -> str:
    name = config.base or "its model card names it"
    return f"give the adapter's own base with --model ({name})"


def _compare(
    what: str,
    values: Mapping[str, Value],
    ours: Callable[[str], Value],
    default: Value,
    pattern: Mapping[str, Value],
    parts: list[str],
    lines: list[str],
) -> None:
    """Add the differences of ranks or alphas from the recipe's, and the lines that would remove them."""
    other = [module for module in values if values[module] != ours(module)]
    if not other:
        return
    first = other[0]
    more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    parts.append(f"{first}{more} has {what} {plain(values[first])}, in the recipe {plain(ours(first))}")
    lines.append(f"lora.{what}: {plain(default)}")
    if any(by_pattern(pattern, module, default) != value for module, value in values.items()):
        pattern = {re.escape(module): value for module, value in values.items() if value != default}
    lines.append(f"lora.{what}_pattern: {_yaml({key: plain(value) for key, value in pattern.items()})}")


def _targets(present: Collection[str], base: Known, settings: LoraSettings) -> list[str]:
    """Return the lines of a recipe that trains exactly the given modules."""
    called = {target.name: target.words[0] for target in base.family.expert_targets(base.architecture)}
    names = sorted({called.get(module) or module.rpartition(".")[2] for module in present})
    layers = sorted({int(match[1]) for module in present if (match := LAYER.fullmatch(module))})
    free = replace(settings, kv="independent")
    for chosen, words in ((None, "all"), (tuple(layers), _yaml(layers))):
        adapters = build_adapters(
            base.family, base.architecture, replace(free, targets=tuple(names), layers=chosen)
        )
        if {adapter.name for adapter in adapters} == set(present):
            return [f"lora.targets: {_yaml(names)}", f"lora.layers: {words}"]
    return [f"lora.targets: {_yaml(sorted(present))}", "lora.layers: all"]


def _some(names: Collection[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _yaml(value: Any) -> str:
    """Format a value for one line of a recipe; strings are unquoted if YAML allows it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*", value):
        return value
    return json.dumps(value)


def _without_copies(adapter: PeftAdapter, base: Known) -> PeftAdapter:
    """Return the adapter without duplicates: k_proj's A and B under v_proj's name, which our export writes
    for vLLM, and an embedding under its head's name, which PEFT writes.

    A duplicate is removed only if the base has no such weight and the copies are equal; others are refused.
    """
    copies = {
        values
        for keys, values in keys_as_values(base, adapter.tensors)
        if values in adapter.tensors
        and all(
            adapter.same(*pair) for pair in zip(adapter.tensors[keys], adapter.tensors[values], strict=True)
        )
    }
    tensors = {name: pair for name, pair in adapter.tensors.items() if name not in copies}
    return _without_head(replace(adapter, tensors=tensors), base)


def _without_head(adapter: PeftAdapter, base: Known) -> PeftAdapter:
    """Return the adapter without the embedding's copy for a head that is the embedding.

    In PEFT the embedding and such a head have values of their own. The adapter is refused unless both copies
    hold the same, or PEFT was asked to tie them.
    """
    names, whole = base.family.names, dict(adapter.whole)
    head = whole.pop(f"{names.head}.weight", None)
    embedding = next(
        (whole[f"{module}.weight"] for module in names.of_embedding if f"{module}.weight" in whole), None
    )
    if not is_tied(base) or (embedding is None and head is None):
        return adapter
    if embedding is None:
        what = f"{names.head} was trained, and {names.embedding} was not"
    elif head is None and not adapter.config.tied:
        what = f"{names.embedding} was trained, and {names.head} kept the base's values"
    elif head is not None and not adapter.same(embedding, head):
        what = f"{names.embedding} and {names.head} were trained apart"
    else:
        return replace(adapter, whole=whole)
    raise UserError(
        f"{adapter.path}: {what}; the base uses one tensor for both",
        "train with PEFT's ensure_weight_tying; or " + MERGE,
    )
