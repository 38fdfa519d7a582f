"""Which LoRA adapters a recipe asks for, in Tunix's arrays and in Hugging Face's.

Tunix fuses projections: K and V of a layer are one weight. Qwix would give such a weight one shared
A. To train what PEFT trains, an independent A and B for each projection, a fused weight gets one
adapter of rank blocks x rank with alpha blocks x alpha, the A's side by side, of which only the
matching block of B is trained: B[j * rank : (j + 1) * rank, slot]. The other entries stay zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.families.base import Architecture, Family, Site, Spec

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class LoraSettings:
    """The `lora` section of a recipe.

    Attributes:
        rank: inner dimension of each adapter.
        alpha: the delta is scaled by alpha / rank.
        dropout: probability that an adapter's input is zeroed while training.
        targets: projection names ("q_proj"), or regular expressions that match a whole module name
            ("layers.7.self_attn.q_proj").
        layers: indices of the adapted layers, None for all.
        init: "peft" (uniform, bound 1/sqrt(fan_in)) or "qwix" (he_uniform, bound sqrt(6/fan_in)).
        dtype: of the adapters.
        kv: "independent" adapters for fused projections, as PEFT, or "shared" A, as Qwix.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    layers: tuple[int, ...] | None = None
    init: str = "peft"
    dtype: str = "float32"
    kv: str = "independent"


@dataclass(frozen=True)
class Adapter:
    """The LoRA pair of one weight.

    Attributes:
        site: the weight.
        trained: indices into `site.slots` of the projections that are trained.
        rank, alpha: of one projection, as in the recipe.
        blocks: rank blocks in the arrays: the number of trained projections when they are
            independent, 1 when they share A.
        a_shape, b_shape: [*contracted, blocks * rank] and [blocks * rank, *rest of the weight].
        a_spec, b_spec: their shardings, following the weight's.
    """

    site: Site
    trained: tuple[int, ...]
    rank: int
    alpha: float
    blocks: int
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    a_spec: Spec
    b_spec: Spec

    @property
    def a_path(self) -> str:
        return f"{self.site.weight}_lora_a"

    @property
    def b_path(self) -> str:
        return f"{self.site.weight}_lora_b"

    @property
    def module(self) -> str:
        """Path of the Tunix module: what a Qwix rule matches, with dots for slashes."""
        return self.site.weight.rpartition(".")[0]

    @property
    def total_rank(self) -> int:
        return self.blocks * self.rank

    @property
    def total_alpha(self) -> float:
        return self.blocks * self.alpha

    @property
    def scale(self) -> float:
        """What A and B's product is multiplied by, in Tunix and in Hugging Face alike."""
        return self.alpha / self.rank

    @property
    def projections(self) -> tuple[str, ...]:
        """Hugging Face modules that this adapter trains, e.g. "layers.0.self_attn.k_proj"."""
        return tuple(f"layers.{self.site.layer}.{self.site.slots[i]}" for i in self.trained)

    def trained_blocks(self) -> list[tuple[int, slice]]:
        """For each trained projection its slot, and the slice of the rank axis that is its own."""
        first = [block * self.rank if self.blocks > 1 else 0 for block in range(len(self.trained))]
        return [
            (slot, slice(start, start + self.rank)) for slot, start in zip(self.trained, first, strict=True)
        ]

    @property
    def masked(self) -> bool:
        """Whether part of B must be held at zero."""
        return self.site.fused and (self.blocks > 1 or len(self.trained) < len(self.site.slots))

    def split(self, a: np.ndarray, b: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A [rank, in] and B [out, rank] of each trained projection, as PEFT names and lays them out.

        Args:
            a: array of `a_shape`.
            b: array of `b_shape`.
        """
        flat = a.reshape(-1, self.total_rank)
        out = {}
        for (slot, block), name in zip(self.trained_blocks(), self.projections, strict=True):
            rows = b[block, slot] if self.site.fused else b[block]
            out[name] = flat[:, block].T, rows.reshape(self.rank, -1).T
        return out


def matches(target: str, module: str) -> bool:
    """Whether a recipe's target means a Hugging Face module ("layers.7.self_attn.q_proj").

    As in PEFT's list of target_modules, a target is the module's name or the end of it after a dot.
    """
    if f".{module}".endswith(f".{target}"):
        return True
    try:
        pattern = re.compile(target)
    except re.error:
        return False
    spellings = (module, f"model.{module}", f"model.language_model.{module}")
    return any(pattern.fullmatch(spelling) for spelling in spellings)


def build_adapters(
    family: Family, architecture: Architecture, lora: LoraSettings, specs: Mapping[str, Spec] | None = None
) -> list[Adapter]:
    """Every adapter that a recipe's `lora` section gives rise to, in layer order.

    Args:
        specs: the final sharding of each weight by its path; the family's defaults when None.
    """
    parameters = {p.path: p for p in family.parameters(architecture)}
    out = []
    for site in family.sites(architecture):
        if lora.layers is not None and site.layer not in lora.layers:
            continue
        trained = tuple(
            i
            for i, slot in enumerate(site.slots)
            if _any_matches(lora.targets, f"layers.{site.layer}.{slot}")
        )
        if not trained:
            continue
        weight = parameters[site.weight]
        spec = (specs or {}).get(site.weight, weight.spec)
        blocks = len(trained) if lora.kv == "independent" else 1
        rest = [axis for axis in range(len(weight.shape)) if axis not in site.contract]
        out.append(
            Adapter(
                site=site,
                trained=trained,
                rank=lora.rank,
                alpha=lora.alpha,
                blocks=blocks,
                a_shape=(*(weight.shape[i] for i in site.contract), blocks * lora.rank),
                b_shape=(blocks * lora.rank, *(weight.shape[i] for i in rest)),
                a_spec=(*(spec[i] for i in site.contract), None),
                b_spec=(None, *(spec[i] for i in rest)),
            )
        )
    return out


def lora_settings(section: Mapping[str, Any], num_layers: int) -> LoraSettings:
    """Reads the `lora` section of a resolved recipe, as recipe.lock.json records it."""
    layers = section["layers"]
    return LoraSettings(
        rank=section["rank"],
        alpha=section["alpha"],
        targets=tuple(section["targets"]),
        dropout=section["dropout"],
        layers=None if layers == "all" else parse_layers(layers, num_layers),
        init=section["init"],
        dtype=section["dtype"],
        kv=section["kv"],
    )


def parse_layers(layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Layer indices of "all", "20-59", "0-4,10" or a list.

    Raises:
        ValueError: on another spelling, or an index that is not in 0..num_layers-1.
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
            chosen += range(first, int(match[2] or first) + 1)
    else:
        chosen = list(layers)
    outside = [i for i in chosen if not 0 <= i < num_layers]
    if outside:
        raise ValueError(f"layer {outside[0]} is not one of the model's {num_layers} (0 to {num_layers - 1})")
    if not chosen:
        raise ValueError("no layer is chosen")
    return tuple(sorted(set(chosen)))


def _any_matches(targets: Iterable[str], module: str) -> bool:
    return any(matches(target, module) for target in targets)
