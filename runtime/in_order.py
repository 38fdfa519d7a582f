"""Work on a pool of threads whose results come in the order of the work, never more than so much ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from .interrupts import held

K = TypeVar("K")
T = TypeVar("T")


def in_order(
    pool: ThreadPoolExecutor, jobs: Iterable[tuple[K, Callable[[], T]]], ahead: int
) -> Iterator[tuple[K, T]]:
    """Runs labeled jobs, and gives each label with its job's result.

    Args:
        ahead: jobs that are done, or being done, before the result of the first is taken.
    """
    running: deque[tuple[K, Future[T]]] = deque()
    try:
        for label, job in jobs:
            with held():
                running.append((label, pool.submit(job)))
            if len(running) >= ahead:
                yield _next(running)
        while running:
            yield _next(running)
    finally:
        with held():
            for _, future in running:
                future.cancel()


def _next(running: deque[tuple[K, Future[T]]]) -> tuple[K, T]:
    """Waits for the first job's result, and takes it out."""
    label, future = running.popleft()
    with held():
        return label, future.result()
