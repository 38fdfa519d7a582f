"""Generate completions of prompts, and score them: for the batches that a policy trains on, and for held-out
prompts at evaluations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..data.samples import Samples
from ..hosts.single import SINGLE, SingleProcess
from ..model.decode import Completions, right_padded
from ..model.sampling import GREEDY, Sampling, salts_of
from ..reinforcement.advantages import combined_rewards, overlong_penalty
from ..reinforcement.asked import Prompts, reward_names
from ..sections import Grpo
from ..settings import Reward

if TYPE_CHECKING:
    from ..hosts.group import ProcessGroup
    from ..metrics.loggers import Metrics, Nowhere

SHOWN = 16
"""The most completions of a batch that completions.jsonl gets, and of an evaluation that generations.jsonl
gets."""
HELD_OUT = 2**30
"""The number of the first held-out prompt. Its noise differs from that of the run's prompts."""


class Generates(Protocol):
    """What generates a run's completions: `rollouts.Generator`, or `server_rollouts.ServerGenerator`."""

    def generate(self, prompts: Mapping[str, np.ndarray], sampling: Sampling | None = None) -> Completions:
        """Return the completions of prompts, as numpy arrays that are whole on every host.

        Args:
            sampling: how tokens are chosen; None takes that of training.
        """

    def identity(self) -> str | None:
        """Return a digest of the weights that generate, if it would not draw the same completions again with
        them; None if it would."""


@dataclass(frozen=True)
class Scored:
    """Groups of completions with their scores, P prompts of G completions; arrays by row have P * G rows.

    Attributes:
        numbers: int64[P], the number of each prompt in the run.
        completions: of all rows.
        scores: float64[functions, P, G], NaN where a function did not score a completion.
        rewards: float64[P, G], with the penalty of long completions.
        texts: the text of each completion.
    """

    numbers: np.ndarray
    completions: Completions
    scores: np.ndarray
    rewards: np.ndarray
    texts: list[str]

    def replaced(self, groups: np.ndarray, other: Scored) -> Scored:
        """Return these groups with other ones at the places `groups`."""
        rows = (groups[:, None] * self.rewards.shape[1] + np.arange(self.rewards.shape[1])).ravel()
        texts = list(self.texts)
        for row, text in zip(rows, other.texts, strict=True):
            texts[row] = text

        def put(array: np.ndarray, new: np.ndarray, places: np.ndarray, axis: int = 0) -> np.ndarray:
            out = np.array(array)
            out[(slice(None),) * axis + (places,)] = new
            return out

        return Scored(
            put(self.numbers, other.numbers, groups),
            Completions(*(put(a, b, rows) for a, b in zip(self.completions, other.completions, strict=True))),
            put(self.scores, other.scores, groups, 1),
            put(self.rewards, other.rewards, groups),
            texts,
        )

    def shown(self, row: int, names: Sequence[str]) -> dict[str, Any]:
        """Return how a completion ended, and its scores, in the form that the run's files store.

        Args:
            names: of the reward functions.
        """
        place = divmod(row, self.rewards.shape[1])
        scores = {name: plain(values[place]) for name, values in zip(names, self.scores, strict=True)}
        return {
            "tokens": int(self.completions.lengths[row]),
            "ended": bool(self.completions.ended[row]),
            "reward": plain(self.rewards[place]),
            "rewards": scores,
        }


class Scorer:
    """Generate and score completions of prompts.

    Args:
        grpo: of the recipe.
        generator: its lengths are those of `grpo`.
        rewards: the functions of the rewards.
        score: scores completions (`Rewards.score`); only the first host calls it.
        decode: turns tokens into text.
        seed: of the run.
        hosts: the processes of the run.

    Attributes:
        names: a unique name of each function.
    """

    def __init__(
        self,
        grpo: Grpo,
        generator: Generates,
        rewards: Sequence[Reward],
        score: Callable[..., list[Any]],
        decode: Callable[[Sequence[int]], str],
        seed: int,
        hosts: SingleProcess | ProcessGroup = SINGLE,
    ) -> None:
        self._grpo, self._generator, self._rewards, self._score = grpo, generator, rewards, score
        self._decode, self._seed, self._hosts = decode, seed, hosts
        self.names = reward_names(rewards)

    def scored(
        self,
        prompts: Prompts,
        numbers: np.ndarray,
        indices: Sequence[int],
        name: str,
        spent: dict[str, float],
        group: int | None = None,
        sampling: Sampling | None = None,
    ) -> Scored:
        """Generate and score the completions of prompts.

        Args:
            numbers: int64[P], of the prompts in the run: with the seed, they decide the noise.
            indices: the same prompts among `prompts`.
            name: of the reward's call in the run.
            spent: gets the seconds and the generated tokens.
            group: completions of each prompt; None takes the recipe's num_generations.
            sampling: how tokens are chosen; None takes that of training.
        """
        grpo, samples = self._grpo, prompts.samples
        group = grpo.num_generations if group is None else group
        lengths = np.repeat(samples.lengths[list(indices)], group)
        tokens = np.zeros((len(indices), grpo.max_prompt_length), np.int32)
        for row, index in zip(tokens, indices, strict=True):
            ids = samples[index].tokens
            row[: len(ids)] = ids
        salts = salts_of(self._seed, np.repeat(numbers, group), np.tile(np.arange(group), len(numbers)))
        batch = right_padded(np.repeat(tokens, group, 0), lengths, np.asarray(salts))
        began = time.perf_counter()
        more = () if sampling is None else (sampling,)
        completions = self._generator.generate(batch, *more)
        spent["rollout_seconds"] += time.perf_counter() - began
        spent["generated"] += float(completions.lengths.sum())
        ids_of = [row[:length].tolist() for row, length in zip(*completions[:2], strict=True)]
        texts = [self._decode(ids) for ids in ids_of]
        began = time.perf_counter()
        asked = prompts.asked(indices, group, texts)
        values = self._hosts.agree(
            f"rewards {name}", lambda: self._score(asked[0], asked[1], ids_of, asked[2])
        )
        spent["reward_seconds"] += time.perf_counter() - began
        scores = np.array(values, np.float64).reshape(len(self._rewards), len(indices), group)
        rewards = combined_rewards(scores, [reward.weight for reward in self._rewards])
        if grpo.overlong_penalty is not None:
            by_row = completions.lengths.reshape(rewards.shape)
            rewards = rewards + overlong_penalty(by_row, grpo.max_completion_length, grpo.overlong_penalty)
        return Scored(numbers, completions, scores, rewards, texts)


class HeldOut:
    """Held-out prompts whose completions are scored at each evaluation. Their noise does not depend on the
    step, so that evaluations compare weights alone.

    Args:
        samples: the prompts.
        parts: the prompts of each source, if there are several.
        group: completions of each prompt, drawn as in training; None for one, greedily.
        metrics: get the completions of the first prompts.
    """

    def __init__(
        self,
        samples: Samples,
        parts: Mapping[str, Sequence[int]],
        group: int | None,
        scorer: Scorer,
        metrics: Metrics | Nowhere,
    ) -> None:
        self._prompts, self._parts, self._group = Prompts(samples), parts, group
        self._scorer, self._metrics = scorer, metrics

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the rewards of the current weights, and write the first completions to generations.jsonl.

        Raises:
            UserError: a reward fails.
        """
        count, group = len(self._prompts.samples), self._group or 1
        spent = {"rollout_seconds": 0.0, "reward_seconds": 0.0, "generated": 0.0}
        scored = self._scorer.scored(
            self._prompts,
            HELD_OUT + np.arange(count),
            range(count),
            f"evaluation {step}",
            spent,
            group,
            GREEDY if self._group is None else None,
        )
        prompts, names = self._prompts.samples, self._scorer.names
        shown = [
            {
                "prompt": prompts.prompt(row // group)[0],
                "answer": scored.texts[row],
                **scored.shown(row, names),
            }
            for row in range(min(SHOWN, len(scored.texts)))
        ]
        self._metrics.samples(step, shown)
        done = scored.completions
        numbers = {
            "reward": mean(scored.rewards),
            "reward_std": float(spreads(scored.rewards.reshape(1, -1))[0]),
            **by_function(names, scored.scores),
            "completion_length": float(done.lengths.mean()),
            "truncated_share": float((~done.ended).mean()),
        }
        if len(self._parts) > 1:
            of_parts = {name: mean(scored.rewards[list(rows)]) for name, rows in self._parts.items()}
            numbers |= {f"{name}/reward": value for name, value in of_parts.items()}
        return {name: value for name, value in numbers.items() if name == "reward" or np.isfinite(value)}


def by_function(names: Sequence[str], scores: np.ndarray) -> dict[str, float]:
    """Return the mean of each function's scores, and their spread.

    Args:
        scores: float64[functions, P, G].
    """
    numbers = {}
    for name, values in zip(names, scores, strict=True):
        numbers[f"reward/{name}"] = mean(values)
        numbers[f"reward_std/{name}"] = float(spreads(values.reshape(1, -1))[0])
    return numbers


def mean(values: np.ndarray) -> float:
    """Return the mean of the numbers that are not NaN; NaN if there are none."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def spreads(values: np.ndarray) -> np.ndarray:
    """Return each row's standard deviation, of n - 1 degrees of freedom; NaN for fewer than two numbers."""
    count = np.isfinite(values).sum(1)
    means = np.nansum(values, 1) / np.maximum(count, 1)
    squares = np.nansum((values - means[:, None]) ** 2, 1)
    return np.sqrt(np.where(count > 1, squares / np.maximum(count - 1, 1), np.nan))


def plain(value: float) -> float | None:
    """Return a number as JSON has it: None for NaN."""
    return None if np.isnan(value) else float(value)
