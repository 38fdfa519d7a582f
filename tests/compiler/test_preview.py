"""Tests of `recipe preview`: what it shows, what it refuses, and what it does not need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.catalog import facts_of
from recipec.compiler.explain import preview
from recipec.compiler.miniature import small_checkpoint
from tests.compiler import added_models
from tests.compiler.commands import command, recipe

GOLDEN = Path(__file__).parent / "preview.txt"


@pytest.fixture(scope="module")
def quickstart(root: Path) -> Path:
    return root / "recipes" / "quickstart.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with only the quickstart's tokenizer: special tokens, and one token per byte.

    Learned merges would not be reproducible, because the order of equally frequent pairs varies.
    """
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_checkpoint, "VOCABULARY", len(facts_of("gemma4").tokens.special) + 256)
        small_checkpoint.write_tokenizer(folder, "gemma4")
    return folder


def test_quickstart_preview_matches_preview_txt(quickstart: Path, model: Path, update: bool) -> None:
    status, printed, errors = recipe("preview", quickstart, "-n", "2", "--model", model)
    assert (status, errors) == (0, "")
    if update:
        GOLDEN.write_text(printed, encoding="utf-8")
    assert printed == GOLDEN.read_text(encoding="utf-8")


def test_json_preview_contains_samples_lengths_and_report(quickstart: Path, model: Path) -> None:
    status, printed, _ = recipe(
        "preview", quickstart, "-n", "1", "--split", "eval", "--model", model, "--format", "json"
    )
    shown = json.loads(printed)
    assert status == 0 and shown["split"] == "eval" and shown["steps_per_epoch"] == 0
    (sample,) = shown["samples"]
    assert [piece["text"] for piece in sample["pieces"] if piece["target"]] == ["Pink.<turn|>"]
    assert sample["origin"] == "data/quickstart/eval.jsonl:1"
    assert sum(bar["count"] for bar in shown["lengths"]) == shown["report"]["kept"] > 20
    assert shown["report"]["efficiency"] == pytest.approx(
        shown["report"]["tokens"] / shown["report"]["rows"] / 128, abs=1e-4
    )


def test_preview_counts_the_same_steps_and_rows_as_training(quickstart: Path, model: Path) -> None:
    from recipec.compiler.lower import lower
    from recipec.compiler.lowering.runtime_settings import data_settings
    from recipec.runtime.data.prepare import prepare
    from recipec.runtime.data.tokenizer import load_tokenizer
    from recipec.runtime.settings import ModelSettings, TrainSettings
    from recipec.spec.load import load

    program = lower(load(quickstart)).program
    assert program is not None
    made = preview.preview(program, 0, "train", model)
    data = data_settings(program.recipe, program.source.parent)
    tokenizer = load_tokenizer(model, ModelSettings(id="x", family="gemma4"), data)
    train = TrainSettings(epochs=1, global_batch_size=8, micro_batch_size=1)
    run = prepare(data, train, 4, tokenizer, quickstart.parent)
    assert made.report.to_dict() == run.report.train.to_dict()
    assert made.steps_per_epoch == run.steps_per_epoch and made.shown == []


def test_eval_fraction_splits_the_rows_between_train_and_eval(quickstart: Path, model: Path) -> None:
    shown = {}
    for split in ("train", "eval"):
        status, printed, errors = recipe(
            *("preview", quickstart, "-n", "400", "--split", split, "--model", model, "--format", "json"),
            *("--set", "data.eval=[]", "--set", "data.eval_fraction=0.2", "--set", "data.train[0].limit=31"),
        )
        assert status == 0, errors
        found = json.loads(printed)
        shown[split] = [sample["origin"] for sample in found["samples"]]
        assert found["report"]["read"] == len(shown[split])
    assert (len(shown["train"]), len(shown["eval"])) == (24, 7)
    names = {f"data/quickstart/train.jsonl:{i}" for i in range(1, 32)}
    assert {*shown["train"], *shown["eval"]} == names
    status, _, errors = recipe(
        "preview", quickstart, "--split", "eval", "--model", model, "--set", "data.eval=[]"
    )
    assert status == 1 and "or give data.eval_fraction" in errors


def test_preview_needs_neither_jax_nor_torch(quickstart: Path, model: Path, tmp_path: Path) -> None:
    for name in ("jax", "grain", "tunix", "flax"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    # PyTorch is not needed either, and no message says that it is missing.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    result = command("preview", quickstart, "-n", "1", "--model", model, PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert "⟦Run: cat notes.txt<turn|>⟧" in result.stdout


def test_preview_uses_the_tokenizer_of_an_added_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    rows(tmp_path / "train.jsonl", turn("Hello", "Hi"))
    files = added_models.checkpoint(tmp_path / "model")
    added_models.add(tmp_path, files, added_models.tensors_of(tmp_path / "model"))
    (tmp_path / "recipe.yaml").write_text(
        f"recipe: 1\nname: x\nmodel: {{id: {added_models.ID}}}\nlora: {{rank: 8}}\n"
        "mesh: {accelerator: cpu-1, axes: {fsdp: 1, tp: 1}}\ndata: {train: [train.jsonl]}\n"
    )
    status, printed, errors = recipe("preview", tmp_path / "recipe.yaml")
    assert status == 0 and "⟦Hi<|im_end|>⟧" in printed, errors


def rows(path: Path, *messages: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in messages))
    return path


def turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_dropped_rows_are_listed_and_too_many_are_an_error(
    quickstart: Path, model: Path, tmp_path: Path
) -> None:
    rows(tmp_path / "train.jsonl", turn("Hello", "Hi"), turn("Why?", "So. " * 200))
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("nonsense\n")
    given = ("--data-dir", tmp_path, "--set", "data.train=[train.jsonl]", "--model", model)
    status, printed, errors = recipe("preview", quickstart, *given)
    assert status == 1
    assert "train.jsonl:1" in printed and "⟦Hi<turn|>⟧" in printed
    assert "train.jsonl:2: too long: " in printed and "train.jsonl:3: malformed: not JSON" in printed
    assert "1 of 3 rows of data.train cannot be used" in errors
    assert recipe("preview", quickstart, *given, "--set", "data.max_invalid_ratio=0.5")[0] == 0


def test_shared_rows_and_undrawn_sources_are_said(tmp_path: Path, quickstart: Path, model: Path) -> None:
    chats = [turn(f"Question {number}?", "Yes.") for number in range(8)]
    rows(tmp_path / "a.jsonl", *chats)
    rows(tmp_path / "b.jsonl", *chats[5:], turn("Other?", "No."))
    rows(tmp_path / "c.jsonl", *(turn(f"More {number}?", "No.") for number in range(3)))
    sets = [
        "data.train=[a.jsonl, {path: c.jsonl, weight: 0.1}]",
        "data.eval=[b.jsonl]",
        "checkpoint.keep_best=true",
    ]
    options = [part for one in sets for part in ("--set", one)]
    options += ["--model", model, "--data-dir", tmp_path, "-n", "0"]
    status, printed, errors = recipe("preview", quickstart, *options)
    assert status == 0, errors
    assert (
        "data.train[1], c.jsonl, is never drawn: 0.1 of its 3 samples is 0.3, which rounds to none" in printed
    )
    shared = "warning: 3 of the 4 evaluation samples are also trained on: their loss says nothing about new "
    shared += "samples, and checkpoint.keep_best would choose the step that knows them best\n"
    assert shared in printed
    status, printed, _ = recipe("preview", quickstart, *options, "--split", "eval", "--format", "json")
    assert (status, json.loads(printed)["notes"]) == (0, [shared.rstrip()])


def test_preview_of_preferences_shows_chosen_and_rejected(
    quickstart: Path, model: Path, tmp_path: Path
) -> None:
    row = {"prompt": turn("Hello", "x")[:1], "chosen": turn("", "Hi")[1:], "rejected": turn("", "What?")[1:]}
    (tmp_path / "train.jsonl").write_text(5 * (json.dumps(row) + "\n"))
    given = [
        "data.train=[train.jsonl]",
        "data.format=preference",
        "data.packing=false",
        "train.objective=dpo",
    ]
    given += ["data.eval=[]", "data.loss_on=completion"]
    sets = [word for item in given for word in ("--set", item)]
    status, printed, errors = recipe("preview", quickstart, "--data-dir", tmp_path, "--model", model, *sets)
    assert status == 0, errors
    assert "steps: 1 an epoch" in printed  # of 8 pairs
    assert "train.jsonl:1 chosen" in printed and "⟦Hi<turn|>\n⟧" in printed and "⟦What?<turn|>\n⟧" in printed


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--model", "nowhere"), 1, "nowhere: no such folder"),
        (("--set", "data.train=[none.jsonl]"), 1, "none.jsonl"),
        (("--set", "data.eval=[]", "--split", "eval"), 1, "quickstart has no data.eval"),
        (("--set", "data.loss_on=completion"), 1, "loss_on completion does not exist"),
    ],
)
def test_preview_errors_are_messages_without_traceback(
    quickstart: Path, model: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    given: tuple[Any, ...] = arguments
    if "--model" not in arguments:
        given = (*arguments, "--model", model)
    found, _, errors = recipe("preview", quickstart, *given)
    assert found == status and said in re.sub(r"\s*│?\n│?\s*", " ", errors)
    assert "Traceback" not in errors


def test_new_tokens_need_only_the_files_of_a_tokenizer(tmp_path: Path, quickstart: Path, model: Path) -> None:
    written = quickstart.read_text().replace(
        "dtype: float32 ", "add_tokens: {<|done|>: null}\n  dtype: float32 "
    )
    (tmp_path / "tokens.yaml").write_text(written)
    status, printed, errors = recipe(
        *("preview", tmp_path / "tokens.yaml", "-n", "1", "--model", model, "--data-dir", quickstart.parent)
    )
    assert status == 0 and "samples kept" in printed, errors
