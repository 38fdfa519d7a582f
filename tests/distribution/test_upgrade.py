"""`recipe upgrade`, with steps that the tests bring."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from spec import versions
from spec.upgrade import STEPS

Recipe = Callable[..., Result]

OLD = """\
# yaml-language-server: $schema=recipe.schema.json
# A recipe of the first version.
recipe: 1   # keep me

name: example
model: {id: google/gemma-3-270m-it}
mesh: {accelerator: cpu-8, axes: {fsdp: 8}}
lora: {rank: 16}   # small

tokens:
  # The longest answer has 1,900.
  max_length: 2048   # tokens

data:
  train:
    - path: gs://bucket/a.jsonl
      share: 75        # the larger one
    - {path: "gs://bucket/b.jsonl", share: 25}

train:
  epochs: 1
  # Of the published run.
  batch_size: 16
  lr: 2.0e-4   # LoRA's
  fused: true  # faster
  optimizer: {name: adamw}
"""

NEW = """\
# yaml-language-server: $schema=recipe.schema.json
# A recipe of the first version.
recipe: 3   # keep me

name: example
model: {id: google/gemma-3-270m-it}
mesh: {accelerator: cpu-8, axes: {fsdp: 8}}
lora: {rank: 16}   # small

data:
  train:
    - path: gs://bucket/a.jsonl
      weight: 0.75        # the larger one
    - {path: "gs://bucket/b.jsonl", weight: 0.25}
  # The longest answer has 1,900.
  max_length: 2048   # tokens

train:
  epochs: 1
  # Of the published run.
  global_batch_size: 16
  # LoRA's
  optimizer: {name: adamw, learning_rate: 2.0e-4}
  seed: 17
  log:
    every: 25
"""

SHOWN = """\
--- a.yaml
+++ a.yaml\tversion 3 of the language
@@ -1,26 +1,26 @@
 # yaml-language-server: $schema=recipe.schema.json
 # A recipe of the first version.
-recipe: 1   # keep me
+recipe: 3   # keep me
 
 name: example
 model: {id: google/gemma-3-270m-it}
 mesh: {accelerator: cpu-8, axes: {fsdp: 8}}
 lora: {rank: 16}   # small
 
-tokens:
-  # The longest answer has 1,900.
-  max_length: 2048   # tokens
-
 data:
   train:
     - path: gs://bucket/a.jsonl
-      share: 75        # the larger one
-    - {path: "gs://bucket/b.jsonl", share: 25}
+      weight: 0.75        # the larger one
+    - {path: "gs://bucket/b.jsonl", weight: 0.25}
+  # The longest answer has 1,900.
+  max_length: 2048   # tokens
 
 train:
   epochs: 1
   # Of the published run.
-  batch_size: 16
-  lr: 2.0e-4   # LoRA's
-  fused: true  # faster
-  optimizer: {name: adamw}
+  global_batch_size: 16
+  # LoRA's
+  optimizer: {name: adamw, learning_rate: 2.0e-4}
+  seed: 17
+  log:
+    every: 25
"""


def test_the_steps_lead_from_the_first_version_to_the_one_that_is_read() -> None:
    assert sorted(STEPS) == list(range(1, versions.VERSION))


@pytest.mark.usefixtures("three_versions")
def test_it_shows_a_diff_and_writes_when_asked(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(OLD)
    shown = recipe("upgrade", "a.yaml")
    assert (shown.exit_code, shown.stdout) == (0, SHOWN)
    assert shown.stderr.splitlines()[0] == "note[N1237]: `train.fused` is left out: every step is"
    assert shown.stderr.splitlines()[1] == "  --> a.yaml:25:3", "the place is that of the old text"
    assert shown.stderr.endswith(
        "a.yaml: of version 1; version 3 is read\n1 file to upgrade: --write writes what is shown\n"
    )
    assert file.read_text() == OLD
    checked = recipe("upgrade", "--check", "a.yaml")
    assert (checked.exit_code, checked.stdout, file.read_text()) == (1, SHOWN, OLD)
    written = recipe("upgrade", "--write", "a.yaml")
    assert (written.exit_code, written.stdout) == (0, "a.yaml: version 1 -> 3\n")
    assert file.read_text() == NEW
    assert sorted(os.listdir(tmp_path)) == ["a.yaml"]
    again = recipe("upgrade", "--check", "a.yaml")
    assert (again.exit_code, again.stdout) == (0, "a.yaml: up to date (version 3 of the language)\n")
    assert recipe("check", "a.yaml").exit_code == 0, "what was written is the language of today"


@pytest.mark.usefixtures("three_versions")
def test_write_shows_the_diff_too_when_asked(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(OLD)
    done = recipe("upgrade", "--write", "--diff", "a.yaml")
    assert done.stdout == SHOWN + "a.yaml: version 1 -> 3\n"
    assert (tmp_path / "a.yaml").read_text() == NEW


@pytest.mark.usefixtures("three_versions")
def test_the_diff_is_one_that_patch_takes(recipe: Recipe, tmp_path: Path) -> None:
    git = shutil.which("git")
    assert git is not None
    (tmp_path / "a.yaml").write_text(OLD)
    (tmp_path / "upgrade.diff").write_text(recipe("upgrade", "a.yaml").stdout)
    subprocess.run([git, "apply", "-p0", "upgrade.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / "a.yaml").read_text() == NEW


def test_check_and_write_exclude_each_other(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(OLD)
    assert recipe("upgrade", "--check", "--write", "a.yaml").exit_code == 2


def test_the_recipes_of_today_are_up_to_date(recipe: Recipe, root: Path) -> None:
    files = sorted((root / "recipes").glob("*.yaml"))
    assert files
    before = {file: file.read_bytes() for file in files}
    done = recipe("upgrade", "--write", *files)
    assert done.exit_code == 0
    assert [
        line.endswith(": up to date (version 1 of the language)") for line in done.stdout.splitlines()
    ] == [True] * len(files)
    assert {file: file.read_bytes() for file in files} == before


@pytest.mark.usefixtures("three_versions")
def test_other_commands_lead_from_an_old_recipe_to_upgrade(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "a b.yaml").write_text(OLD)
    for command in ("check", "build", "explain"):
        done = recipe(command, "a b.yaml")
        assert done.exit_code == 1
        assert done.stderr == (
            "error[E1235]: this file is of version 1 of the language: this compiler reads version 3\n"
            " --> a b.yaml:3:9\n"
            "  |\n"
            "3 | recipe: 1   # keep me\n"
            "  |         ^\n"
            "  = help: recipe upgrade 'a b.yaml'\n"
            "\n"
            "1 error\n"
        )


NEWER = "recipe: 7\nname: later\nunheard_of: {key: 1}\n"


@pytest.mark.parametrize("command", [["check"], ["upgrade"], ["upgrade", "--check"], ["upgrade", "--write"]])
def test_a_newer_recipe_needs_a_newer_compiler(recipe: Recipe, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "a.yaml").write_text(NEWER)
    done = recipe(*command, "a.yaml")
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr == (
        "error[E0108]: this file is of version 7 of the language: this compiler reads version 1\n"
        " --> a.yaml:1:9\n"
        "  |\n"
        "1 | recipe: 7\n"
        "  |         ^\n"
        f"  = help: {versions.UPDATE}\n"
        "\n"
        "1 error\n"
    )
    assert (tmp_path / "a.yaml").read_text() == NEWER


@pytest.mark.parametrize(
    ("first", "code", "message"),
    [
        ("name: x", "E0102", "the recipe lacks the key `recipe`, which says the version"),
        ("recipe: one", "E0108", "`recipe` is no version of the language: these are 1 and up"),
        ("recipe: 1.0", "E0108", "`recipe` is no version"),
        ("recipe: 0", "E0108", "`recipe` is no version"),
        ("recipe: true", "E0108", "`recipe` is no version"),
        ("recipe: [1]", "E0108", "`recipe` is no version"),
        ("recipe:", "E0108", "`recipe` is no version"),
        ("recipe: 1\nrecipe: 1", "E0009", "given twice"),
        ("recipe: 1\n\tname: x", "E0007", ""),
        ("- recipe: 1", "E0013", "a recipe is a mapping"),
        ("recipe: &a 1", "E0010", "refused"),
        ("", "E0005", "empty"),
        ("recipe: 1\nextends: gone.yaml", "E0021", "gone.yaml does not exist"),
        ("recipe: 1\nextends: a.yaml", "E0022", "circle"),
    ],
)
def test_what_is_no_recipe_is_refused_and_left(
    recipe: Recipe, tmp_path: Path, first: str, code: str, message: str
) -> None:
    (tmp_path / "a.yaml").write_text(first)
    done = recipe("upgrade", "--write", "a.yaml")
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error[{code}]: ") and message in done.stderr
    assert (tmp_path / "a.yaml").read_text() == first


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_what_is_no_file_is_refused(recipe: Recipe, name: str) -> None:
    done = recipe("upgrade", name)
    assert done.exit_code == 1 and done.stderr.startswith("error[E000")


@pytest.mark.usefixtures("three_versions")
def test_what_cannot_be_kept_is_refused_all_at_once_and_nothing_is_written(
    recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "good.yaml").write_text(OLD)
    text = OLD.replace("fused: true  # faster", "scale: 2\n  global_batch_size: 8").replace(
        "share: 25", "share: x"
    )
    (tmp_path / "bad.yaml").write_text(text)
    done = recipe("upgrade", "--write", "good.yaml", "bad.yaml")
    assert done.exit_code == 1 and done.stdout == ""
    heads = [line for line in done.stderr.splitlines() if "[" in line and "]: " in line]
    assert heads == [
        "error[E1236]: `data.train[1].weight` cannot be taken over: a share is a whole number of per cent",
        "error[E1236]: `train.batch_size` is `train.global_batch_size` now, and that is given too",
        "error[E1236]: gradients are no longer scaled",
        "note[N1237]: `train.fused` is left out: every step is",
    ]
    assert [line for line in done.stderr.splitlines() if "-->" in line] == [
        "  --> bad.yaml:18:37",
        "  --> bad.yaml:23:3",
        "  --> bad.yaml:25:3",
        "  --> good.yaml:25:3",
    ]
    assert (tmp_path / "bad.yaml").read_text() == text
    assert (tmp_path / "good.yaml").read_text() == OLD


@pytest.mark.usefixtures("three_versions")
def test_modes_links_and_line_ends_are_kept(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "a.yaml"
    real.write_bytes(OLD.replace("\n", "\r\n").encode())
    real.chmod(0o640)
    (tmp_path / "a.yaml").symlink_to(real)
    assert recipe("upgrade", "--write", "a.yaml").exit_code == 0
    assert real.read_bytes() == NEW.replace("\n", "\r\n").encode()
    assert (tmp_path / "a.yaml").is_symlink() and real.stat().st_mode & 0o777 == 0o640


@pytest.mark.usefixtures("three_versions")
def test_a_file_that_changes_meanwhile_is_left(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compiler.errors import ArtifactError

    file = tmp_path / "a.yaml"
    file.write_text(OLD)

    def edited(draft: object) -> None:
        file.write_text(OLD + "# edited\n")

    monkeypatch.setitem(STEPS, 2, edited)
    with pytest.raises(ArtifactError, match=r"a\.yaml was changed meanwhile"):
        recipe("upgrade", "--write", "a.yaml")
    assert file.read_text() == OLD + "# edited\n"


@pytest.mark.usefixtures("three_versions")
def test_a_failed_write_leaves_every_file(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(OLD.replace("example", name))
    staged: list[object] = []

    def full(handle: int, *arguments: object, **options: object) -> object:
        staged.append(handle)
        if len(staged) > 1:
            raise OSError(28, "No space left on device")
        return real(handle, *arguments, **options)

    real = os.fdopen
    monkeypatch.setattr("os.fdopen", full)
    with pytest.raises(OSError, match="No space"):
        recipe("upgrade", "--write", "a.yaml", "b.yaml")
    assert sorted(os.listdir(tmp_path)) == ["a.yaml", "b.yaml"]
    assert (tmp_path / "a.yaml").read_text() == OLD.replace("example", "a")


@pytest.mark.usefixtures("three_versions")
def test_set_takes_the_words_of_the_version_that_is_read(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(NEW)
    assert recipe("check", "a.yaml", "--set", "train.global_batch_size=8").exit_code == 0
    done = recipe("check", "a.yaml", "--set", "recipe=1")
    assert done.exit_code == 1
    assert done.stderr.startswith(
        "error[E0108]: `recipe` is set to 1: this compiler reads version 3 of the language\n --> --set:1:8\n"
    )
    assert recipe("upgrade", "a.yaml", "--set", "train.seed=1").exit_code == 2


@pytest.mark.usefixtures("three_versions")
def test_colours_are_for_who_takes_them(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(OLD)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = recipe("upgrade", "a.yaml").stdout.splitlines()
    assert "\x1b[31m-recipe: 1   # keep me\x1b[0m" in lines
    assert "\x1b[32m+recipe: 3   # keep me\x1b[0m" in lines and " name: example" in lines


@pytest.mark.usefixtures("three_versions")
def test_quiet_leaves_the_diff(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(OLD)
    done = recipe("upgrade", "--quiet", "a.yaml")
    assert (done.exit_code, done.stdout, done.stderr) == (0, SHOWN, "")
    done = recipe("upgrade", "--quiet", "--write", "a.yaml")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
