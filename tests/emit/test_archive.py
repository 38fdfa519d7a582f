"""Tests of `recipe pack`: the archive is reproducible, complete, and never stale."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
from emitting import RECIPE, compiled, files_of
from typer.testing import CliRunner

from recipec.compiler.artifacts.artifact import LOCK, SCHEMA, write
from recipec.compiler.artifacts.runtime import PAGE, wheel_file
from recipec.compiler.cli.main import app
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError
from recipec.compiler.pack import pack


@pytest.fixture
def project(recipes: Path) -> Path:
    """Make a working folder with a recipe, its data and its artifact."""
    write(recipes / "generated", {"sample": emit(compiled(recipes / "recipes/sample.yaml"))})
    return recipes


def test_the_archive_has_the_artifact_its_data_and_the_runtime(project: Path) -> None:
    done = CliRunner().invoke(app, ["pack", "sample"])
    assert done.exit_code == 0 and done.output == "sample.tar.gz\n"
    with tarfile.open("sample.tar.gz") as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names)
    lock = json.loads((project / "generated/sample" / LOCK).read_bytes())
    assert {*names} == {
        *(f"sample/{path}" for path in (*lock["files"], LOCK, "data/train.jsonl")),
        *(SCHEMA, PAGE, wheel_file()),
    }
    assert all(member.uid == member.gid == member.mtime == 0 and not member.uname for member in members)
    scripts = {f"sample/serve/{name}.sh" for name in ("serve", "smoke", "bench")}
    scripts |= {"sample/launch/host.sh", "sample/launch/tpu-vm.sh"}
    assert {member.name for member in members if member.mode & 0o111} == scripts


def test_the_archive_has_the_prompts_and_the_tokenizer_of_a_run(project: Path) -> None:
    recipe = project / "recipes/sample.yaml"
    data = RECIPE.replace("data: {", "data: {eval: [data/train.jsonl], ")
    data = data.replace("model: {", "model: {tokenizer: ./tok, ")
    (project / "recipes/tok").mkdir()
    (project / "recipes/tok/tokenizer.json").write_text("{}", encoding="utf-8")
    (project / "recipes/tok/chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    samples = "train: {generations: {prompts: data/prompts.jsonl}}\n"
    recipe.write_text(data + samples, encoding="utf-8")
    (project / "recipes/data/prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    write(project / "generated", {"sample": emit(compiled(recipe))})
    with tarfile.open(pack("sample", Path("generated"))) as archive:
        assert {"sample/data/prompts.jsonl", "sample/tok/tokenizer.json"} <= {*archive.getnames()}


def test_the_same_contents_give_the_same_bytes(project: Path) -> None:
    first = pack("sample", Path("generated")).read_bytes()
    for path in Path("generated").rglob("*"):
        path.touch()
    (project / "elsewhere").mkdir()
    assert pack("sample", Path("generated"), archive=project / "elsewhere/x.tar.gz").read_bytes() == first


def test_pack_refuses_missing_schema(project: Path) -> None:
    (project / "generated" / SCHEMA).unlink()
    with pytest.raises(ArtifactError, match=f"{SCHEMA} is missing") as raised:
        pack("sample", Path("generated"))
    assert raised.value.help == "build it again: recipe build RECIPE"
    assert not Path("sample.tar.gz").exists()


def test_pack_names_missing_data_and_writes_no_archive(project: Path) -> None:
    (project / "recipes/data/train.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"data/train\.jsonl is not in"):
        pack("sample", Path("generated"))
    assert not list(project.glob("*.tar.gz")) and not list(project.glob(".*.tar.gz*"))


def test_pack_refuses_data_whose_pictures_would_stay_behind(project: Path) -> None:
    recipe = project / "recipes/sample.yaml"
    recipe.write_text(RECIPE.replace("data: {", "data: {images: {}, "), encoding="utf-8")
    write(project / "generated", {"sample": emit(compiled(recipe))})
    with pytest.raises(ArtifactError, match=r"the rows of data/train\.jsonl name pictures") as raised:
        pack("sample", Path("generated"))
    assert "rows in Parquet with the pictures in them" in str(raised.value.help)
    assert not list(project.glob("*.tar.gz"))


@pytest.mark.parametrize("linked", ["recipes/data/train.jsonl", "recipes/data"])
def test_the_help_for_linked_data_replaces_the_link_with_a_copy(linked: str, project: Path) -> None:
    away = project.parent / f"away {project.name}"
    (project / linked).rename(away)
    (project / linked).symlink_to(away)
    with pytest.raises(ArtifactError, match="would be packed") as raised:
        pack("sample", Path("generated"))
    subprocess.run(str(raised.value.help).partition(": ")[2], shell=True, check=True)
    pack("sample", Path("generated"))
    assert away.exists() and not (project / linked).is_symlink()


def test_pack_finds_data_in_the_artifact_folder(project: Path) -> None:
    (project / "recipes/data").rename(project / "generated/sample/data")
    pack("sample", Path("generated"))


def test_pack_leaves_out_bucket_data(project: Path) -> None:
    text = RECIPE.replace("data/train.jsonl", "gs://bucket/train.jsonl")
    (project / "recipes/sample.yaml").write_text(text)
    write(Path("generated"), {"sample": emit(compiled(Path("recipes/sample.yaml")))})
    with tarfile.open(pack("sample", Path("generated"))) as archive:
        assert not any(name.endswith(".jsonl") for name in archive.getnames())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("generated/sample/train.py", "train.py was edited"),
        ("recipes/sample.yaml", "is stale"),
    ],
)
def test_pack_refuses_edited_files(path: str, message: str, project: Path) -> None:
    (project / path).write_text((project / path).read_text() + "# edited\n")
    with pytest.raises(ArtifactError, match=message) as error:
        pack("sample", Path("generated"))
    assert "recipe build" in str(error.value.help)


def test_pack_names_missing_file_and_missing_artifact(project: Path) -> None:
    (project / "generated/sample/merge.py").unlink()
    with pytest.raises(ArtifactError, match=r"merge\.py is missing"):
        pack("sample", Path("generated"))
    with pytest.raises(ArtifactError, match="no artifact `other`") as error:
        pack("other", Path("generated"))
    assert "it has sample" in str(error.value.help)
    with pytest.raises(ArtifactError, match="no artifact `sample`"):
        pack("sample", Path("nowhere"))
    with pytest.raises(ArtifactError, match="no artifact"):
        pack("../generated/sample", Path("generated"))


def test_pack_of_artifact_built_with_set_needs_the_artifact_recipe(project: Path) -> None:
    write(Path("generated"), {"sample": files_of(project / "recipes/other", ["lora.rank=8"])})
    with pytest.raises(ArtifactError, match="is stale") as error:
        pack("sample", Path("generated"))
    assert "--recipe" in str(error.value.help)
    (project / "recipes/data").rename(project / "generated/sample/data")
    pack("sample", Path("generated"), recipe=Path("generated/sample/recipe.yaml"))
