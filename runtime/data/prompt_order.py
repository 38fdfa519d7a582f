"""The order of the prompts of a run that learns from its own completions.

The prompts of a run are numbered from 0: an epoch visits each prompt once, in its own order, and the next
epoch follows without a gap. A batch takes the next prompts. It may take more than it keeps (dynamic
sampling), so that the number that is taken until a step is part of the run's state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..sections import Grpo
from .batches import Batching, BatchSchedule
from .epochs import Epochs
from .samples import Samples

TAKEN = "prompts"
"""The key of a state: the number of prompts that the batches until a step have taken."""


class PromptSchedule(BatchSchedule):
    """The prompts of a run, by number.

    Args:
        samples, epochs, batching, seed, by_length: as for BatchSchedule; `batching` is of completions.
        after: the state that the run continues from; None for its beginning.

    Attributes:
        prompts: number of prompts in a batch.
        iterations: optimizer steps on a batch.
        steps_per_epoch: optimizer steps of one pass over the prompts, rounded up.
    """

    def __init__(
        self,
        samples: Samples,
        epochs: Epochs,
        batching: Batching,
        seed: int | None,
        by_length: bool,
        grpo: Grpo,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        alone = Batching(replace(batching.shape, rows=1), 1, batching.by_tokens)
        super().__init__(samples, epochs, alone, seed, by_length)
        self.samples = samples
        self._of_epoch = self.steps_per_epoch
        self._batch_rows = batching.shape.rows
        self._completions = batching.shape.rows * batching.accumulation
        self.prompts, self.iterations = self._completions // grpo.num_generations, grpo.iterations
        self.steps_per_epoch = math.ceil(self._of_epoch / self.prompts) * self.iterations
        after = after or {}
        self._taken: dict[int, int] = {0: 0}
        if TAKEN in after:
            self._taken[self.batch_after(after["rows"] // self._completions)] = int(after[TAKEN])

    @property
    def rows(self) -> int:
        """Return the number of completions of a micro-batch."""
        return self._batch_rows

    @property
    def rows_per_step(self) -> int:
        """Return the number of completions of an optimizer step."""
        return self._completions

    def batch_after(self, step: int) -> int:
        """Return the number of batches that have begun until an optimizer step is done."""
        return math.ceil(step / self.iterations)

    def prompt(self, number: int) -> int:
        """Return the sample that is prompt number `number` of the run."""
        epoch, place = divmod(number, self._of_epoch)
        return self._epochs.of(epoch)[self._order(epoch)[place][0]][0]

    def taken(self, batch: int) -> int:
        """Return how many prompts the batches before this one have taken."""
        return self._taken.get(batch, batch * self.prompts)

    def take(self, batch: int, until: int) -> None:
        """Record that a batch has taken the prompts before number `until`."""
        self._taken[batch + 1] = until

    def drawn(self, steps: int) -> Any:
        """Return the samples of the first steps, of at most one epoch."""
        return super().drawn(min(self._of_epoch, self.batch_after(steps) * self.prompts))

    def state(self, step: int) -> dict[str, Any]:
        """Return how many prompts are taken when a step is done."""
        return {TAKEN: self.taken(self.batch_after(step))}

    def origins_of(self, numbers: Sequence[int]) -> list[str]:
        """Return the places of prompts in their sources, by their numbers in the run."""
        return [self.samples.origin(self.prompt(number)) for number in numbers]
