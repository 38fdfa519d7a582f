"""A whole train.py as a user runs it: killed, resumed, refused, stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10

SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})

import optax

from runtime.adapters import LoraSettings
from runtime.settings import CheckpointSettings, DataSettings, MeshSettings, ModelSettings, TrainSettings
from runtime.train import parse_arguments, run

ARTIFACT = Path(__file__).resolve().parent
MODEL = ModelSettings(id="recipec/tiny-gemma4", family="gemma4", dtype="float32", remat="decoder")
MESH = MeshSettings(platform="cpu", devices={devices}, axes={{"fsdp": {devices}, "tp": 1}})
LORA = LoraSettings(rank=2, alpha=4.0, dropout=0.1, targets=("q_proj", "v_proj", "down_proj"))
DATA = DataSettings(train=("train.jsonl",), eval=("eval.jsonl",), max_length=48)
TRAIN = TrainSettings(
    epochs=None, steps={steps}, global_batch_size=8, micro_batch_size=2, eval_every=4, log_every=2
)
CHECKPOINT = CheckpointSettings(directory="checkpoints", every_steps=2, keep=2)


def learning_rate(steps):
    return optax.linear_schedule({rate}, 0.0, steps)


def optimizer(schedule):
    return optax.adamw(schedule, weight_decay=0.01)


if __name__ == "__main__":
    arguments = parse_arguments(ARTIFACT)
    sys.exit(
        run(ARTIFACT, arguments, MODEL, MESH, LORA, DATA, TRAIN, CHECKPOINT, learning_rate, optimizer)
    )
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and an artifact."""
    from compiler import catalog
    from compiler.miniature import complete, write_checkpoint

    place = tmp_path_factory.mktemp("run")
    config = json.loads(json.dumps(complete(catalog.entries()["recipec/tiny-gemma4"]["config"])))
    config["text_config"] |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
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
    return place


def write_artifact(folder: Path, devices: int = 2, rate: float = 1e-2) -> None:
    folder.mkdir()
    (folder / "train.py").write_text(
        SCRIPT.format(root=str(ROOT), devices=devices, steps=STEPS, rate=rate), encoding="utf-8"
    )
    lock = {
        "lock": 1,
        "compiler": "recipec 0.1.0",
        "name": "tiny",
        "recipe": {"name": "tiny", "train": {"optimizer": {"learning_rate": rate}, "log": {"every": 2}}},
        "model": {"family": "gemma4"},
        "packages": {},
        "runtime": "sha256:0",
        "files": {},
    }
    (folder / "recipe.lock.json").write_text(json.dumps(lock))


def command(place: Path, output: str, *options: str, artifact: str = "artifact") -> list[str]:
    return [
        sys.executable,
        str(place / artifact / "train.py"),
        *("--model", str(place / "model"), "--data-dir", str(place), "--output", str(place / output)),
        *options,
    ]


def environment(place: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return clean | {
        "JAX_COMPILATION_CACHE_DIR": str(place / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def train(
    place: Path, output: str, *options: str, artifact: str = "artifact"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(place, output, *options, artifact=artifact),
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def arrays(place: Path, output: str, step: int) -> dict[str, np.ndarray]:
    from runtime.trained import _restore

    return _restore(str(place / output / "checkpoints" / str(step) / "model_params"))


@pytest.fixture(scope="module")
def whole(place: Path) -> subprocess.CompletedProcess[str]:
    """A run that nothing interrupts."""
    return train(place, "whole")


def test_a_run(place: Path, whole: subprocess.CompletedProcess[str]) -> None:
    assert whole.returncode == 0, whole.stderr
    (summary,) = whole.stdout.splitlines()
    assert summary.startswith(f"done: steps={STEPS} tokens/s=")
    for part in (" loss=", " eval_loss=", " peak_memory="):
        assert part in summary
    assert "Traceback" not in whole.stderr and "Warning" not in whole.stderr
    assert "50 of 50 rows kept" in whole.stderr
    assert f"step {STEPS}/{STEPS}: loss " in whole.stderr
    folder = place / "whole" / "checkpoints"
    assert (folder / "recipe.lock.json").read_bytes() == (place / "artifact/recipe.lock.json").read_bytes()
    assert list((folder / "tensorboard").iterdir())
    assert sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) == [8, 10]
    losses = [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert len(losses) == STEPS and losses[-1] < losses[0]


def test_killed_at_any_moment_and_resumed(place: Path, whole: subprocess.CompletedProcess[str]) -> None:
    """SIGKILL within a save, then at a random moment, then to the end: the same parameters."""
    folder = place / "killed" / "checkpoints"
    choose = random.Random()

    def writing() -> bool:
        return any("tmp" in path.name for path in folder.glob("*.orbax-checkpoint-tmp*"))

    def logged() -> bool:
        return (folder / "metrics.jsonl").exists() and '"loss"' in (folder / "metrics.jsonl").read_text()

    kills = 0
    for moment, options in ((writing, ()), (logged, ("--resume",))):
        process = subprocess.Popen(
            command(place, "killed", *options),
            env=environment(place),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 240
        while not moment() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        if moment is logged:
            time.sleep(choose.uniform(0, 8))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 1
    last = train(place, "killed", "--resume")
    assert last.returncode == 0, last.stderr
    assert last.stdout.startswith(f"done: steps={STEPS} ")
    expected, found = arrays(place, "whole", STEPS), arrays(place, "killed", STEPS)
    for path in expected:
        assert np.array_equal(expected[path], found[path]), path

    def numbers(output: str) -> list[tuple[int, float | None, float | None]]:
        lines = (place / output / "checkpoints" / "metrics.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        return [(entry["step"], entry.get("loss"), entry.get("eval_loss")) for entry in entries]

    assert numbers("killed") == numbers("whole")


def test_a_directory_with_checkpoints_is_refused(
    place: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    found = train(place, "whole")
    assert found.returncode == 1
    assert "already holds checkpoints, the newest of step 10" in found.stderr
    assert "--resume" in found.stderr and "Traceback" not in found.stderr


def test_a_finished_run_has_nothing_to_resume(place: Path, whole: subprocess.CompletedProcess[str]) -> None:
    found = train(place, "whole", "--resume")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("done: steps=10 loss=")
    assert "eval_loss=" in found.stdout


def test_another_artifact_is_refused(place: Path, whole: subprocess.CompletedProcess[str]) -> None:
    write_artifact(place / "other", rate=2e-2)
    found = train(place, "whole", "--resume", artifact="other")
    assert found.returncode == 1
    assert "recipe.train.optimizer.learning_rate was 0.01, now 0.02" in found.stderr


def test_stopped_by_a_signal_and_resumed(place: Path, whole: subprocess.CompletedProcess[str]) -> None:
    """Here --steps, SIGTERM and --resume together come to what one run comes to."""
    early = train(place, "stopped", "--steps", "3")
    assert early.returncode == 0, early.stderr
    assert "done: steps=3 " in early.stdout and "stopped after step 3 of 10" in early.stderr
    process = subprocess.Popen(
        command(place, "stopped", "--resume"),
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith("step "):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.communicate(timeout=240)[1]
    assert "continuing after step 3 of 10" in seen
    assert process.returncode == 143, seen + rest
    assert "stopping after this step" in rest
    assert "stopped by SIGTERM; kept: the checkpoint of step" in rest
    assert "Traceback" not in rest
    last = train(place, "stopped", "--resume")
    assert last.returncode == 0, last.stderr
    expected, found = arrays(place, "whole", STEPS), arrays(place, "stopped", STEPS)
    for path in expected:
        assert np.array_equal(expected[path], found[path]), path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "missing"], "missing: no such folder"),
        (["--data-dir", "missing"], "train.jsonl"),
    ],
)
def test_what_is_not_there(place: Path, options: list[str], message: str) -> None:
    found = train(place, "nothing", *options)
    assert found.returncode == 1
    assert found.stderr.startswith("error: ") or "\nerror: " in found.stderr
    assert message in found.stderr and "Traceback" not in found.stderr
    assert not (place / "nothing" / "checkpoints" / "recipe.lock.json").exists()


def test_wrong_usage(place: Path) -> None:
    for options in (["--steps", "0"], ["--rank", "8"], ["--res"]):
        found = train(place, "nothing", *options)
        assert found.returncode == 2
        assert "usage: train.py" in found.stderr


def test_records(tmp_path: Path) -> None:
    from runtime.errors import UserError
    from runtime.record import check_record, read_record, write_record

    artifact = tmp_path / "artifact"
    write_artifact(artifact)
    with pytest.raises(UserError, match="no record of the recipe"):
        read_record(tmp_path)
    write_record(tmp_path / "run", artifact)
    check_record(tmp_path / "run", artifact)
    lock = json.loads((artifact / "recipe.lock.json").read_text())
    lock["recipe"]["train"]["log"]["every"] = 7
    lock["recipe"]["serve"] = {"port": 1}
    lock["compiler"] = "recipec 0.2.0"
    (artifact / "recipe.lock.json").write_text(json.dumps(lock))
    check_record(tmp_path / "run", artifact)
    lock["recipe"]["lora"] = {"rank": 8}
    lock["packages"] = {"jax": "1"}
    (artifact / "recipe.lock.json").write_text(json.dumps(lock))
    with pytest.raises(UserError, match=r"recipe\.lora was null, now .*packages\.jax was null"):
        check_record(tmp_path / "run", artifact)
    (tmp_path / "run" / "recipe.lock.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        check_record(tmp_path / "run", artifact)
