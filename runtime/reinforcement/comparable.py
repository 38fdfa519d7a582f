"""Check the columns of all prompts, before a run generates anything: their names, and the answers that ready
rewards compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.samples import Samples
from ..errors import UserError
from ..settings import REWARD_ARGUMENTS, Reward
from .ready_rewards import READY_REWARDS


def check_answers(rewards: Sequence[Reward], samples: Samples) -> None:
    """Check the columns of prompts. A function of the recipe gets their values as they are.

    Args:
        samples: prompts with their columns.

    Raises:
        UserError: a column has the name of an argument; a prompt has no answer, or one that a reward cannot
            compare with.
    """
    comparing = [reward for reward in rewards if reward.file is None and reward.column is not None]
    faults: dict[str, list[tuple[int, str]]] = {}
    scores = [READY_REWARDS[reward.function].make(**reward.options) for reward in comparing]
    for index in range(len(samples)):
        columns = samples.prompt(index)[1]
        if taken := sorted({*REWARD_ARGUMENTS} & columns.keys()):
            raise UserError(
                f"{samples.origin(index)}: the column {taken[0]} has the name of an argument of every reward "
                "function",
                f"rename it with data.fields: {{own_{taken[0]}: {taken[0]}}}",
            )
        for reward, score in zip(comparing, scores, strict=True):
            if (fault := _fault(score, columns.get(str(reward.column)))) is not None:
                faults.setdefault(f"{reward.name} ({reward.column})", []).append((index, fault))
    for name, places in faults.items():
        index, fault = places[0]
        raise UserError(
            f"reward {name}: {len(places):,} of {len(samples):,} prompts have no answer to compare with; the "
            f"first, {samples.origin(index)}: {fault}",
            "leave these rows out with a data.transform that returns None for them",
        )


def _fault(score: Any, answer: Any) -> str | None:
    if answer is None:
        return "the column is missing or null"
    try:
        score("", answer)
    except UserError as error:
        return error.message
    return None
