"""Tests of runs in a bucket: complete checkpoints, the remains of a killed save, and a busy store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

from recipec.compiler import catalog
from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint
from recipec.runtime.addresses import path_of
from recipec.runtime.checkpoints import record, resuming, saving
from recipec.runtime.checkpoints.saved_steps import choose_step, saved_steps, step_folders, unfinished
from recipec.runtime.checkpoints.trained_weights import load_trained
from recipec.runtime.data.pictures import content_of
from recipec.runtime.data.row_values import Malformed
from recipec.runtime.errors import UserError
from recipec.runtime.merging import merge
from recipec.runtime.merging.job import output_folder
from recipec.runtime.metrics import run_facts
from recipec.runtime.metrics.loggers import download, publisher, upload
from recipec.runtime.model.adapters import build_adapters, lora_settings
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from recipec.runtime.weights.locate import locate_model
from tests.refusals import refusal
from tests.remote.conftest import Bucket
from tests.runtime import runs

SAVED = ("_CHECKPOINT_METADATA", "model_params/d/data", "model_params/SHA256SUMS", "optimizer_state/d/data")


def write_steps(bucket: Bucket, whole: tuple[int, ...], begun: tuple[int, ...]) -> None:
    """Write folders of steps as Orbax does: the marker comes last."""
    for step in (*whole, *begun):
        for name in SAVED:
            bucket.put(f"run/{step}/{name}", "x")
    for step in whole:
        bucket.put(f"run/{step}/commit_success.txt", "x")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> HFCheckpoint:
    """Make a model of two layers."""
    config = json.loads(json.dumps(complete(catalog.entries()["recipec/tiny-gemma4"]["config"])))
    config["text_config"] |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = tmp_path_factory.mktemp("base") / "model"
    write_checkpoint(folder, config)
    return HFCheckpoint.open(folder)


def save(directory: str, steps: Mapping[int, Mapping[Any, Any]]) -> None:
    """Save trees of parameters as a run does."""
    manager = saving.manager(directory, saving.Preserved(5))
    for step, tree in steps.items():
        items = {
            name: ocp.args.PyTreeSave(item=item)
            for name, item in ((saving.ITEM, tree), (resuming.OPTIMIZER, {"count": np.ones(2)}))
        }
        save_it = partial(
            manager.save,
            step,
            args=ocp.args.Composite(**items),
            custom_metadata={resuming.DATA: {}, resuming.CHECK: resuming.digest({})},
            force=True,
        )
        saving.begin_save(directory, save_it)
    manager.wait_until_finished()
    manager.close()


def test_step_without_commit_marker_is_not_a_checkpoint(bucket: Bucket) -> None:
    write_steps(bucket, (2, 10), (12,))
    bucket.put("run/14/_CHECKPOINT_METADATA", "{}")
    run = f"{bucket.url}/run"
    assert step_folders(run) == saved_steps(run) == [2, 10]
    assert unfinished(run) == [12, 14]
    assert choose_step(run, "latest") == 10
    assert refusal(lambda: choose_step(run, "12")).help == "there are 2, 10"
    assert "step 10" in saving.kept(run)


def test_save_removes_only_the_unfinished_step_from_the_bucket(
    bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(bucket, (2,), (4,))
    others = ["run/data/train.jsonl", "run/merged/config.json", "run/corrupt-1/x", "run/2024/train.jsonl"]
    for name in others:
        bucket.put(name, "x")
    save(f"{bucket.url}/run", {6: {"a": np.ones(3)}})
    assert set(others) <= set(bucket.names())
    assert not bucket.names("run/4/") and bucket.names("run/2/")
    assert step_folders(f"{bucket.url}/run") == [2, 6]
    assert "the save of step 4 did not finish: it is removed" in capsys.readouterr().err


def test_damaged_step_is_moved_to_a_corrupt_folder(
    bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"{bucket.url}/run"
    save(run, {2: {"a": np.ones(3)}, 4: {"a": np.ones(3)}})
    damaged = next(name for name in bucket.names("run/4/model_params/") if "/d/" in name)
    bucket.put(damaged, b"other")
    before = bucket.names("run/4/")
    found = resuming.find(run)
    assert found.step == 2 and [step for step, _ in found.damaged] == [4]
    resuming.set_aside(run, found)
    assert not bucket.names("run/4/")
    assert bucket.names("run/corrupt-4/") == [name.replace("run/4/", "run/corrupt-4/") for name in before]
    assert step_folders(run) == [2] and "it is now corrupt-4" in capsys.readouterr().err
    saving.manager(run, saving.Preserved(2)).close()
    assert bucket.names("run/corrupt-4/")


def test_save_failed_by_busy_store_is_skipped_and_next_save_succeeds(
    bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    run, tree = f"{bucket.url}/run", {"a": np.ones(3)}
    # One more failure than gcsfs retries.
    fault = bucket.server.fail("run/4/model_params/SHA256SUMS", 503, times=6)
    save(run, {2: tree, 4: tree, 6: tree})
    assert fault.times == 0 and len(bucket.waits) == 5
    assert saved_steps(run) == [2, 6] and unfinished(run) == [4]
    assert "503; kept: the checkpoint of step 2" in capsys.readouterr().err
    assert resuming.find(run).step == 6
    bucket.server.fail("run/8/model_params/.*ocdbt", 403, times=100)
    error = refusal(lambda: save(run, {8: tree, 10: tree}))
    assert "PERMISSION_DENIED" in error.message and "kept: the checkpoint of step 6" in error.message
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(error.help) and "--resume" in str(error.help)


@pytest.mark.parametrize("fault", [503, "lost", 410])
def test_large_bucket_file_is_complete_or_absent(
    bucket: Bucket, fault: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipec.runtime.merging.output_folder.PART", 1 << 20)
    data = bytes(range(256)) * (5 << 12)
    folder = output_folder(f"{bucket.url}/merged")
    failing = bucket.server.fail(f"{bucket.name}.*upload_id", fault, after=1)

    def write() -> None:
        with folder.create("model.safetensors") as file:
            for start in range(0, len(data), 1 << 20):
                file.write(data[start : start + (1 << 20)])
                assert folder.names() == []

    if fault == 410:  # the store has forgotten the upload
        with pytest.raises(OSError, match="410"):
            write()
        assert folder.names() == []
    write()
    assert failing.times == 0
    assert folder.names() == ["model.safetensors"] and bucket.read("merged/model.safetensors") == data


def test_bucket_listing_reads_every_page(bucket: Bucket) -> None:
    bucket.server.page = 2
    write_steps(bucket, tuple(range(2, 14, 2)), (14,))
    run = f"{bucket.url}/run"
    assert saved_steps(run) == [2, 4, 6, 8, 10, 12] and unfinished(run) == [14]
    (path_of(run) / "2").rmtree()
    assert not bucket.names("run/2/")


@pytest.mark.parametrize("fault", [503, "reset", "lost"])
def test_temporary_store_faults_are_retried(
    bucket: Bucket, tmp_path: Path, base: HFCheckpoint, fault: int | str
) -> None:
    runs.write_lock(tmp_path, base, None)
    bucket.server.fail(f"upload.*{bucket.name}", fault, times=3)
    run = f"{bucket.url}/run"
    record.write_record(run, tmp_path)
    bucket.server.fail(f"GET .*{bucket.name}", "cut" if fault == "reset" else fault, times=3)
    assert record.read_record(run)["name"] == "tiny"
    assert len(bucket.waits) >= 4  # aiohttp itself repeats requests on a connection that had been idle
    assert bucket.names() == ["run/recipe.lock.json"]


def test_pictures_of_a_bucket_that_refuses_end_the_run_and_a_missing_one_is_a_malformed_row(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("a.png", b"bytes")
    assert content_of(f"{bucket.url}/a.png", tmp_path, "picture 0") == b"bytes"
    with pytest.raises(Malformed, match="picture 0 is missing: gs://"):
        content_of(f"{bucket.url}/b.png", tmp_path, "picture 0")
    for fault, way_out in ((503, "try again later"), (403, "GOOGLE_APPLICATION_CREDENTIALS")):
        bucket.server.faults.clear()
        bucket.server.fail(bucket.name, fault, times=10_000)
        fsspec.get_filesystem_class("gs").clear_instance_cache()
        with pytest.raises(UserError) as refused:
            content_of(f"{bucket.url}/a.png", tmp_path, "picture 0")
        assert "a.png: cannot be" in str(refused.value) or "a.png cannot be" in str(refused.value)
        assert way_out in (refused.value.help or "")


@pytest.mark.parametrize(
    ("fault", "words", "way_out"),
    [(503, "503", "try again later"), (403, "Forbidden", "GOOGLE_APPLICATION_CREDENTIALS")],
)
def test_permanent_store_fault_gives_one_sentence_error(
    bucket: Bucket, tmp_path: Path, base: HFCheckpoint, fault: int, words: str, way_out: str
) -> None:
    run = f"{bucket.url}/run"
    runs.write_lock(tmp_path / "artifact", base, None)
    write_steps(bucket, (2,), ())
    bucket.server.fail(bucket.name, fault, times=10_000)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for action in (
        lambda: step_folders(run),
        lambda: resuming.find(run),
        lambda: record.read_record(run),
        lambda: record.write_record(run, tmp_path / "artifact"),
        lambda: choose_step(run, "best"),
        lambda: load_trained(run, "latest", base),
        lambda: download(tmp_path / "metrics.jsonl", run),
        lambda: saving.manager(run, saving.Preserved(2)),
        lambda: locate_model(ModelSettings(id=run, family="gemma4", dtype="float32", remat="none")),
    ):
        bucket.waits.clear()
        error = refusal(action)
        assert words in error.message and run in error.message and "\n" not in error.message
        assert way_out in str(error.help)
        # Each request has six tries, 15 to 20 s between the first and the last.
        assert not bucket.waits if fault == 403 else len(bucket.waits) >= 5


def test_watch_and_report_read_a_bucket_or_give_an_error(
    bucket: Bucket, base: HFCheckpoint, tmp_path: Path
) -> None:
    write_steps(bucket, (2, 4), (6,))
    run, page = f"{bucket.url}/run", tmp_path / "report.html"
    runs.write_lock(tmp_path, base, None)
    record.write_record(run, tmp_path)
    bucket.put("run/metrics.jsonl", "".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in range(1, 7)))
    bucket.put("run/state.json", json.dumps({"state": "training", "total": 10, "until": 10, "pid": 1}))
    watched = CliRunner().invoke(app, ["watch", run, "--once"])
    assert "step 6/10" in watched.output and "checkpoint 4" in watched.output
    assert CliRunner().invoke(app, ["report", run, "-o", str(page)]).exit_code == 0 and page.exists()
    for after in (0, 5):
        for status, words in ((503, "503"), (403, "Forbidden")):
            for arguments in (["report", run, "-o", str(page)], ["watch", run, "--once"]):
                bucket.server.faults.clear()
                bucket.server.fail(f"{bucket.name}.*", status, times=1000, after=after)
                ended = CliRunner().invoke(app, arguments)
                # An ArtifactError gets here, which `recipe` would print as watch prints its errors.
                assert isinstance(ended.exception, (ArtifactError, SystemExit)) and ended.exit_code == 1
                assert words in f"{ended.output}{ended.exception}", (after, arguments)


def test_bucket_weights_are_cached_and_copied_again_when_changed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url, first, second = f"{bucket.url}/model", bytes(range(256)) * 4096, b"other" + bytes(range(256)) * 4096
    bucket.put("model/model.safetensors", first)
    bucket.put("model/config.json", "{}")
    bucket.server.fail(f"download.*{bucket.name}/o/model/model.safetensors", "cut")

    def located() -> bytes:
        model = ModelSettings(id=url, family="gemma4", dtype="float32", remat="none")
        return (locate_model(model) / "model.safetensors").read_bytes()

    assert located() == first
    read = len(bucket.server.seen(f"download.*{bucket.name}"))
    assert located() == first and len(bucket.server.seen(f"download.*{bucket.name}")) == read
    bucket.put("model/model.safetensors", second[: len(first)])
    assert located() == second[: len(first)]


def test_failed_metrics_upload_keeps_the_local_file(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, here = f"{bucket.url}/run", tmp_path / "metrics.jsonl"
    here.write_text('{"step": 1}\n')
    fault = bucket.server.fail(f"POST .*{bucket.name}", 403, times=2)
    publisher(run)(here)
    assert capsys.readouterr().err == ""
    upload(here, run)
    assert f"{here} is complete" in capsys.readouterr().err and fault.times == 0
    publisher(run)(here)
    assert bucket.read("run/metrics.jsonl") == here.read_bytes()
    bucket.server.fail(f"POST .*{bucket.name}", 403, times=10)
    run_facts.merged(run, {"step": 1, "folder": "x", "verified": None})
    assert capsys.readouterr().err.startswith("note: ")


def test_bucket_to_bucket_merge_equals_local_merge(
    bucket: Bucket, base: HFCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = runs.lora_section(targets=["q_proj", "down_proj"])
    adapters = build_adapters(base.family, base.architecture, lora_settings(section, 2))
    trees: dict[int, dict[Any, Any]] = {}
    for step in (2, 4, 6):
        trees[step] = {}
        for path, array in runs.random_arrays(adapters, seed=step).items():
            node, *rest = trees[step], *path.split(".")
            for folder in rest[:-1]:
                node = node.setdefault(folder, {})
            node[rest[-1]] = array
    here, there = tmp_path / "run", f"{bucket.url}/run"
    for directory in (str(here), there):
        save(directory, trees)
    runs.write_lock(here, base, section)
    bucket.put("run/recipe.lock.json", (here / "recipe.lock.json").read_bytes())
    # The save of step 6 has not ended in the bucket, so that the newest step there is 4.
    del bucket.server.buckets[bucket.name]["run/6/commit_success.txt"]
    assert base.directory is not None
    for path in base.directory.iterdir():
        bucket.put(f"model/{path.name}", path.read_bytes())

    def merged(directory: str, model: str, output: str, step: str) -> None:
        arguments = ["--checkpoint", directory, "--model", model, "--output", output, "--step", step]
        settings = ModelSettings(id="recipec/tiny-gemma4", family="gemma4", dtype="bfloat16", remat="none")
        assert not merge.main(
            tmp_path,
            settings,
            checkpoint="c",
            output="merged",
            dtype="bfloat16",
            adapter=True,
            argv=arguments,
        )

    merged(str(here), str(base.directory), str(tmp_path), "4")
    bucket.server.fail("upload_id", 503, times=3)
    bucket.server.fail("alt=media", "cut", times=3)
    merged(there, f"{bucket.url}/model", bucket.url, "latest")
    assert f"{there}/6 holds no checkpoint; step 4 is used" in capsys.readouterr().err
    for kind in ("merged", "merged-adapter"):
        names = sorted(path.name for path in (tmp_path / kind).iterdir())
        assert names == [name.partition("/")[2] for name in bucket.names(f"{kind}/")]
        for name in names:
            if name.endswith((".safetensors", "index.json")):
                assert bucket.read(f"{kind}/{name}") == (tmp_path / kind / name).read_bytes(), name
    assert json.loads(bucket.read("run/merges.json"))[0]["step"] == 4
