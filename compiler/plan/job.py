"""The job of one worker process: compile a recipe's step with some of the model's layers, on its topology."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from recipec.compiler.emitters.backends import Backend


@dataclass(frozen=True)
class Job:
    """One compile.

    Attributes:
        recipe: absolute path of the recipe's file.
        sets: the --set arguments.
        layers: indices of the model's layers that are compiled, in ascending order.
        backend: the backend whose step is compiled: train.py's, or train_torchax.py's.
        scheduled: whether the compile stops after the schedule, before code is generated.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    recipe: Path
    sets: tuple[str, ...]
    layers: tuple[int, ...]
    backend: Backend = Backend.TUNIX
    scheduled: bool = False


@dataclass(frozen=True)
class Failed:
    """A job that gave no result.

    Attributes:
        message: one sentence.
        killed: whether the process was killed, as the kernel does when memory runs out.
        help: how to solve the problem; "" where no help is known.
        flag: the libtpu flag whose value libtpu refuses; "" for another reason.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    message: str
    killed: bool = False
    help: str = ""
    flag: str = ""


JOB: TypeAdapter[Job] = TypeAdapter(Job)
FAILED: TypeAdapter[Failed] = TypeAdapter(Failed)
