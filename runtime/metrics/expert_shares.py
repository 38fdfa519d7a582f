"""Measure how tokens spread over experts: metrics of each step, and warnings if few experts get nearly all
tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .run_report import EXPERT_TOKENS

NEARLY_ALL = 0.9
"""A warning follows if few experts get more than this share of a layer's tokens."""
MANY = 4
"""A layer has many experts if their number is at least this many times that of experts per token."""
ENOUGH = 100
"""Average tokens per expert below which a layer's shares are not meaningful."""


class ExpertShares:
    """The shares of tokens of a run's experts; a token that goes through K experts counts K times.

    Args:
        layers: the numbers of the layers with experts.
        per_token: number of experts that a token goes through.
        help: what to do if few experts get nearly all tokens.
    """

    def __init__(self, layers: Sequence[int], per_token: int, help: str) -> None:
        self._layers, self._per_token, self._help = layers, per_token, help
        self._interval: np.ndarray | int = 0
        self._since = 0
        self._warned = False

    def of_step(self, step: int, metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the smallest and the largest share of a layer's tokens that an expert gets, over all layers.

        Args:
            step: the optimizer step.
            metrics: metrics of its micro-batches, each with EXPERT_TOKENS.

        Returns:
            expert_share_min and expert_share_max; nothing for a step without tokens.
        """
        tokens = np.sum([np.asarray(one[EXPERT_TOKENS], np.int64) for one in metrics], axis=0)
        self._since = self._since or step
        self._interval = self._interval + tokens
        if not tokens.any():
            return {}
        shares = tokens / tokens.sum(1, keepdims=True)
        return {"expert_share_min": float(shares.min()), "expert_share_max": float(shares.max())}

    def warnings(self, step: int) -> list[str]:
        """Return warnings about the steps since the last call, once per run: a layer with many experts sends
        nearly all tokens to as few experts as one token goes through.

        Args:
            step: the last of these steps.
        """
        tokens, since = np.asarray(self._interval), self._since
        self._interval, self._since = 0, 0
        if self._warned or tokens.ndim < 2:
            return []
        few, experts, totals = self._per_token, tokens.shape[1], tokens.sum(1)
        if experts < MANY * few or totals[0] < ENOUGH * experts:
            return []
        shares = np.sort(tokens, axis=1)[:, -few:].sum(1) / totals
        worst = int(shares.argmax())
        if shares[worst] <= NEARLY_ALL:
            return []
        self._warned = True
        over = f"step {step}" if since == step else f"steps {since} to {step}"
        layers = f"in {(shares > NEARLY_ALL).sum()} of {len(shares)} layers with experts"
        return [
            f"warning: few experts get nearly all tokens of {over}, {layers}: {few} of the {experts} of "
            f"layer {self._layers[worst]} get {100 * shares[worst]:.1f} %",
            f"  = help: {self._help}",
        ]


def advice(coefficient: float, balanced: bool) -> str:
    """Return what to do if few experts get nearly all tokens.

    Args:
        coefficient: coefficient of the load-balancing loss, 0 for none.
        balanced: whether the model's routers support that loss.
    """
    if coefficient:
        return f"raise train.router_aux_loss_coef, which is {coefficient:g}, or lower the learning rate"
    if balanced:
        return "set train.router_aux_loss_coef, for example to 0.001, or lower the learning rate"
    return "lower the learning rate; check whether the data has only a few kinds of text"
