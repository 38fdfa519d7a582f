"""The command line of the other backends' scripts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ..addresses import folder, folder_or_address
from ..model.adapters import LoraSettings
from ..peft.adapter import located


@dataclass(frozen=True)
class BackendArguments:
    """The command line of a backend's script.

    Attributes:
        model: folder or address of the checkpoint to start from; None to find the recipe's model.id.
        data_dir: base folder for relative paths of data.
        output: folder below which checkpoints, metrics and the adapter are written.
        resume: continue from the newest checkpoint.
        steps: stop after this optimizer step; None for the recipe's number of steps.
        adapter: folder of a PEFT adapter to start from; None for the recipe's initial values.
        trace: the file that runtime.training.trace writes; None for no file.
    """

    model: Path | str | None
    data_dir: Path
    output: Path
    resume: bool
    steps: int | None
    adapter: Path | None
    trace: Path | None

    def start_from(self, lora: LoraSettings) -> Path | str | None:
        """Return the adapter to start from: --adapter, or the recipe's; None for fresh values."""
        if self.adapter is not None or lora.start_from is None:
            return self.adapter
        return located(lora.start_from, self.data_dir)


def parse_arguments(program: str, artifact: Path) -> BackendArguments:
    """Read the command line; wrong usage ends the process with status 2.

    Args:
        program: file name of the script.
        artifact: folder of the artifact.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=f"Fine-tunes as the recipe of {artifact.name} says. Hyperparameters are the recipe's.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", type=folder_or_address, metavar="DIR", help="folder of the base checkpoint, or gs://")
    add("--data-dir", type=folder, metavar="DIR", default=artifact, help="folder of the data files")
    add("--output", type=folder, metavar="DIR", default=artifact, help="folder for checkpoints and metrics")
    add("--resume", action="store_true", help="continue from the newest checkpoint")
    add("--steps", type=_positive, metavar="N", help="stop after optimizer step N")
    add("--adapter", type=Path, metavar="DIR", help="start from a PEFT adapter")
    traced = "write rows, losses, first gradients, and adapters before and after"
    add("--trace", type=Path, metavar="FILE", help=traced)
    given = parser.parse_args()
    if given.resume and given.adapter is not None:
        parser.error("--resume continues a run and --adapter starts one: give only one of them")
    return BackendArguments(**vars(given))


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of steps")
    return int(text)
