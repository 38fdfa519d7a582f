"""The LoRA adapters that a recipe asks for, as the model's arrays and as PEFT's matrices.

As in PEFT, each projection has its own A and B. With `lora.kv: shared`, a layer's values use the A of its
keys.

DoRA adds a trained magnitude for each output of a projection. The output's column of the weight with its
adapter is scaled to that magnitude (Liu et al. 2024, as PEFT's use_dora).

In a weight that holds a layer's experts each expert has its own A and B, along a first axis of both arrays,
as PEFT has them for `target_parameters`. Gate and up of an expert share its A.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..sections import Lora
from .families.family import (
    PREFIXES,
    Architecture,
    Family,
    LoraTarget,
    Parameter,
    Source,
    Spec,
    arrays,
    sites,
)
from .families.vision import PROJECTING

if TYPE_CHECKING:
    import numpy as np

Value = TypeVar("Value", int, float)
Matrices = tuple["np.ndarray", ...]
"""A and B of a projection and, with DoRA, its magnitudes."""
PROJECTOR = "projector"
"""In lora.modules_to_save: all that makes the language model's features of a vision tower's."""
PARTS = ("A", "B", "magnitude")
"""The suffixes after "lora_" in the names of a projection's arrays."""

EMBEDDING = "embedder.input_embedding"
TOKEN_ROWS = f"{EMBEDDING}_rows"
"""The paths of the token embedding, and of its rows that lora.trainable_tokens trains."""
NOT_A_PATTERN = (re.error, RecursionError, OverflowError)
"""What re raises for a text that is not a regular expression."""


@dataclass(frozen=True)
class LoraSettings(Lora):
    """The `lora` section of a recipe.

    Attributes:
        alpha: the delta is scaled by alpha / rank.
        layers: indices of the adapted layers, None for all.
    """

    alpha: float = field(kw_only=True)
    layers: tuple[int, ...] | None = None

    @property
    def principal(self) -> bool:
        """Return whether A and B start from the base's weights (initial.py)."""
        return principal(self.init)

    @property
    def trains_whole(self) -> bool:
        """Return whether modules, or rows of the embedding, are trained next to adapters (selection.py)."""
        return bool(self.modules_to_save or self.trainable_tokens)

    def rank_of(self, module: str) -> int:
        """Return the rank of a projection ("layers.7.self_attn.q_proj")."""
        return by_pattern(self.rank_pattern, module, self.rank)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a projection."""
        return by_pattern(self.alpha_pattern, module, self.alpha)

    def scale_of(self, module: str) -> float:
        """Return the factor of a projection's B @ A."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True)
class Adapter:
    """The LoRA pair of one weight, and DoRA's magnitudes.

    Attributes:
        target: the weight.
        scale: factor of B @ A.
        a_shape, b_shape: [*contracted, rank] and [rank, *rest of the weight]; for experts both have a first
            axis of experts.
        a_spec, b_spec: their shardings, following the weight's.
        dora: whether there are magnitudes, with the shape of the weight's outputs.
        lender: the adapter whose A this one uses; None for an A of its own.
    """

    target: LoraTarget
    scale: float
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    a_spec: Spec
    b_spec: Spec
    dora: bool = False
    lender: Adapter | None = None

    @property
    def arrays(self) -> tuple[tuple[str, tuple[int, ...], Spec], ...]:
        """Return path, shape and sharding of A, of B and, with DoRA, of the magnitudes."""
        pair = (self.a_path, self.a_shape, self.a_spec), (self.b_path, self.b_shape, self.b_spec)
        magnitudes = f"{self.target.weight}_lora_m", self.b_shape[1:], self.b_spec[1:]
        return (*pair, magnitudes) if self.dora else pair

    @property
    def a_path(self) -> str:
        """Return the path of A, which under lora.kv: shared may be that of another weight's adapter."""
        return f"{self.lending.target.weight}_lora_a"

    @property
    def lending(self) -> Adapter:
        """Return the adapter that has this one's A."""
        return self if self.lender is None else self.lender

    @property
    def b_path(self) -> str:
        return f"{self.target.weight}_lora_b"

    @property
    def name(self) -> str:
        """Return the projection's name within Hugging Face's decoder: "layers.7.self_attn.k_proj"."""
        return self.target.name

    @property
    def module(self) -> str:
        """Return the path of the flax module that has the weight."""
        return self.target.weight.rpartition(".")[0]

    @property
    def rank(self) -> int:
        return self.a_shape[-1]

    @property
    def shared(self) -> bool:
        """Return whether A is that of another projection."""
        return self.lender is not None

    def to_peft(self, a: np.ndarray, b: np.ndarray, m: np.ndarray | None = None) -> Matrices:
        """Return A [rank, in], B [out, rank] and with DoRA the magnitudes [out], laid out as in PEFT.

        Args:
            a, b, m: the arrays that `arrays` describes.
        """
        pair = a.reshape(-1, self.rank).T, b.reshape(self.rank, -1).T
        return pair if m is None else (*pair, m.reshape(-1))

    @property
    def peft_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of `to_peft`: A [rank, in], B [out, rank] and with DoRA the magnitudes [out]."""
        features_in, features_out = math.prod(self.a_shape[:-1]), math.prod(self.b_shape[1:])
        pair = (self.rank, features_in), (features_out, self.rank)
        return (*pair, (features_out,)) if self.dora else pair

    def from_peft(self, matrices: Matrices) -> Matrices:
        """Invert `to_peft`: return the values of the arrays that `arrays` describes, each contiguous."""
        low, high, *magnitudes = matrices
        pair = low.T.reshape(self.a_shape), high.T.reshape(self.b_shape)
        return tuple(array.copy() for array in (*pair, *(m.reshape(self.b_shape[1:]) for m in magnitudes)))


class ExpertAdapter(Adapter):
    """The adapters of a layer's experts: one A and B for each expert of a weight.

    PEFT has A [experts * rank, in] and B [out, rank * experts].
    """

    def to_peft(self, a: np.ndarray, b: np.ndarray, m: np.ndarray | None = None) -> Matrices:
        count, rank = self.target.experts, self.rank
        low = a.reshape(count, -1, rank).swapaxes(1, 2)
        high = b.transpose(self._outputs).reshape(count, rank, -1)
        if self.target.swapped:
            low, high = high, low
        return low.reshape(count * rank, -1), high.transpose(2, 1, 0).reshape(-1, rank * count)

    @property
    def peft_shapes(self) -> tuple[tuple[int, ...], ...]:
        ranks = self.rank * self.target.experts
        low, high = math.prod(self.a_shape[1:-1]), math.prod(self.b_shape[2:])
        return ((ranks, high), (low, ranks)) if self.target.swapped else ((ranks, low), (high, ranks))

    def from_peft(self, matrices: Matrices) -> Matrices:
        import numpy as np  # the compiler, which has no numpy, imports this module

        low, high = matrices
        low = low.reshape(self.target.experts, self.rank, -1)
        high = high.reshape(-1, self.rank, self.target.experts).transpose(2, 1, 0)
        if self.target.swapped:
            low, high = high, low
        high = high.reshape([self.b_shape[axis] for axis in self._outputs])
        low = low.swapaxes(1, 2).reshape(self.a_shape)
        return np.ascontiguousarray(low), np.ascontiguousarray(high.transpose(np.argsort(self._outputs)))

    @property
    def _outputs(self) -> tuple[int, ...]:
        """Return the axes of B, with the outputs in Hugging Face's order."""
        rest = tuple(range(2, len(self.b_shape)))
        return 0, 1, *(rest[::-1] if self.target.alternate else rest)

    def tensors(
        self, parameter: Parameter, a: np.ndarray, b: np.ndarray
    ) -> Iterator[tuple[Source, np.ndarray, np.ndarray]]:
        """Yield A and B of each tensor that the weight is made of: one expert's, or all experts'.

        Args:
            parameter: the weight.
            a, b: [experts, *in, rank] and [experts, rank, *out].
        """
        contract = self.target.contract
        rest = [axis for axis in range(1, len(parameter.shape)) if axis not in contract]
        for number, source in enumerate(parameter.sources):
            place = parameter.place(number)
            kept = [axis for axis, index in enumerate(place) if isinstance(index, slice)]
            at = dict(zip(kept, source.transpose, strict=True))  # the tensor's axes, by the weight's
            outputs = [axis for axis in rest if axis in at]
            low = a[place[0]]
            high = b[(place[0], slice(None), *(place[axis] for axis in rest))]
            first = high.ndim - len(outputs)
            order = [first + outputs.index(axis) for axis in sorted(outputs, key=at.__getitem__)]
            high = high.transpose(*range(first), *order).reshape(*high.shape[:first], -1)
            if min(map(at.__getitem__, outputs)) < min(at[axis] for axis in contract):
                low, high = low.swapaxes(-1, -2), high.swapaxes(-1, -2)
            else:  # [in, out]: (B A)^T = A^T B^T
                low, high = high, low
            yield source, low, high


def within(site: LoraTarget, lora: LoraSettings) -> bool:
    """Return whether a weight is in the layers that `lora.layers` names, or in the tower of `lora.vision`."""
    if site.layer is None:
        return lora.vision
    return lora.layers is None or site.layer in lora.layers


def meant(target: str, site: LoraTarget) -> bool:
    """Return whether a recipe's target matches a weight.

    Only a target that names experts or routers matches them: in PEFT too, `target_modules` reach only linear
    layers, whatever else they match.
    """
    if site.words and target == site.words[0]:
        return True
    if site.words and not any(word in target for word in site.words):
        return False
    name = site.name
    return matches(target, name) or (bool(site.inner) and matches(target, name.removesuffix(site.inner)))


@functools.lru_cache(maxsize=2**16)
def matches(target: str, module: str) -> bool:
    """Return whether a recipe's target matches a Hugging Face module ("layers.7.self_attn.q_proj").

    As in PEFT's list of target_modules, a target is the module's name or the end of it after a dot.
    """
    if f".{module}".endswith(f".{target}"):
        return True
    pattern = None if target.isidentifier() else compiled(target)  # whole names have dots
    return pattern is not None and any(pattern.fullmatch(spelling) for spelling in _spellings(module))


@functools.cache
def compiled(target: str) -> re.Pattern[str] | None:
    """Compile a target or a key of a pattern as a regular expression; None if it is not a valid one."""
    try:
        return re.compile(target)
    except NOT_A_PATTERN:
        return None


def by_pattern(patterns: Mapping[str, Value], module: str, default: Value) -> Value:
    """Return the value of the first pattern that matches a module, as PEFT's rank_pattern and alpha_pattern.

    A pattern is a regular expression that matches a module's whole name, or the end of it after a dot.

    Args:
        module: e.g. "layers.7.self_attn.q_proj".
        default: the value if no pattern matches.
    """
    for pattern, value in patterns.items():
        if any(means(pattern, spelling) for spelling in _spellings(module)):
            return value
    return default


def means(pattern: str, name: str) -> bool:
    """Return whether a key of PEFT's rank_pattern or alpha_pattern matches exactly this full module name.

    A key that is not a valid regular expression matches nothing.
    """
    try:
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except NOT_A_PATTERN:
        return False


def build_adapters(
    family: Family, architecture: Architecture, lora: LoraSettings, specs: Mapping[str, Spec] | None = None
) -> list[Adapter]:
    """Make all adapters of a recipe's `lora` section, in layer order.

    Args:
        specs: the final sharding of each weight by its path; None for the family's defaults.

    Raises:
        ValueError: when projections that share A are given different ranks or alphas.
    """
    parameters = {p.path: p for p in arrays(family, architecture)}
    out: list[Adapter] = []
    whole = PROJECTOR in lora.modules_to_save
    for target in sites(family, architecture):
        if not within(target, lora) or (whole and target.weight.startswith(PROJECTING)):
            continue
        if not any(meant(name, target) for name in lora.targets):
            continue
        weight = parameters[target.weight]
        spec = (specs or {}).get(target.weight, weight.spec)
        a_shape, b_shape = _pair(target, weight.shape, lora.rank_of(target.name))
        a_spec, b_spec = _pair(target, spec, None)
        kind = ExpertAdapter if target.experts else Adapter
        lender = _lender(target, lora, out) if lora.kv == "shared" else None
        dora, scale = lora.kind == "dora", lora.scale_of(target.name)
        out.append(kind(target, scale, a_shape, b_shape, a_spec, b_spec, dora, lender))
    return out


def _lender(target: LoraTarget, lora: LoraSettings, earlier: Sequence[Adapter]) -> Adapter | None:
    """Return the adapter of a layer's keys, whose A its values share; None for other projections.

    Args:
        earlier: the adapters so far: keys come before values.

    Raises:
        ValueError: when the two are given different ranks or alphas.
    """
    module, _, name = target.name.rpartition(".")
    if name != "v_proj":
        return None
    keys = next((adapter for adapter in reversed(earlier) if adapter.name == f"{module}.k_proj"), None)
    if keys is not None and (keys.rank, keys.scale) != (
        lora.rank_of(target.name),
        lora.scale_of(target.name),
    ):
        raise ValueError(
            f"{keys.name} and {target.name} share one A under lora.kv: shared, so they cannot have "
            "ranks or alphas of their own"
        )
    return keys


def arrays_of(adapters: Iterable[Adapter]) -> dict[str, tuple[tuple[int, ...], Spec]]:
    """Return shape and sharding of all arrays of some adapters, by path."""
    return {path: (shape, spec) for adapter in adapters for path, shape, spec in adapter.arrays}


def placed(adapter: Adapter, spec: Spec) -> Adapter:
    """Return the adapter with the shardings that follow from this one of its weight."""
    a_spec, b_spec = _pair(adapter.target, spec, None)
    if (a_spec, b_spec) == (adapter.a_spec, adapter.b_spec):
        return adapter
    return replace(adapter, a_spec=a_spec, b_spec=b_spec)


def _pair(target: LoraTarget, weight: tuple[Any, ...], rank: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what holds for the axes of A and of B, from what holds for those of the weight and the rank."""
    first = target.stacked
    rest = [weight[axis] for axis in range(first, len(weight)) if axis not in target.contract]
    summed = [weight[axis] for axis in target.contract]
    return (*weight[:first], *summed, rank), (*weight[:first], rank, *rest)


def principal(init: str) -> bool:
    """Return whether this kind of start computes the adapters from the base's weights (initial.py)."""
    return init.startswith("pissa") or init in ("olora", "loftq")


def lora_settings(section: Mapping[str, Any], num_layers: int) -> LoraSettings:
    """Read the `lora` section of a resolved recipe, as recipe.lock.json records it.

    Records of older versions lack the keys that were added later. Patterns are recorded as pairs, whose order
    JSON keeps.
    """
    tokens, layers = tuple(section.get("trainable_tokens") or ()), section["layers"]
    if not all(type(token) in (int, str) for token in tokens):
        raise TypeError(f"trainable_tokens is {list(tokens)}")
    return LoraSettings(
        rank=section["rank"],
        alpha=section["alpha"],
        targets=tuple(section["targets"]),
        dropout=section["dropout"],
        modules_to_save=tuple(section.get("modules_to_save") or ()),
        trainable_tokens=tokens,
        vision=section.get("vision", False),
        layers=None if layers == "all" else parse_layers(layers, num_layers),
        kind=section.get("kind", "lora"),
        init=section["init"],
        loraplus_lr_ratio=section.get("loraplus_lr_ratio"),
        dtype=section["dtype"],
        kv=section["kv"],
        rslora=section.get("rslora", False),
        rank_pattern=dict(section.get("rank_pattern") or {}),
        alpha_pattern=dict(section.get("alpha_pattern") or {}),
        start_from=section.get("start_from"),
    )


def parse_layers(layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the layer indices of "all", "20-59", "0-4,10" or a list.

    Raises:
        ValueError: for other text, or an index that is not in 0..num_layers-1.
    """
    if layers == "all":
        return tuple(range(num_layers))
    if isinstance(layers, str):
        chosen: list[int] = []
        for part in layers.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            if match is None:
                raise ValueError(f"{part.strip()!r} is neither a layer nor a range such as 20-59")
            first = int(match[1])
            last = int(match[2] or first)
            # A larger range would fill memory before it is refused.
            chosen += range(first, min(last, first + num_layers) + 1)
    else:
        chosen = list(layers)
    outside = [i for i in chosen if not 0 <= i < num_layers]
    if outside:
        raise ValueError(f"layer {outside[0]} is not one of the model's {num_layers} (0 to {num_layers - 1})")
    if not chosen:
        raise ValueError("no layer is chosen")
    return tuple(sorted(set(chosen)))


def _spellings(module: str) -> tuple[str, ...]:
    """Return a module's possible names: without a checkpoint's prefix, or with one of transformers'."""
    return tuple(prefix + module for prefix in ("", *PREFIXES))
