"""Batch sizes: the recipe's are of the whole optimizer step, over all devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """The rows of an optimizer step.

    Attributes:
        per_device: rows that one data-parallel device handles at once.
        accumulation: micro-batches of an optimizer step.
        data_parallel: devices (or groups of devices that share the model) with rows of their own.
    """

    per_device: int
    accumulation: int
    data_parallel: int

    @property
    def rows(self) -> int:
        """Rows of an optimizer step: the recipe's `train.global_batch_size`."""
        return self.per_device * self.accumulation * self.data_parallel

    def __str__(self) -> str:
        """How the product comes about, for a note: "2 rows x 8 micro-batches x 4 devices"."""
        return (
            f"{_count(self.per_device, 'row')} x "
            f"{_count(self.accumulation, 'micro-batch', 'micro-batches')} x "
            f"{_count(self.data_parallel, 'data-parallel device')}"
        )


def global_batch(per_device: int, accumulation: int, processes: int, shared: int = 1) -> Batch:
    """The rows of an optimizer step.

    Args:
        per_device: rows of a process at once.
        accumulation: micro-batches.
        processes: GPUs in all.
        shared: GPUs that work on the same rows: the tensor-parallel axis times the context-parallel one.

    Raises:
        ValueError: when `shared` does not divide the processes.
    """
    if shared < 1 or processes % shared:
        raise ValueError(f"{processes} processes cannot be split into groups of {shared}")
    return Batch(per_device, accumulation, processes // shared)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
