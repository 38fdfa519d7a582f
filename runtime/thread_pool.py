"""Run work on a thread pool, with results in the order of the work and a bounded lead."""

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
    """Run labeled jobs, and yield each label with its job's result.

    Args:
        ahead: number of jobs that may run or finish before the first result is taken.
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
    label, future = running.popleft()
    with held():
        return label, future.result()
