"""An artifact's scripts as steps of a pipeline: each step's command, its folder and its figure."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipec import ROOT
from recipec.compiler.errors import ArtifactError
from recipec.compiler.miniature.small_recipe import TEACHER
from recipec.compiler.pages.numbers import mb_number
from recipec.compiler.rehearse.pipeline import Pipeline, StepFailed, last_lines
from recipec.compiler.report.metrics import Metrics
from recipec.compiler.report.run_folder import METRICS
from recipec.compiler.wording import plural
from recipec.runtime.compilation_cache import FOLDER as COMPILED

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""XLA's flags for programs that run only briefly on a CPU: without LLVM's passes and MLIR's kernels. The
second flag belongs to jax 0.10; XLA aborts a process that passes an unknown flag."""

MARKER = ".recipec-run"
"""An empty file that marks a folder as created by a run."""

CACHE = "jax-cache"
"""Folder of compiled functions."""


@dataclass(frozen=True)
class ArtifactRun:
    """An artifact, the model and data it runs on, and where its output goes.

    Attributes:
        pipeline: runs the scripts.
        artifact: folder with train.py and merge.py.
        model: the checkpoint's directory.
        data: folder that the recipe's data paths are relative to.
        work: folder for the scripts' output.
        checkpoints: the recipe's checkpoint.directory, below an output folder.
        merged: the recipe's merge.output, below an output folder.
        cache: the recipe's cache.directory; None for none.
        processes: number of processes that train together.
    """

    pipeline: Pipeline
    artifact: Path
    model: Path
    data: Path
    work: Path
    checkpoints: str
    merged: str
    cache: str | None = None
    processes: int = 1

    @property
    def whole(self) -> Path:
        """Output folder of the uninterrupted run."""
        return self.work / "whole"

    @property
    def resumed(self) -> Path:
        """Output folder of the run that is killed and resumed."""
        return self.work / "resumed"

    def train(self) -> str:
        """Train without interruption; return the first and the last loss, or reward."""
        text = self._train(self.whole, "train")
        summary = done_line(text)
        losses = self.losses(self.whole)
        if not losses:
            raise StepFailed("train.py wrote no losses to metrics.jsonl", last_lines(text))
        if any(loss != loss or abs(loss) == float("inf") for loss in losses):
            raise StepFailed("the loss is not finite", last_lines(text))
        speed = f", {summary['tokens/s']} tokens/s" if "tokens/s" in summary else ""
        # The loss of a run that learns from rewards says nothing about progress.
        rewards = self.losses(self.whole, "reward")
        name, values = ("reward", rewards) if rewards else ("loss", losses)
        return f"{summary.get('steps', len(losses))} steps, {name} {values[0]:.2f} to {values[-1]:.2f}{speed}"

    def kill(self) -> str:
        """Train again into another folder, and kill the process once a checkpoint exists.

        The second run reuses what the first run compiled, but not what it tokenized.
        """
        compiled, again = (folder / (self.cache or "") / COMPILED for folder in (self.whole, self.resumed))
        if self.cache is not None and compiled.is_dir() and not again.exists():
            shutil.copytree(compiled, again)
        self._train(self.resumed, "kill", until=lambda: bool(self.saved_steps(self.resumed)))
        saved = self.saved_steps(self.resumed)
        reached = self.metrics(self.resumed).last_step
        return f"SIGKILL at step {max(reached, saved[-1])}, checkpoint of step {saved[-1]} exists"

    def resume(self) -> str:
        """Resume the killed run and let it finish."""
        before = self.saved_steps(self.resumed)[-1]
        summary = done_line(self._train(self.resumed, "resume", resume=True))
        return f"from step {before} to {summary.get('steps', self.saved_steps(self.resumed)[-1])}"

    def compare(self) -> str:
        """Compare the resumed run's parameters with the uninterrupted run's, bit by bit."""
        folders = [str(output / self.checkpoints) for output in (self.whole, self.resumed)]
        return _last(
            self._script(["-P", "-m", "recipec.compiler.rehearse.same_parameters", *folders], "compare")
        )

    def merge(self) -> str:
        """Merge the resumed run's adapters into the base model."""
        self._script([str(self.artifact / "merge.py"), *self._merge_paths()], "merge")
        files = sorted((self.resumed / self.merged).glob("*.safetensors"))
        if not files:
            raise StepFailed(f"merge.py wrote no safetensors to {self.resumed / self.merged}")
        size = sum(file.stat().st_size for file in files)
        return f"{plural(len(files), 'file')}, {mb_number(size)} MB"

    def verify(self) -> str:
        """Compare the logits of base + adapter in Tunix with those of the merged checkpoint."""
        command = [str(self.artifact / "merge.py"), *self._merge_paths(), "--verify"]
        return _last(self._script(command, "verify"))

    def metrics(self, output: Path) -> Metrics:
        """Return what a run has logged so far."""
        metrics, path = Metrics(), output / self.checkpoints / METRICS
        for _ in metrics.take(path.read_bytes() if path.is_file() else b""):
            pass
        return metrics

    def losses(self, output: Path, name: str = "loss") -> list[float]:
        """Return the training losses of a run, or another of its metrics ("eval_loss", "reward"), in order of
        steps."""
        return list(self.metrics(output).values.get(name, {}).values())

    def saved_steps(self, output: Path) -> list[int]:
        """Return the steps whose checkpoint is complete."""
        folder = output / self.checkpoints
        if not folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())

    def environment(self) -> dict[str, str]:
        """Return the scripts' environment variables; see `script_environment`."""
        return script_environment(self.work)

    def _train(
        self, output: Path, log: str, resume: bool = False, until: Callable[[], bool] | None = None
    ) -> str:
        command = [str(self.artifact / "train.py"), "--model", str(self.model)]
        if self.processes > 1:
            command = ["-P", "-m", "runtime.hosts.local", str(self.processes), *command]
        if (teacher := self.model.with_name(f"{self.model.name}{TEACHER}")).is_dir():
            command += ["--teacher", str(teacher)]
        command += ["--data-dir", str(self.data), "--output", str(output)]
        return self._script(command + ["--resume"] * resume, log, until)

    def _merge_paths(self) -> list[str]:
        return [
            *("--checkpoint", str(self.resumed / self.checkpoints)),
            *("--model", str(self.model)),
            *("--output", str(self.resumed)),
        ]

    def _script(self, command: list[str], log: str, until: Callable[[], bool] | None = None) -> str:
        return self.pipeline.script([sys.executable, *command], log, self.environment(), until)


def script_environment(work: Path) -> dict[str, str]:
    """Return environment variables for scripts in miniature: CPU, no network, a shared compilation cache.

    The scripts run so briefly that XLA's optimizations would take more time than they save.
    """
    return dict(os.environ) | {
        # For the comparison. The scripts themselves put their own folder's runtime first.
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_TO_COMPILE,
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(work / CACHE)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # This cache is for GPUs. Its path would be part of each key, so a copied cache would never be hit.
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def claim(folder: Path) -> Path:
    """Prepare a folder to work in: a new or empty one, or an earlier run's, cleared except for its cache.

    Raises:
        ArtifactError: when the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", "give a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARKER).is_file():
            raise ArtifactError(f"{folder} holds other files than an earlier run's", "give a new folder")
        for entry in folder.iterdir():
            if entry.is_dir() and entry.name != CACHE:
                shutil.rmtree(entry)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder.resolve()


def done_line(text: str) -> dict[str, str]:
    """Return the figures of train.py's last line, "done: steps=40 loss=1.2"; {} without such a line."""
    for line in reversed(text.splitlines()):
        if line.startswith("done:"):
            return dict(item.split("=", 1) for item in line.split()[1:] if "=" in item)
    return {}


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
