"""Tell a run of several processes as soon as one of them cannot write its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Watched:
    """One of Orbax's writes; it reports its failure as soon as its result is read."""

    write: Any
    failed: Callable[[Exception], None]

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.write.result(timeout)
        except Exception as error:
            self.failed(error)
            raise

    def cancel(self) -> Any:
        return self.write.cancel()


def watch(handler: Any, failed: Callable[[Exception], None]) -> None:
    """Call `failed` with the error of any write that Orbax's handler begins."""
    save = handler.async_save

    async def watched_save(*arguments: Any, **named: Any) -> Any:
        return [Watched(write, failed) for write in await save(*arguments, **named) or ()]

    handler.async_save = watched_save
