"""Report the numbers of a run: read them back from the devices, write, print and average them, and warn if
few experts get nearly all tokens.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..errors import UserError, say
from ..progress import duration

if TYPE_CHECKING:
    from .loggers import Metrics, Nowhere

EXPERT_TOKENS = "expert_tokens"
"""The name of int32[L, E] among a micro-batch's metrics: the number of its tokens that go through each expert
of each layer with experts."""

SHOWN = 8
"""The most source rows of a batch that a message names."""


class NotFinite(Exception):
    """A step with numbers that are not finite.

    Attributes:
        step: the first such step.
        what: "loss" or "gradient's norm".
        value: NaN or an infinity.
        part: the micro-batch within the step, None if any of them may be the cause.
    """

    def __init__(self, step: int, what: str, value: float, part: int | None) -> None:
        super().__init__(step)
        self.step, self.what, self.value, self.part = step, what, value, part

    def described(
        self, accumulation: int, origins: Callable[[int], Sequence[str]] | None, kept: str
    ) -> UserError:
        """Describe a step that was not saved: its rows, and the checkpoint that is kept.

        Args:
            accumulation: micro-batches of a step.
            origins: returns the places of a micro-batch's rows; None if they are not known.
        """
        parts = range(accumulation) if self.part is None else [self.part]
        batches = [(self.step - 1) * accumulation + part for part in parts]
        what, hold = f"micro-batch {batches[0]}", "holds"
        if len(batches) > 1:
            what, hold = f"micro-batches {batches[0]} to {batches[-1]}", "hold"
        rows = [row for batch in batches for row in origins(batch)] if origins else []
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        return UserError(
            f"step {self.step}: the {self.what} is {self.value}"
            + (f"; {what} {hold} {', '.join(rows[:SHOWN])}{more}" if rows else f", in {what}")
            + f"; {kept}",
            "look at these rows, then lower train.optimizer.learning_rate or set max_grad_norm",
        )


Named = Mapping[str, jax.Array]
"""Numbers by name, each float32[] except EXPERT_TOKENS."""


@dataclass
class Numbers:
    """The numbers of an optimizer step: arrays on the devices that may still be in computation.

    Attributes:
        losses: float32[], the loss of each micro-batch.
        norm: float32[], the norm of the accumulated gradient.
        tokens: number of real tokens.
        metrics: further metrics of each micro-batch.
        more: further metrics of the step, which the host has.
    """

    step: int
    losses: list[jax.Array]
    norm: jax.Array
    tokens: int
    metrics: list[Named]
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Return whether they can be read without waiting."""
        return all(array.is_ready() for array in (*self.losses, self.norm))

    def check(self) -> None:
        """Raise NotFinite if a number is not finite."""
        for part, loss in enumerate(self.losses):
            if not math.isfinite(loss):
                raise NotFinite(self.step, "loss", float(loss), part)
        if not math.isfinite(self.norm):
            raise NotFinite(self.step, "gradient's norm", float(self.norm), None)


def _means(metrics: list[Named]) -> dict[str, float]:
    names = [name for name in metrics[0] if name != EXPERT_TOKENS] if metrics else ()
    return {name: float(np.mean([float(named[name]) for named in metrics])) for name in names}


class Report:
    """Read numbers back from the devices several steps at a time; write, print and average them.

    Args:
        start, until: first and last optimizer step of the run.
        every: steps between printed lines.
        schedule: learning rate by optimizer step, from 0.
        shares: the expert shares of a model with experts.

    Attributes:
        loss: the loss of the last step that was read.
        metrics: where the numbers are written.
    """

    def __init__(
        self,
        start: int,
        until: int,
        every: int,
        schedule: Callable[[int], Any],
        metrics: Metrics | Nowhere,
        shares: ExpertShares | None = None,
    ) -> None:
        self.loss: float | None = None
        self._start, self._until, self._every = start, until, every
        self._schedule, self.metrics, self._shares = schedule, metrics, shares
        self._pending: list[Numbers] = []
        self._checked = 0
        self._seconds = self._tokens = self._first_seconds = self._first_tokens = 0.0
        self._begun = self._since = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=until, initial=start, desc="training", unit="step", dynamic_ncols=True)

    @property
    def speed(self) -> float | None:
        """Return real tokens per second, without the first step (which compiles) if there are more."""
        if self._seconds > self._first_seconds:
            return (self._tokens - self._first_tokens) / (self._seconds - self._first_seconds)
        return self._tokens / self._seconds if self._seconds else None

    def add(self, numbers: Numbers) -> None:
        """Add the numbers of a step, which may still be in computation.

        Raises:
            NotFinite: for the first finished step with non-finite numbers.
        """
        self._pending.append(numbers)
        if self._bar is not None:
            self._bar.update()
        while self._checked < len(self._pending) and self._pending[self._checked].ready:
            try:
                self._pending[self._checked].check()
            except NotFinite:
                self.read()
            self._checked += 1

    def due(self, step: int) -> bool:
        """Return whether to read now: after the first step, and then at the set interval."""
        return step == self._start + 1 or step % self._every == 0

    def restart(self) -> None:
        """Exclude the time since the last reading from the time of the steps."""
        self._since = time.perf_counter()

    def read(self) -> None:
        """Wait for the steps taken, and write their numbers.

        Raises:
            NotFinite: for the first step with non-finite numbers; the step is written as well.
        """
        pending, self._pending, self._checked = self._pending, [], 0
        numbers = [
            (
                numbers_of_step,
                float(np.mean([float(loss) for loss in numbers_of_step.losses])),
                float(numbers_of_step.norm),
            )
            for numbers_of_step in pending
        ]
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        tokens_read = sum(numbers_of_step.tokens for numbers_of_step in pending)
        self._seconds += seconds
        self._tokens += tokens_read
        if pending and pending[0].step == self._start + 1:
            self._first_seconds, self._first_tokens = seconds, tokens_read
        for numbers_of_step, loss, norm in numbers:
            step = numbers_of_step.step
            rate = float(self._schedule(step - 1))
            shares = {} if self._shares is None else self._shares.of_step(step, numbers_of_step.metrics)
            self.metrics.log(
                "train",
                step,
                {
                    "loss": loss,
                    "learning_rate": rate,
                    "grad_norm": norm,
                    **numbers_of_step.more,
                    **_means(numbers_of_step.metrics),
                    **shares,
                    "tokens": numbers_of_step.tokens,
                    "tokens_per_second": tokens_read / seconds,
                    "step_seconds": seconds / len(numbers),
                    "peak_memory_bytes": peak_memory(),
                },
            )
            self.loss = loss
            numbers_of_step.check()
            if step == self._start + 1 or step % self._every == 0 or step == self._until:
                reward = numbers_of_step.more.get("reward")
                self._print(step, loss, rate, tokens_read / seconds, reward)
            if self._shares is not None and (step % self._every == 0 or step == self._until):
                for line in self._shares.warnings(step):
                    self.say(line)

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            say(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _print(self, step: int, loss: float, rate: float, speed: float, reward: float | None) -> None:
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{rate:.2e}", tokens_s=f"{speed:.0f}")
            return
        later = step - self._start - 1
        passed = time.perf_counter() - self._begun - self._first_seconds
        left = ""
        if later and step < self._until:
            left = f", {duration(passed / later * (self._until - step))} left"
        scored = "" if reward is None else f"reward {reward:.3f}, "
        self.say(
            f"step {step}/{self._until}: {scored}loss {loss:.4f}, lr {rate:.2e}, {speed:.0f} tokens/s{left}"
        )


def peak_memory() -> int:
    """Return peak bytes of the fullest device, or of the process if devices do not count them (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    # Linux gives the resident set in KiB.
    return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        tokens = np.sum([np.asarray(batch[EXPERT_TOKENS], np.int64) for batch in metrics], axis=0)
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
