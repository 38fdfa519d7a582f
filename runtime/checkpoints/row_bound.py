"""Check a continued run's rows, where the loss depends on how many of them a micro-batch has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from ..model.partition_rules import data_parallel
from ..training.objectives import OBJECTIVES, Objective

MICRO_BATCHES = "micro_batches"


def check_rows(directory: str, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the rows of micro-batches of two recipes.

    Raises:
        UserError: when they differ, and the loss depends on them.
    """
    train = now.get("train", {})
    objective, cause = OBJECTIVES.get(train.get("objective", "sft")), None
    if train.get("loss_normalization") == MICRO_BATCHES:
        cause = f"train.loss_normalization: {MICRO_BATCHES}"
    elif objective is not None and objective.likelihood and _weight(objective, train):
        cause = f"train.objective: {train['objective']}"
    elif train.get("router_aux_loss_coef"):
        cause = f"train.router_aux_loss_coef: {train['router_aux_loss_coef']:g}"
    before, after = _rows(began), _rows(now)
    if objective is not None and train.get("loss_type") in objective.mismatched:
        cause = f"train.objective: {train['objective']}"
        if (size := began.get("train", {}).get("micro_batch_size")) != train.get("micro_batch_size"):
            raise UserError(
                f"{directory}: with {cause} each prompt is also paired with another row's answer; the "
                f"run began with micro-batches of {size} rows a device, and this artifact has "
                f"{train.get('micro_batch_size')}",
                f"set train.micro_batch_size: {size}",
            )
    if cause is not None and before != after:
        raise UserError(
            f"{directory}: with {cause} the loss depends on the rows of a micro-batch; the run began with "
            f"{before}, and this artifact has {after}",
            f"choose train.micro_batch_size so that micro_batch_size x dcn x fsdp x ep is {before} again",
        )


def _weight(objective: Objective, train: Mapping[str, Any]) -> float:
    """Return the weight of the likelihood in an objective's loss."""
    return float(train.get("cpo_alpha", 1.0)) if "cpo_alpha" in objective.settings else 1.0


def _rows(recipe: Mapping[str, Any]) -> int:
    """Return the rows of a micro-batch on all devices together."""
    size: int = recipe.get("train", {}).get("micro_batch_size", 1)
    return size * data_parallel(recipe.get("mesh", {}).get("axes", {}))
