"""Tests of `recipe push`: the files on a fake hub, the messages before, and the refusals."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.compiler.trained.push import plan, upload
from tests.compiler.hub_server import Hub, Repository, reached_by, serving

FILES = {
    "README.md": b"---\nlicense: mit\n---\n",
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 9,
    "tokenizer.json": b'{"a": 1}',
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving() as made:
        reached_by(made, monkeypatch.setattr, str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", made.token)
        yield made


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """Make a folder as merge.py does, with foreign files in it."""
    folder = tmp_path / "merged"
    folder.mkdir()
    for name, content in {**FILES, "notes.txt": b"mine", ".env": b"secret"}.items():
        (folder / name).write_bytes(content)
    files = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in FILES.items()
    }
    (folder / "merge.json").write_text(json.dumps({"files": files}))
    return folder


def pushed(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["push", *arguments], input=typed)


def test_merged_model_is_pushed_complete_and_private(hub: Hub, merged: Path) -> None:
    done = pushed(str(merged), "our/model", typed="y\n")
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"\n{hub.address}/our/model/commit/" in done.stdout
    assert "to our/model, private, which will be created: main" in done.stderr
    assert all(name in done.stderr for name in FILES) and "notes" not in done.stderr
    there = hub.models["our/model"]
    assert there.private and there.files == {
        **FILES,
        "merge.json": (merged / "merge.json").read_bytes(),
        ".gitattributes": b"",
    }


def test_push_sends_nothing_without_confirmation(hub: Hub, merged: Path) -> None:
    for typed in ("n\n", ""):
        assert "upload?" in pushed(str(merged), "our/model", typed=typed).stderr
    assert not hub.models and not hub.asked("hub", "POST")


def test_push_lists_replaced_and_remaining_files(hub: Hub, merged: Path) -> None:
    hub.models["our/model"] = Repository({"config.json": b"old", "images/a.png": b""}, private=True)
    assert pushed(str(merged), "our/model", typed="n\n").exit_code == 0
    assert hub.models["our/model"].files["config.json"] == b"old"
    done = pushed(str(merged), "our/model", "--yes")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "replaces there config.json" in done.stderr and "leaves there images/a.png" in done.stderr
    assert hub.models["our/model"].files["config.json"] == b"{}"


def test_push_does_not_overwrite_concurrent_commit(hub: Hub, merged: Path) -> None:
    hub.models["our/model"] = Repository({"config.json": b"old"}, private=True)
    planned = plan(merged, "our/model")
    hub.models["our/model"].revisions = {"main": "f" * 40}
    with pytest.raises(ArtifactError, match="412"):
        upload(planned)
    assert hub.models["our/model"].files == {"config.json": b"old"}


def test_adapter_is_pushed_with_its_files_unchanged(hub: Hub, adapter: Path) -> None:
    assert pushed(str(adapter), "our/adapter", "--public", "--yes").exit_code == 0
    there = hub.models["our/adapter"]
    assert not there.private
    assert there.files == {path.name: path.read_bytes() for path in adapter.iterdir()} | {
        ".gitattributes": b""
    }


@pytest.mark.parametrize(
    ("repository", "public", "message", "help"),
    [
        (Repository({}, private=True), True, "exists and is private", "leave --public out"),
        (Repository({}), False, "exists and is public", "--public confirms that everyone may read it"),
        (
            Repository({"model-00001-of-00002.safetensors": b""}, private=True),
            False,
            "which would stay next to these weights",
            "another repository",
        ),
    ],
)
def test_push_refuses_other_visibility_or_leftover_weights(
    hub: Hub, merged: Path, repository: Repository, public: bool, message: str, help: str
) -> None:
    hub.models["our/model"] = repository
    with pytest.raises(ArtifactError, match=message) as raised:
        plan(merged, "our/model", public=public)
    assert help in str(raised.value.help) and not hub.asked("hub", "POST")


def test_push_uses_only_token_from_environment(
    hub: Hub, merged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(hub.token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ArtifactError, match="answered 403"):
        upload(plan(merged, "our/model"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ArtifactError, match="HF_TOKEN is not set"):
        plan(merged, "our/model")


def test_incomplete_model_folder_is_not_pushed(hub: Hub, merged: Path, tmp_path: Path) -> None:
    cut = shutil.copytree(merged, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes(b"half")
    (merged / "merge.partial.json").write_text("{}")
    for folder, message in (
        (cut, "is incomplete: model.safetensors has 4 bytes"),
        (merged, "did not finish"),
    ):
        with pytest.raises(ArtifactError, match=message):
            plan(folder, "our/model")
    assert not hub.requests
