"""The models that adapters are of, as far as PEFT's names depend on them."""

from __future__ import annotations

from typing import Protocol

from ..model.families import Architecture, Family

REMAPPED = (
    *("qwen3_moe", "qwen3_next", "glm4_moe", "olmoe", "mixtral"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"),
    *("afmoe", "ernie4_5_moe", "minimax_m2"),
)
"""Families for which peft 0.21 mistakes a linear layer among `target_modules` for experts or the router, if
its name is one that these had before transformers 5."""


class Known(Protocol):
    """A model whose trainable weights are known: a checkpoint, or the compiler's model of a recipe."""

    @property
    def family(self) -> Family: ...
    @property
    def architecture(self) -> Architecture: ...


def has_parameters(base: Known) -> bool:
    """Return whether PEFT has to adapt any weight as a parameter, not as a linear layer (parameters.py)."""
    return base.architecture.routing[0] > 0 or base.family.name in REMAPPED
