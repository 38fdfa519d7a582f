"""Log the numbers of metrics.jsonl to Weights & Biases, for a recipe with train.log.wandb_project.

The names of numbers are those of TensorBoard's files: "train/loss", "eval/loss". The run's id is kept in
wandb.json next to the checkpoints, so a resumed run continues in the same one. Repeated steps, which give the
same numbers, are not logged twice.

No failure here ends a run: it prints one sentence, and metrics.jsonl has the numbers. Without a key or an
answer from the server the run is recorded on this disk, for `wandb sync`. wandb's own variables (WANDB_MODE,
WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR and so on) apply. The key comes from them or from ~/.netrc, and from
nowhere else.
"""

from __future__ import annotations

import json
import os
import secrets
import string
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import first_line
from .loggers import FILE as METRICS
from .loggers import read_entries
from .replay import Logged, keep, kept, last_steps, replay

FILE = "wandb.json"

INIT_SECONDS = 30.0
"""Seconds without the server's answer after which a run is recorded on this disk; WANDB_INIT_TIMEOUT."""
FINISH_SECONDS = 60.0
"""Seconds to send remaining data when the run has ended; WANDB_FINISH_TIMEOUT."""


class WandB(Logged):
    """Log to a run of Weights & Biases.

    Args:
        run, logged: as of `Logged`.
        teardown: ends wandb's own process.
    """

    name = "Weights & Biases"

    def __init__(self, run: Any, logged: Mapping[str, int], teardown: Callable[[], None]) -> None:
        super().__init__(run, logged)
        self._teardown: Callable[[], None] | None = teardown

    def log(self, mode: str, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one step, unless the run already has them."""
        if not self.wants(mode, step):
            return
        named = {
            f"{mode}/{name}": value if isinstance(value, int) else float(value)
            for name, value in values.items()
        }
        with self.surviving("the rest of the run is not logged there"):
            self._run.log(named, step=step)

    def flush(self) -> None:
        """Do nothing: wandb writes by itself, in its own process."""

    def close(self) -> None:
        """End the run in wandb; data that cannot be sent in time stays on this disk."""
        run, teardown = self._run, self._teardown
        self._run = self._teardown = None
        if run is not None:
            folder = Path(run.settings.sync_dir)
            with self.surviving(f"`wandb sync {folder}` sends what is missing"):
                if self.stopped:
                    run.mark_preempting()
                run.finish(exit_code=self.status)
                if run.settings.mode in ("offline", "dryrun"):
                    self.say(f"recorded in {folder}; `wandb sync {folder}` uploads it")
        if teardown is not None:
            # Otherwise it ends at exit, where it prints its own failures and sets the status.
            with suppress(Exception, SystemExit):
                teardown()


def open_wandb(
    project: str, folder: Path, directory: str | Path, artifact: Path, resume: bool, restored: int
) -> WandB | None:
    """Open the run in Weights & Biases; print a sentence and return None if that fails.

    Args:
        project: train.log.wandb_project, unless WANDB_PROJECT says otherwise.
        folder: folder of metrics.jsonl from before this process; wandb's own files are written there too.
        directory: the checkpoint directory, local or gs://, with wandb.json.
        artifact: folder of recipe.lock.json.
        resume: whether to continue the run that wandb.json names.
        restored: the step after which the run continues, 0 at the beginning.
    """
    # This comes before the import of wandb, which prints while it reads its settings.
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
    except ImportError:
        return WandB.not_logged("the package wandb is not installed")
    try:
        return _open(wandb, project, folder, directory, artifact, resume, restored)
    except Exception as error:  # any error of wandb, its server or its settings
        return WandB.not_logged(first_line(error))


def _open(
    wandb: Any,
    project: str,
    folder: Path,
    directory: str | Path,
    artifact: Path,
    resume: bool,
    restored: int,
) -> WandB | None:
    settings = wandb.setup().settings
    if settings.mode == "disabled":
        return None
    place = {"entity": settings.entity, "project": settings.project or project}
    before = kept(directory, FILE) if resume else {}
    goes_on = all(before.get(name) == value for name, value in place.items()) and "id" in before
    id = settings.run_id or (before["id"] if goes_on else _new_id())
    goes_on = goes_on and before["id"] == id
    folder.mkdir(parents=True, exist_ok=True)
    record = json.loads((artifact / "recipe.lock.json").read_text(encoding="utf-8"))
    given = {
        **place,
        "id": id,
        "name": settings.run_name or artifact.name,
        "dir": None if os.environ.get("WANDB_DIR") else str(folder),
        "config": {"recipec": record["compiler"], **record["recipe"]},
        "resume": "allow",
        "settings": wandb.Settings(
            console="off",
            init_timeout=_seconds("WANDB_INIT_TIMEOUT", INIT_SECONDS),
            finish_timeout=_seconds("WANDB_FINISH_TIMEOUT", FINISH_SECONDS),
            finish_timeout_raises=True,
        ),
    }
    run = _begin(wandb, settings.mode, given)
    if run.settings.mode not in ("offline", "dryrun") and run.url:
        print(f"Weights & Biases: {run.url}", file=sys.stderr, flush=True)
    keep(directory, FILE, {**place, "id": id})
    entries = [entry for _, entry in read_entries(folder / METRICS)]
    if goes_on:
        return WandB(run, last_steps(entries), wandb.teardown)
    logger = WandB(run, {}, wandb.teardown)
    for entry in entries:
        if entry["step"] <= restored:
            replay(logger, entry)
    return logger


def _begin(wandb: Any, mode: str, given: Mapping[str, Any]) -> Any:
    """Begin wandb's run at its server, or on this disk if there is no key or no answer."""
    if mode in ("offline", "dryrun"):
        return wandb.init(**given)
    # Never ask for the key: an unattended run would wait for it.
    if not wandb.login(prompt=False, verify=False):
        WandB.say("no key (`wandb login`, or WANDB_API_KEY); the run is recorded on this disk")
        return wandb.init(mode="offline", **given)
    try:
        return wandb.init(**given)
    except wandb.errors.CommError as error:
        WandB.say(f"{first_line(error)}; the run is recorded on this disk")
        wandb.teardown()  # the id would be taken
        return wandb.init(mode="offline", **given)


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def _seconds(variable: str, otherwise: float) -> float:
    return float(os.environ.get(variable) or otherwise)
