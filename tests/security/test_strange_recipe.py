"""Tests of a stranger's recipe: only what docs/security.md lists of its files is read or run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import datasets
import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import reading
from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.runtime.clients.evaluate_prompts import parse
from recipec.runtime.data.sources import count, records
from recipec.runtime.data.token_cache import key
from recipec.runtime.data.tokenizer import chat_template
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, Source
from recipec.runtime.untrusted import INTO_A_FILE
from recipec.spec.load import MOST_EXTENDED, load
from recipec.spec.yaml_document import MOST_FAULTS

RECIPE = """\
recipe: 1
name: example
model: {id: meta-llama/Llama-3.2-1B-Instruct}
mesh: {accelerator: v5e-8, axes: {fsdp: 8}}
lora: {rank: 8}
data: {train: [train.jsonl]}
train: {steps: 10}
"""

ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'

SECRET = "the-neighbors-password"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder with a recipe, next to files that the command must not change."""
    (folder := tmp_path / "work").mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "train.jsonl").write_text(ROW)
    (private := tmp_path / "private").mkdir()
    (private / "host.sh").write_text(SECRET)
    (private / "settings.yaml").write_text(f"{SECRET}: [\n")
    monkeypatch.chdir(folder)
    yield folder
    assert sorted(path.name for path in private.iterdir()) == ["host.sh", "settings.yaml"]
    assert (private / "host.sh").read_text() == SECRET


@dataclass(frozen=True)
class Said:
    """A command's exit status, and all of its output."""

    status: int
    text: str


def recipe(*arguments: str) -> Said:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, ArtifactError | SystemExit):
        raise result.exception
    return Said(result.exit_code, f"{result.output}{result.stderr}{result.exception or ''}")


@pytest.mark.parametrize("name", ["../private/host.sh", ".hidden/base.yaml", "base.yaml", "/etc/passwd"])
def test_forbidden_extends_is_refused_without_showing_the_file(name: str, place: Path) -> None:
    """Show no line of a file either that a link with a harmless name leads to."""
    (place / ".hidden").mkdir()
    (place / ".hidden/base.yaml").write_text(f"{SECRET}: [\n")
    (place / "base.yaml").symlink_to("../private/host.sh")
    (place / "recipe.yaml").write_text(f"extends: {name}\n{RECIPE}")
    for command in ("check", "build"):
        found = recipe(command, "recipe.yaml")
        assert found.status == 1 and "E0020" in found.text
        assert SECRET not in found.text and "root:" not in found.text


def test_too_long_chain_of_extends_is_refused(place: Path) -> None:
    for number in range(MOST_EXTENDED + 2):
        (place / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    (place / "recipe.yaml").write_text(f"extends: 0.yaml\n{RECIPE}")
    assert "E0022" in recipe("check", "recipe.yaml").text


def test_number_of_diagnostics_is_limited(place: Path) -> None:
    """Limit the diagnostics.

    Each stores its line, which is the whole file here.
    """
    (place / "recipe.yaml").write_text(f"name: [{'&a 1,' * 3_000}]\n")
    started = time.process_time()
    assert len(load(place / "recipe.yaml").diagnostics) == MOST_FAULTS + 1
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    "line",
    ['lora: {targets: ["([a-z0-9_.]+)+!"]}', 'sharding: {rules: [{match: "([a-z0-9_.]+)+!", spec: [null]}]}'],
)
def test_regex_in_a_recipe_with_endless_backtracking_is_a_diagnostic(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHECK_SECONDS", 0.2)
    (place / "recipe.yaml").write_text(RECIPE.replace("lora: {rank: 8}", line))
    for command in ("check", "build"):
        found = recipe(command, "recipe.yaml")
        assert found.status == 1 and "E0042" in found.text


TRANSFORM = "from pathlib import Path\nPath('CANARY').touch()\n\ndef clean(row):\n    return row\n"


def test_commands_that_read_a_recipe_do_not_run_its_transform(place: Path) -> None:
    (place / "prepare.py").write_text(TRANSFORM)
    (place / "recipe.yaml").write_text(
        RECIPE.replace("[train.jsonl]", "[train.jsonl], transform: prepare.py:clean")
    )
    for line in (
        *("check recipe.yaml", "explain recipe.yaml", "build recipe.yaml", "build recipe.yaml --check"),
        *(
            "pack example --recipe recipe.yaml",
            "diff recipe.yaml recipe.yaml",
            "cost recipe.yaml --train-hours 1",
        ),
    ):
        assert recipe(*line.split()).status == 0, line
        assert not any(place.rglob("CANARY")), line


def test_build_refuses_links_to_files_outside_the_folder(place: Path) -> None:
    (place / "chat.jinja").symlink_to("../private/host.sh")
    (place / "prompts.jsonl").symlink_to("../private/host.sh")
    (place / "inside").symlink_to("../private")
    for keys in (
        "data.chat_template=chat.jinja",
        "evaluate.prompts=prompts.jsonl",
        "data.chat_template=inside/host.sh",
    ):
        found = recipe("build", "recipe.yaml", "--set", keys)
        assert found.status == 1 and "E0708" in found.text and SECRET not in found.text
    assert not (place / "generated").exists()


def built(place: Path) -> Path:
    assert recipe("build", "recipe.yaml").status == 0
    return place / "generated/example"


def test_build_does_not_write_through_links(place: Path) -> None:
    launch = built(place) / "launch"
    shutil.rmtree(launch)
    launch.symlink_to("../../../private")
    found = recipe("build", "recipe.yaml")
    assert found.status == 1 and "launch is a link to another folder" in found.text
    launch.unlink()
    # The command replaces a link, and not its target.
    (launch.parent / "train.py").unlink()
    (launch.parent / "train.py").symlink_to("../../../private/host.sh")
    assert recipe("build", "recipe.yaml").status == 0
    assert not (launch.parent / "train.py").is_symlink()


def test_build_does_not_remove_files_behind_a_link(place: Path) -> None:
    folder = built(place)
    (folder / "old").symlink_to("../../../private")
    lock = (folder / "recipe.lock.json").read_text()
    (folder / "recipe.lock.json").write_text(lock.replace('"files": {', '"files": {"old/host.sh": "00", '))
    assert recipe("build", "recipe.yaml").status == 0
    assert (folder / "old").is_symlink()


@pytest.mark.parametrize("name", ["train.py", "recipe.lock.json"])
def test_build_check_does_not_show_the_content_behind_a_link(name: str, place: Path) -> None:
    file = built(place) / name
    file.unlink()
    file.symlink_to(os.path.relpath(place.parent / "private/host.sh", file.parent))
    found = recipe("build", "recipe.yaml", "--check")
    assert found.status == 1 and SECRET not in found.text


def test_pack_refuses_data_behind_a_link(place: Path) -> None:
    built(place)
    (place / "train.jsonl").unlink()
    (place / "train.jsonl").symlink_to("../private/host.sh")
    found = recipe("pack", "example", "--recipe", "recipe.yaml")
    assert found.status == 1 and "is outside of" in found.text and not (place / "example.tar.gz").exists()


def test_pack_refuses_outside_data_paths_of_a_lock(place: Path) -> None:
    """Take no path from a lock.

    In an artifact without its recipe, only its own lock says where its data is.
    """
    folder = built(place)
    lock = (folder / "recipe.lock.json").read_text()
    (folder / "recipe.lock.json").write_text(
        lock.replace('"path": "train.jsonl"', '"path": "../../../private/host.sh"')
    )
    (place / "recipe.yaml").unlink()
    found = recipe("pack", "example")
    assert found.status == 1 and "is outside of" in found.text and not (place / "example.tar.gz").exists()


def test_pack_refuses_code_in_a_data_folder(place: Path) -> None:
    (place / "jax").mkdir()
    (place / "jax/data.jsonl").write_text(ROW)
    (place / "jax/__init__.py").write_text("")
    (place / "recipe.yaml").write_text(RECIPE.replace("[train.jsonl]", "[jax]"))
    built(place)
    found = recipe("pack", "example", "--recipe", "recipe.yaml")
    assert found.status == 1 and "is code, which would be next to train.py" in found.text


@pytest.mark.parametrize(
    ("secret", "format"), [("api_key: [SECRET]", "text"), ("hf-token: {value: SECRET}", "json")]
)
def test_secret_in_a_nested_flag_value_is_not_shown(secret: str, format: str, place: Path) -> None:
    line = f"serve: {{extra_args: {{{secret.replace('SECRET', SECRET)}}}}}\n"
    (place / "recipe.yaml").write_text(RECIPE + line)
    found = recipe("check", "recipe.yaml", "--format", format)
    assert found.status == 1 and SECRET not in found.text


ENDLESS = ("pipe", "device")
"""A pipe that nobody writes to, and a link to an endless device."""


def make_endless(kind: str, file: Path) -> Path:
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    return file


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize(
    "name, line, code",
    [
        ("train.jsonl", "", "E0425"),
        ("eval.jsonl", "data: {train: [train.jsonl], eval: [eval.jsonl]}", "E0425"),
        ("chat.jinja", "data: {train: [train.jsonl], chat_template: chat.jinja}", "E0402"),
        ("rows.py", "data: {train: [train.jsonl], transform: rows.py:keep}", "E0416"),
        ("prompts.jsonl", "evaluate: {prompts: prompts.jsonl}", "E0650"),
    ],
)
def test_check_refuses_pipes_and_devices_as_files(
    kind: str, name: str, line: str, code: str, place: Path
) -> None:
    make_endless(kind, place / name)
    kept = [old for old in RECIPE.splitlines() if not line.startswith(old.partition(":")[0])]
    (place / "recipe.yaml").write_text("\n".join([*kept, line, ""]))
    said = recipe("check", "recipe.yaml")
    leads_out = kind == "device" and code in ("E0402", "E0416", "E0650")
    assert said.status == 1 and f"[{'E0708' if leads_out else code}]" in said.text, said.text
    assert leads_out or "regular file" in said.text, said.text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.csv.gz", "rows.parquet", "rows.arrow", "rows.array_record"]
)
def test_training_refuses_pipes_and_devices_as_files(kind: str, name: str, tmp_path: Path) -> None:
    make_endless(kind, tmp_path / name)
    folder = tmp_path / "saved"
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(folder)
    assert len(list(records(Source("saved"), tmp_path))) == 1
    make_endless(kind, next(folder.glob("*.arrow")))
    data, no_coding = (
        DataSettings(train=(name,), max_length=8, chat_template=name, packing=False),
        cast(Any, None),
    )
    assert "not a regular file" in key([name], data, no_coding, tmp_path)[1]
    readers: tuple[Callable[..., Any], ...] = (lambda *source: list(records(*source)), count)
    for read in readers:
        for source in (name, "saved"):
            with pytest.raises(UserError, match="not a regular file") as caught:
                read(Source(source), tmp_path)
            assert caught.value.help == INTO_A_FILE
    with pytest.raises(UserError, match="not a regular file"):
        chat_template(None, data, tmp_path)
    _, faults = parse(tmp_path / name)
    assert ["not a regular file" in fault.message for fault in faults] == [True]
