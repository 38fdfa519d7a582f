"""`recipe upgrade` of recipes that extend others: each file by itself, and together the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from spec.load import load
from spec.upgrade import STEPS
from spec.upgrade.draft import Draft

Recipe = Callable[..., Result]

BASE = """\
# What our runs share.
recipe: 1
model: {id: google/gemma-3-270m-it}
mesh: {accelerator: cpu-8, axes: {fsdp: 8}}
lora: {rank: 16}
train: {epochs: 1, batch_size: 16, log: {every: 5}}
"""
TOP = """\
recipe: 1
name: top
extends: shared/base.yaml
data: {train: [gs://bucket/a.jsonl]}
tokens: {max_length: 2048}
train:
  batch_size: 8   # half
"""
NEW_BASE = """\
# What our runs share.
recipe: 3
model: {id: google/gemma-3-270m-it}
mesh: {accelerator: cpu-8, axes: {fsdp: 8}}
lora: {rank: 16}
train: {epochs: 1, global_batch_size: 16, log: {every: 5}, seed: 17}
"""
NEW_TOP = """\
recipe: 3
name: top
extends: shared/base.yaml
data: {train: [gs://bucket/a.jsonl], max_length: 2048}
train:
  global_batch_size: 8   # half
"""


@pytest.fixture
def files(tmp_path: Path, three_versions: None) -> Path:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text(BASE)
    (tmp_path / "top.yaml").write_text(TOP)
    return tmp_path


def test_every_file_has_its_own_diff(recipe: Recipe, files: Path) -> None:
    done = recipe("upgrade", "--check", "top.yaml")
    assert done.exit_code == 1
    heads = [line for line in done.stdout.splitlines() if line.startswith(("---", "+++"))]
    names = ["shared/base.yaml", "top.yaml"]
    assert heads == [line for n in names for line in (f"--- {n}", f"+++ {n}\tversion 3 of the language")]
    assert done.stderr == (
        "shared/base.yaml: of version 1; version 3 is read\n"
        "top.yaml: of version 1; version 3 is read\n"
        "2 files to upgrade: --write writes what is shown\n"
    )


def test_the_files_together_say_the_same(recipe: Recipe, files: Path) -> None:
    done = recipe("upgrade", "--write", "top.yaml")
    assert done.stdout == "shared/base.yaml: version 1 -> 3\ntop.yaml: version 1 -> 3\n"
    assert (files / "shared" / "base.yaml").read_text() == NEW_BASE
    assert (files / "top.yaml").read_text() == NEW_TOP
    assert recipe("check", "top.yaml").exit_code == 0


def test_a_base_of_several_recipes_is_upgraded_once(recipe: Recipe, files: Path) -> None:
    (files / "other.yaml").write_text(TOP.replace("top", "other"))
    done = recipe("upgrade", "--write", "other.yaml", "top.yaml", "shared/base.yaml")
    assert done.stdout.splitlines() == [
        "shared/base.yaml: version 1 -> 3",
        "other.yaml: version 1 -> 3",
        "top.yaml: version 1 -> 3",
    ]
    assert (files / "shared" / "base.yaml").read_text() == NEW_BASE


def test_mixed_versions_are_named_and_each_is_taken_from_where_it_is(recipe: Recipe, files: Path) -> None:
    (files / "shared" / "base.yaml").write_text(NEW_BASE)
    checked = recipe("check", "top.yaml")
    assert checked.exit_code == 1
    assert checked.stderr.startswith("error[E1235]: this file is of version 1 of the language")
    done = recipe("upgrade", "--write", "top.yaml")
    assert (
        done.stdout == "shared/base.yaml: up to date (version 3 of the language)\ntop.yaml: version 1 -> 3\n"
    )
    assert (files / "top.yaml").read_text() == NEW_TOP
    assert (files / "shared" / "base.yaml").read_text() == NEW_BASE


def test_a_base_of_an_older_version_is_named_by_every_command(recipe: Recipe, files: Path) -> None:
    (files / "top.yaml").write_text(NEW_TOP)
    done = recipe("check", "top.yaml")
    assert done.exit_code == 1
    assert "error[E1235]" in done.stderr and "--> shared/base.yaml:2:9" in done.stderr
    assert "= help: recipe upgrade shared/base.yaml" in done.stderr
    assert recipe("upgrade", "--write", "top.yaml").exit_code == 0
    assert (files / "shared" / "base.yaml").read_text() == NEW_BASE
    assert recipe("check", "top.yaml").exit_code == 0


def test_a_base_of_a_newer_version_needs_a_newer_compiler(recipe: Recipe, files: Path) -> None:
    (files / "shared" / "base.yaml").write_text(BASE.replace("recipe: 1", "recipe: 4"))
    for command in ("check", "upgrade"):
        done = recipe(command, "top.yaml")
        assert done.exit_code == 1
        assert "error[E0108]: this file is of version 4" in done.stderr
        assert "--> shared/base.yaml:2:9" in done.stderr
    assert (files / "top.yaml").read_text() == TOP


def test_a_base_without_a_version_is_of_its_recipes_and_says_so_from_then_on(
    recipe: Recipe, files: Path
) -> None:
    base = files / "shared" / "base.yaml"
    base.write_text(BASE.replace("recipe: 1\n", ""))
    assert recipe("upgrade", "--write", "top.yaml").exit_code == 0
    assert base.read_text() == NEW_BASE
    (files / "other.yaml").write_text(TOP.replace("top", "other"))
    done = recipe("upgrade", "--write", "other.yaml")
    assert done.stdout.startswith("shared/base.yaml: up to date")
    assert base.read_text() == NEW_BASE


def test_a_base_without_a_version_has_one_only(recipe: Recipe, files: Path) -> None:
    base = files / "shared" / "base.yaml"
    base.write_text(BASE.replace("recipe: 1\n", ""))
    (files / "other.yaml").write_text(TOP.replace("top", "other").replace("recipe: 1", "recipe: 2"))
    done = recipe("upgrade", "--write", "top.yaml", "other.yaml")
    assert done.exit_code == 1
    assert (
        "error[E1236]: this file says no version, and files of the versions 1 and 2 extend it" in done.stderr
    )
    assert "= help: say which it is of: `recipe: 1`" in done.stderr
    assert (files / "top.yaml").read_text() == TOP


def test_a_base_alone_has_to_say_its_version(recipe: Recipe, files: Path) -> None:
    (files / "shared" / "base.yaml").write_text("train: {batch_size: 4}\n")
    done = recipe("upgrade", "shared/base.yaml")
    assert done.exit_code == 1
    assert "or upgrade the recipe that extends this file" in done.stderr


def test_a_default_is_pinned_where_its_section_is_given_and_once(recipe: Recipe, files: Path) -> None:
    serve = "serve: {accelerator: v6e-8, tensor_parallel_size: 8}\n"
    (files / "top.yaml").write_text(TOP + serve)
    assert recipe("upgrade", "--write", "top.yaml").exit_code == 0
    assert (files / "top.yaml").read_text() == NEW_TOP + serve.replace("}", ", max_num_seqs: 64}")
    assert (files / "shared" / "base.yaml").read_text() == NEW_BASE


def test_what_would_mean_another_thing_together_is_refused(recipe: Recipe, files: Path) -> None:
    base, top = files / "shared" / "base.yaml", files / "top.yaml"
    base.write_text(BASE + "tokens: {max_length: 512}\n")
    top.write_text(TOP.replace("tokens: {max_length: 2048}", "tokens: null"))
    done = recipe("upgrade", "--write", "top.yaml")
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith(
        "error[E1236]: upgraded one by one, the files give `data.max_length` another value than they have "
        "together\n"
    )
    assert "tokens: null" in top.read_text() and "tokens: {max_length: 512}" in base.read_text()


def test_the_loaded_values_are_those_of_before(
    recipe: Recipe, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By today's language: a step that moves nothing, and pins a default, changes no resolved value."""
    from spec import versions

    monkeypatch.setattr(versions, "VERSION", 1)
    (files / "shared" / "base.yaml").write_text(
        NEW_BASE.replace("recipe: 3", "recipe: 1").replace(", seed: 17", "")
    )
    (files / "top.yaml").write_text(NEW_TOP.replace("recipe: 3", "recipe: 1"))
    before = load(files / "top.yaml").recipe
    assert before is not None

    def pins(draft: Draft) -> None:
        draft.pin("train.seed", before.train.seed)
        draft.pin("data.shuffle_seed", before.data.shuffle_seed)
        draft.pin("train.optimizer.b1", before.train.optimizer.b1)

    monkeypatch.setattr(versions, "VERSION", 2)
    monkeypatch.setitem(STEPS, 1, pins)
    assert recipe("upgrade", "--write", "top.yaml").exit_code == 0
    after = load(files / "top.yaml").recipe
    assert after is not None
    assert after.model_dump(exclude={"recipe"}) == before.model_dump(exclude={"recipe"})
    assert "optimizer: {b1:" in (files / "shared" / "base.yaml").read_text()
