"""Tests from a file to a recipe: `extends`, `--set`, origins, secrets, and unreadable files."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from recipec.spec.diagnostics import render_text
from recipec.spec.load import MAX_BYTES, Loaded, load

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4}}
data:
  train: [a.jsonl]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "recipe.yaml"


def codes(loaded: Loaded) -> list[str]:
    return [diagnostic.code for diagnostic in loaded.diagnostics]


def test_values_from_files_extends_and_set_have_their_origins(folder: Path) -> None:
    write(
        folder,
        recipe="extends: base.yaml\n" + RECIPE + "train:\n  seed: 3\n",
        base="extends: root.yaml\ntrain:\n  seed: 1\n  eval_every: 7\nlora: {targets: [q_proj]}\n",
        root="train: {seed: 0, eval_every: 1, global_batch_size: 16}\nlora: {targets: [k_proj], rank: 4}\n",
    )
    loaded = load(Path("recipe.yaml"), ["train.log.every=2", "lora.rank=8"])
    assert loaded.recipe is not None and not loaded.diagnostics
    train, lora = loaded.recipe.train, loaded.recipe.lora
    assert (train.seed, train.eval_every, train.global_batch_size, train.log.every) == (3, 7, 16, 2)
    assert lora is not None and (lora.rank, lora.targets) == (8, ["q_proj"])
    origins = {
        path: str(loaded.sources.origin(path))
        for path in (
            "train.seed",
            "train.eval_every",
            "train.global_batch_size",
            "train.log.every",
            "lora.rank",
        )
    }
    assert origins == {
        "train.seed": "recipe.yaml:9",
        "train.eval_every": "base.yaml:4",
        "train.global_batch_size": "root.yaml:1",
        "train.log.every": "--set train.log.every=2",
        "lora.rank": "--set lora.rank=8",
    }
    kinds = [
        loaded.sources.origin(p).kind for p in ("train.seed", "train.eval_every", "lora.rank", "lora.alpha")
    ]
    assert kinds == ["file", "extends", "set", "default"]
    source = loaded.sources.origin("data.train[0].path")
    assert (source.kind, source.line, source.column) == ("file", 7, 11)
    assert loaded.sources.origin("data.train[0].weight").kind == "default"


def test_spans_point_at_keys_and_values(folder: Path) -> None:
    write(folder, recipe=RECIPE + "serve:\n  env: {A: b}\n")
    sources = load(Path("recipe.yaml")).sources

    def place(path: str, key: bool = False) -> tuple[int, int, int]:
        span = sources.span(path, key)
        assert span is not None
        return span.line, span.column, span.length

    assert place("name") == (2, 7, 7)
    assert place("name", key=True) == (2, 1, 4)
    assert place("mesh.axes") == (4, 34, 9)
    assert place("mesh.axes.tp") == (4, 28, 4)
    assert place("data.train[0]") == (6, 11, 7)
    assert place("serve") == (7, 1, 5)
    assert place("serve.env.A") == (8, 12, 1)
    assert place("serve.port") == (7, 1, 5)
    assert place("train.optimizer.b1") == (1, 1, 0)
    assert place("nonsense[") == (1, 1, 0)


def test_extends_paths_are_relative_to_the_file_that_names_them(folder: Path) -> None:
    (folder / "bases" / "deep").mkdir(parents=True)
    (folder / "bases" / "one.yaml").write_text("extends: deep/two.yaml\n")
    (folder / "bases" / "deep" / "two.yaml").write_text("extends: ../../three.yaml\ntrain: {seed: 2}\n")
    write(folder, recipe="extends: bases/one.yaml\n" + RECIPE, three="train: {seed: 3, eval_every: 3}\n")
    loaded = load(folder / "recipe.yaml")
    assert loaded.recipe is not None
    assert (loaded.recipe.train.seed, loaded.recipe.train.eval_every) == (2, 3)
    assert loaded.sources.origin("train.seed").file == "bases/deep/two.yaml"


def test_cycle_of_extends_through_a_symlink_is_refused(folder: Path) -> None:
    write(folder, recipe="extends: link.yaml\n" + RECIPE)
    os.symlink("recipe.yaml", folder / "link.yaml")
    assert codes(load(Path("recipe.yaml"))) == ["E0022"]


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("mesh.axes={fsdp: 2, tp: 2}", "mesh.axes", {"fsdp": 2, "tp": 2}),
        ("mesh.axes.tp=1", "mesh.axes", {"fsdp": 4, "tp": 1}),
        ("train.optimizer.learning_rate=1e-3", "train.optimizer.learning_rate", 1e-3),
        ("data.train[0]=b.jsonl", "data.train[0].path", "b.jsonl"),
        ("data.train[0].weight=2", "data.train[0].weight", 2.0),
        ("data.train=[b.jsonl, {path: c.jsonl}]", "data.train[1].path", "c.jsonl"),
        ("serve={}", "serve.port", 8000),
        ('serve.env["A.B"]=c=d', "serve.env", {"A.B": "c=d"}),
        ("train.steps = 10", "train.steps", 10),
        ("model.revision=~", "model.revision", None),
    ],
)
def test_set_option_accepts_values_of_every_kind(
    folder: Path, argument: str, path: str, value: object
) -> None:
    write(folder, recipe=RECIPE)
    loaded = load(Path("recipe.yaml"), [argument])
    assert loaded.recipe is not None, render_text(loaded.diagnostics)
    found = eval(f"recipe.{path}", {"recipe": loaded.recipe})
    assert found == value and type(found) is type(value)


def test_last_set_option_wins(folder: Path) -> None:
    write(folder, recipe=RECIPE)
    recipe = load(Path("recipe.yaml"), ["train.seed=1", "train={seed: 2}", "train.eval_every=3"]).recipe
    assert recipe is not None and (recipe.train.seed, recipe.train.eval_every) == (2, 3)


@pytest.mark.parametrize(
    "argument", ["", "=", "a", "=b", "[0]=1", "train.=1", "train.seed=\n", "train.seed=[", "a=\0"]
)
def test_malformed_set_arguments_are_refused_with_a_position(folder: Path, argument: str) -> None:
    write(folder, recipe=RECIPE)
    loaded = load(Path("recipe.yaml"), [argument])
    assert loaded.recipe is None and loaded.diagnostics
    assert all(d.span is not None for d in loaded.diagnostics)


def test_unreadable_files_give_diagnostics(folder: Path) -> None:
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    (folder / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    found = {
        name: codes(load(Path(f"{name}.yaml"))) for name in ("none", "folder", "pipe", "large", "binary")
    }
    assert found == {
        "none": ["E0001"],
        "folder": ["E0002"],
        "pipe": ["E0002"],
        "large": ["E0003"],
        "binary": ["E0004"],
    }
    assert codes(load(Path("a\0b.yaml"))) in (["E0001"], ["E0002"])
    assert codes(load(Path("x" * 5000))) in (["E0001"], ["E0002"])


def test_file_of_the_maximum_size_is_read(folder: Path) -> None:
    write(folder, recipe=RECIPE + "#" * (MAX_BYTES - len(RECIPE)))
    assert load(Path("recipe.yaml")).recipe is not None


def test_missing_keys_are_not_reported_if_extends_fails(folder: Path) -> None:
    write(folder, recipe="extends: gone.yaml\nname: example\ntrain: {sed: 1}\n")
    assert codes(load(Path("recipe.yaml"))) == ["E0021", "E0101"]


def test_secrets_are_not_shown_in_diagnostics(folder: Path) -> None:
    token = "hf_" + "NotARealToken" * 3
    text = RECIPE + f"serve: {{env: {{HF_TOKEN: {token}, MY_PASSWORD: hunter2222}}, portt: 1}}\n"
    write(folder, recipe=text)
    loaded = load(Path("recipe.yaml"), [f"launch.kind={token}", f"name={token}"])
    shown = render_text(loaded.diagnostics) + str(
        [loaded.sources.span("serve.port"), loaded.sources.origin("serve.env")]
    )
    assert loaded.recipe is None
    assert token not in shown and "hunter2222" not in shown and "portt" in shown


def test_secrets_are_not_shown_when_the_yaml_is_malformed(folder: Path) -> None:
    token = "hf_" + "NotARealToken" * 3
    write(folder, recipe=RECIPE + f"serve: {{env: {{HF_TOKEN: {token}}}\n")
    shown = render_text(load(Path("recipe.yaml")).diagnostics)
    assert "E0006" in shown and token not in shown


def test_env_names_that_resemble_secrets_are_accepted(folder: Path) -> None:
    names = [
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "HF_TOKEN_PATH",
        "KEYBOARD",
        "SKIP_JAX_PRECOMPILE",
        "HF_HOME",
    ]
    write(folder, recipe=RECIPE + "serve: {env: {" + ", ".join(f"{name}: x" for name in names) + "}}\n")
    assert load(Path("recipe.yaml")).recipe is not None


@pytest.mark.parametrize("name", ["HF_TOKEN", "OPENAI_APIKEY", "db_password", "my-secret"])
def test_env_names_of_secrets_are_refused(folder: Path, name: str) -> None:
    write(folder, recipe=RECIPE + f"serve: {{env: {{{name}: x}}}}\n")
    assert codes(load(Path("recipe.yaml"))) == ["E0703"]


def test_valid_parts_of_a_faulty_recipe_are_loaded_tentatively(folder: Path) -> None:
    write(folder, recipe=RECIPE + "lora: {rnk: 8, dropout: 2}\ntrain: {epochs: 1, steps: 2}\nname: again\n")
    loaded = load(Path("recipe.yaml"))
    assert loaded.recipe is None and loaded.tentative is not None and loaded.tentative.lora is not None
    assert loaded.tentative.lora.rank == 8
    assert loaded.doubtful == {"lora.rnk", "lora.dropout", "train.steps"}
    write(folder, recipe=RECIPE.replace("fsdp: 4", "fsdp: four"))
    assert load(Path("recipe.yaml")).tentative is None


def test_randomly_damaged_recipes_raise_no_exception(folder: Path) -> None:
    whole = (
        RECIPE
        + "lora: {rank: 8, layers: 0-3}\ntrain:\n  optimizer: {name: adamw, b1: 0.9}\n  seed: 3\n"
        + "serve:\n  env:\n    A: b\n"
    )
    choose = random.Random(7)
    alphabet = " \n\t:{}[],#&*!|>'\"%@`-?.0aé~\\"
    for _ in range(150):
        text = list(whole)
        for _ in range(choose.randint(1, 4)):
            at = choose.randrange(len(text))
            text[at : at + choose.randint(0, 3)] = choose.choices(alphabet, k=choose.randint(0, 2))
        write(folder, recipe="".join(text))
        loaded = load(Path("recipe.yaml"))
        assert (loaded.recipe is None) == bool(loaded.diagnostics)
        shown = render_text(loaded.diagnostics)
        for wording in ("Input should", "Extra inputs", "of another kind", "validation error", "Traceback"):
            assert wording not in shown, shown
        assert all(d.span is not None and d.span.file == "recipe.yaml" for d in loaded.diagnostics)
