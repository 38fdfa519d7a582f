"""A small artifact, its model and its data, for tests that run a train.py like a user."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipec.compiler.rehearse.artifact_run import QUICK_TO_COMPILE
from tests.conftest import IN_ONE_PIECE
from tests.runtime.lives import ROOT, Life, Lives

STEPS = 10
COMPILED = "compiled"
"""The folder of JAX's cache of compiled programs."""

SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})

import optax

from runtime.model.adapters import LoraSettings
from runtime.sections import Log
from runtime.settings import CheckpointSettings, DataSettings, MeshSettings, ModelSettings, TrainSettings
from runtime.training.train import parse_arguments, run

ARTIFACT = Path(__file__).resolve().parent
MODEL = ModelSettings(id="recipec/tiny-gemma4", family="gemma4", dtype="float32", remat="none")
MESH = MeshSettings(platform="cpu", devices={devices}, axes={{"fsdp": {devices}, "tp": 1}})
LORA = LoraSettings(rank=2, alpha=4.0, dropout=0.1, targets=("q_proj", "v_proj", "down_proj"))
DATA = DataSettings(train=("train.jsonl",), eval=("eval.jsonl",), max_length=48, packing=False)
TRAIN = TrainSettings(
    steps={steps}, continue_from={continue_from}, global_batch_size=8, micro_batch_size=2, eval_every=4,
    log=Log(every=2),
)
CHECKPOINT = CheckpointSettings(directory="checkpoints", every_steps={every}, keep={keep})
{prelude}

def learning_rate(steps):
    return {schedule}


def optimizer(schedule):
    return optax.adamw(schedule, weight_decay=0.01)


if __name__ == "__main__":
    arguments = parse_arguments(ARTIFACT)
    sys.exit(
        run(
            ARTIFACT,
            arguments,
            model=MODEL,
            mesh=MESH,
            lora=LORA,
            data=DATA,
            train=TRAIN,
            checkpoint=CHECKPOINT,
            learning_rate=learning_rate,
            optimizer=optimizer,{arguments}
        )
    )
"""


SCHEDULES = {
    "linear": "optax.linear_schedule({rate}, 0.0, steps)",
    "constant": "optax.constant_schedule({rate})",
    "cosine": "optax.cosine_decay_schedule({rate}, steps)",
}


def write_place(place: Path, layers: Sequence[str] = ("sliding_attention", "full_attention")) -> None:
    """Write model/ (with layers of these kinds), train.jsonl, eval.jsonl and artifact/ into a folder."""
    from recipec.compiler import catalog
    from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint

    config = json.loads(json.dumps(complete(catalog.entries()["recipec/tiny-gemma4"]["config"])))
    config["text_config"] |= {"num_hidden_layers": len(layers), "layer_types": list(layers)}
    write_checkpoint(place / "model", config, dtype="float32")
    choose = random.Random(0)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for name, rows in (("train", 50), ("eval", 10)):
        chats = [
            [
                {"role": "user", "content": " ".join(choose.choices(words, k=3))},
                {"role": "assistant", "content": choose.choice(words)},
            ]
            for _ in range(rows)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    write_artifact(place / "artifact")


def copy_place(place: Path, folder: Path) -> Path:
    """Copy such a folder without its compiled programs, and return the copy."""
    return shutil.copytree(place, folder, ignore=shutil.ignore_patterns(COMPILED))


def write_artifact(folder: Path, **changes: Any) -> None:
    """Write train.py and recipe.lock.json.

    Args:
        changes: devices, rate, steps, every (steps between checkpoints), keep, shape (of the schedule),
            continue_from, `prelude`, which is code, and `arguments`, more of them for run().
    """
    values = {
        "devices": 2,
        "rate": 1e-2,
        "steps": STEPS,
        "every": 2,
        "keep": 2,
        "prelude": "",
        "arguments": "",
        **changes,
    }
    values = {"shape": "linear", "continue_from": None, **values}
    rate = values["rate"]
    schedule = SCHEDULES[values["shape"]].format(rate=rate)
    folder.mkdir()
    script = SCRIPT.format(root=str(ROOT), schedule=schedule, **values)
    (folder / "train.py").write_text(script, encoding="utf-8")
    length = {name: values[name] for name in ("steps", "continue_from")} if "shape" in changes else {}
    shape = {"schedule": {"name": values["shape"]}} if length else {}
    lock = {
        "lock": 1,
        "compiler": "recipec 0.1.0",
        "name": "tiny",
        "recipe": {
            "name": "tiny",
            "train": {"optimizer": {"learning_rate": rate}, "log": {"every": 2}, **length, **shape},
        },
        "model": {"family": "gemma4"},
        "packages": {},
        "runtime": "sha256:0",
        "files": {},
    }
    (folder / "recipe.lock.json").write_text(json.dumps(lock))


def script(place: Path, output: str, *options: str, artifact: str = "artifact") -> list[str]:
    return [
        str(place / artifact / "train.py"),
        *("--model", str(place / "model"), "--data-dir", str(place), "--output", str(place / output)),
        *options,
    ]


def environment(place: Path) -> Mapping[str, str]:
    """Return the environment of a script's process, with a cache of compiled functions that saves time."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return clean | {
        "XLA_FLAGS": f"{QUICK_TO_COMPILE} {IN_ONE_PIECE}",
        "JAX_COMPILATION_CACHE_DIR": str(place / COMPILED),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def train(lives: Lives, place: Path, output: str, *options: str, artifact: str = "artifact") -> Life:
    """Run a script to its end."""
    life = lives.begin(*script(place, output, *options, artifact=artifact))
    life.wait()
    return life


def saved(place: Path, output: str, step: int, item: str = "model_params") -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint."""
    from recipec.runtime.checkpoints.trained_weights import restore_tree

    return restore_tree(str(place / output / "checkpoints" / str(step) / item))


def assert_equal(place: Path, one: str, other: str, step: int) -> None:
    """Check that two runs have bit-identical parameters and optimizer states."""
    for item in ("model_params", "optimizer_state"):
        expected, found = saved(place, one, step, item), saved(place, other, step, item)
        assert expected.keys() == found.keys()
        for path in expected:
            assert expected[path].dtype == found[path].dtype
            assert expected[path].tobytes() == found[path].tobytes(), path


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def entries(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without values that differ from run to run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    keep = ("step", "loss", "eval_loss", "learning_rate", "grad_norm", "tokens")
    return [{key: entry[key] for key in keep if key in entry} for entry in map(json.loads, lines)]


SLOW = """
import sys
import time

from runtime.training import trainer

quick = trainer.Trainer._step


def slow(self, *arguments):
    time.sleep({seconds} if self._train_steps and "--resume" not in sys.argv else 0)
    return quick(self, *arguments)


trainer.Trainer._step = slow
"""
"""Code of an artifact with slow steps, except for the first one and those of a resumed run."""


def error_of(life: Life, place: Path, output: str) -> list[str]:
    """Return the lines of a process's only error, with DIRECTORY in place of its checkpoints' folder."""
    assert "Traceback" not in life.stderr, life.stderr
    (start,) = [i for i, line in enumerate(life.stderr.splitlines()) if line.startswith("error: ")]
    text = "\n".join(life.stderr.splitlines()[start:])
    return text.replace(str(place / output / "checkpoints"), "DIRECTORY").splitlines()


def begin(lives: Lives, place: Path, output: str, *options: str, artifact: str = "artifact") -> Life:
    return lives.begin(*script(place, output, *options, artifact=artifact))


LOSSES = {0: 9.0, 2: 3.0, 4: 1.0, 5: 0.1, 6: 2.0, 8: 1.5, 10: 0.5}

STOPPING = f"""
import dataclasses

from runtime.sections import EarlyStopping
from runtime.training.evaluation import Evaluating

TRAIN = dataclasses.replace(TRAIN, eval_every=2, early_stopping=EarlyStopping(2))
CHECKPOINT = dataclasses.replace(CHECKPOINT, keep_best=True)
record = Evaluating.record
Evaluating.record = lambda self, step, losses: record(
    self, step, {{"loss": {LOSSES}[step]}}
)
"""
"""Code of an artifact that stops after step 8 of 10; the lowest counted loss is that of step 4."""
