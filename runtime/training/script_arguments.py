"""The command line that all scripts that train have. Imports no jax."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ..addresses import folder, folder_or_address


@dataclass(frozen=True)
class Arguments:
    """The command line of a script that trains.

    Attributes:
        resume: continue from the newest checkpoint.
        steps: stop after this optimizer step; None for the recipe's own.
        model: folder of the checkpoint to start from, or its address; None to find the recipe's model.id.
        data_dir: the folder that relative paths of data are relative to.
        output: the folder that a relative checkpoint.directory is relative to.
        trace: file for a trace that the run can be compared by, None to write none.
        teacher: folder of the teacher's checkpoint, or its address; None to find the recipe's teacher.
        write_teacher: write the teacher's log-probabilities for train.distill.stored, instead of training.
    """

    resume: bool
    steps: int | None
    model: Path | str | None
    data_dir: Path
    output: Path
    trace: Path | None
    teacher: Path | str | None
    write_teacher: bool


def parser_of(program: str, artifact: Path) -> argparse.ArgumentParser:
    """Make the parser of `Arguments`; wrong usage ends the process with status 2.

    Args:
        program: file name of the script.
        artifact: folder of the script.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=f"Fine-tune by the recipe of {artifact.name}, which sets all hyperparameters.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--resume", action="store_true", help="continue from the newest checkpoint")
    add("--steps", type=_positive, metavar="N", help="stop after optimizer step N")
    add("--model", type=folder_or_address, metavar="DIR", help="folder of the base checkpoint, or gs://")
    teacher = "folder of the checkpoint of a distillation's teacher, or gs://"
    add("--teacher", type=folder_or_address, metavar="DIR", help=teacher)
    written = "write train.distill.stored, with the teacher's log-probabilities, and do not train"
    add("--write-teacher", action="store_true", help=written)
    add("--data-dir", type=folder, metavar="DIR", default=artifact, help="folder of the data files")
    add("--output", type=folder, metavar="DIR", default=artifact, help="folder for checkpoints and metrics")
    traced = "write rows, losses, the first gradients, and the adapters before and after the run"
    add("--trace", type=Path, metavar="FILE", help=traced)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of steps")
    return int(text)
