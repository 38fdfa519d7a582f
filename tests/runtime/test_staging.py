"""Tests of checkpoints at addresses that Orbax does not read: only the requested step is copied."""

from __future__ import annotations

import json
import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest

from recipec.compiler.lowering import catalog
from recipec.compiler.rehearse.miniature import complete, write_checkpoint
from recipec.runtime.checkpoints import manifest
from recipec.runtime.checkpoints.adapter_reader import TrainedAdapters, choose_step, load_trained
from recipec.runtime.checkpoints.staging import staged
from recipec.runtime.errors import UserError
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.refusals import refusal
from tests.runtime import runs

MEMORY = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the folder for temporary copies in this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run's folder: steps 2, 4 and 10 are complete, and 12 is unfinished.

    Step 4 has the lowest loss.
    """
    folder = tmp_path / "run"
    for step in (2, 4, 10):
        tree = folder / str(step) / "model_params"
        (tree / "d").mkdir(parents=True)
        (tree / "d" / "data").write_text(f"parameters of {step}")
        manifest.write(tree)
        optimizer = folder / str(step) / "optimizer_state"
        optimizer.mkdir()
        (optimizer / "data").write_bytes(b"x" * 1000)
    (folder / "12.orbax-checkpoint-tmp" / "model_params").mkdir(parents=True)
    (folder / "12.orbax-checkpoint-tmp" / "model_params" / "data").write_bytes(b"x")
    (folder / "14").mkdir()
    (folder / "14" / "_METADATA").write_text("{}")
    (folder / "recipe.lock.json").write_text("{}")
    losses = {2: 3.0, 4: 1.0, 10: 2.0, 12: 0.5}
    lines = [json.dumps({"step": step, "eval_loss": loss}) for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def stage(address: str, which: str) -> None:
    with staged(address, which):
        pass


@pytest.mark.parametrize(("which", "step"), [("latest", 10), ("best", 4), ("2", 2)])
def test_staging_copies_only_requested_step(
    run: Path, uploaded: Callable[[Path], str], temporary: Path, which: str, step: int
) -> None:
    with staged(uploaded(run) + "/", which) as directory:
        copy = Path(directory)
        assert choose_step(directory, which) == choose_step(run, which) == step
        for name in ("recipe.lock.json", "metrics.jsonl"):
            assert (copy / name).read_bytes() == (run / name).read_bytes()
        files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
        tree = {f"{step}/model_params/{name}" for name in ("d/data", "SHA256SUMS")}
        assert files == {"recipe.lock.json", "metrics.jsonl"} | tree
        assert manifest.damage(copy / str(step) / "model_params") is None
    assert list(temporary.iterdir()) == []


def test_staging_uses_local_and_gs_folders_in_place(run: Path, temporary: Path) -> None:
    for directory, given in ((str(run), str(run)), (f"file://{run}", str(run)), ("gs://b/run", "gs://b/run")):
        with staged(directory, "latest") as found:
            assert found == given and list(temporary.iterdir()) == []


def test_staged_copy_is_removed_after_error(
    run: Path, uploaded: Callable[[Path], str], temporary: Path
) -> None:
    address = uploaded(run) + "/"

    def work() -> None:
        with staged(address, "latest") as directory:
            raise UserError(f"{directory}/10: is odd", f"see {directory}")

    error = refusal(work)
    assert (error.message, error.help) == (f"{address}10: is odd", f"see {address.rstrip('/')}")
    assert list(temporary.iterdir()) == []


def test_missing_remote_step_gives_same_error_as_local_folder(
    run: Path, uploaded: Callable[[Path], str]
) -> None:
    address = uploaded(run) + "/"
    for which in ("3", "12", "14", "newest"):
        here, there = refusal(lambda w=which: choose_step(run, w)), refusal(lambda w=which: stage(address, w))
        assert there.message == here.message.replace(str(run), address.rstrip("/"))
        assert there.help == here.help
    assert (
        "memory://none-such: no checkpoint" in refusal(lambda: stage("memory://none-such", "latest")).message
    )


def test_damaged_step_error_suggests_earlier_step(run: Path, uploaded: Callable[[Path], str]) -> None:
    for step in (10, 2):
        (run / str(step) / "model_params" / "d" / "data").write_bytes(b"other")
    address = uploaded(run) + "/"
    error = refusal(lambda: stage(address, "latest"))
    assert error.message.startswith(f"{address.rstrip('/')}: the checkpoint of step 10 is damaged")
    assert "--step 4" in str(error.help)
    assert refusal(lambda: stage(address, "2")).help == "there is no earlier one"


def test_staging_refuses_copy_without_disk_space(
    run: Path, uploaded: Callable[[Path], str], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10))
    error = refusal(lambda: stage(uploaded(run) + "/", "latest"))
    assert str(temporary) in error.message and "TMPDIR" in str(error.help)


def test_remote_run_loads_like_local_run(tmp_path: Path, uploaded: Callable[[Path], str]) -> None:
    config = json.loads(json.dumps(complete(catalog.entries()["recipec/tiny-gemma4"]["config"])))
    config["text_config"] |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    write_checkpoint(tmp_path / "model", config)
    base = HFCheckpoint.open(tmp_path / "model")
    run = tmp_path / "trained"
    runs.save_run(run, base, runs.lora_section(targets=["q_proj", "down_proj"]), steps=(1, 3))
    here = load_trained(run, "1", base)
    with staged(uploaded(run) + "/", "1") as directory:
        there = load_trained(directory, "1", base)
    assert isinstance(here, TrainedAdapters) and isinstance(there, TrainedAdapters)
    assert (there.step, there.lock, there.settings) == (here.step, here.lock, here.settings)
    assert there.arrays.keys() == here.arrays.keys() and not here.no_op
    for name, pair in here.arrays.items():
        for one, other in zip(there.arrays[name], pair, strict=True):
            np.testing.assert_array_equal(one, other)
