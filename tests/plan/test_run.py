"""Tests of a run's length: the same steps as train.py, the paper's figures, and missing data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

from recipec.compiler import store
from recipec.compiler.catalog import facts_of
from recipec.compiler.emitters.train import emit_train
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import run_length as counting
from recipec.compiler.lowering.at_hand import Unavailable
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import Statistics, quick_statistics, run_length, statistics
from recipec.compiler.miniature import small_checkpoint
from recipec.compiler.plan.run_hours import planned_length
from recipec.runtime.data.prepare import prepare
from recipec.runtime.data.row_counts import SplitReport
from recipec.runtime.data.samples import Samples
from recipec.runtime.data.tokenizer import load_tokenizer
from tests.plan.plans import ESTIMATE, lowered


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with the quickstart's tokenizer: its special tokens, and one token per byte."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_checkpoint, "VOCABULARY", len(facts_of("gemma4").tokens.special) + 256)
        small_checkpoint.write_tokenizer(folder, "gemma4")
    return folder


@pytest.fixture(autouse=True)
def _empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))


def kept() -> list[Path]:
    return list(store.folder().glob("*/*.json"))


@pytest.fixture
def quickstart(root: Path) -> Path:
    return root / "recipes" / "quickstart.yaml"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "recipe: 1\n"
        "name: example\n"
        "model: {id: google/gemma-4-31B-it}\n"
        "mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}\n"
        "lora: {rank: 8}\n"
        "data: {train: [train.jsonl], max_length: 128}\n"
        "train: {epochs: 1, global_batch_size: 4}\n"
    )
    return path


def conversations(path: Path, count: int) -> None:
    rows = (
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "so " * (1 + i % 13)}]
        for i in range(1, count + 1)
    )
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def trains(program: Program, model: Path) -> Any:
    """Prepare data as train.py does: runtime.data.prepare with the generated script's constants."""
    script: dict[str, Any] = {"__name__": "train", "__file__": str(program.source)}
    text = emit_train(program).replace("from runtime.", "from recipec.runtime.")
    exec(compile(text, "train.py", "exec"), script)
    data, train, folder = replace(script["DATA"], eval=()), script["TRAIN"], program.source.parent
    rows = train.micro_batch_size * script["MESH"].data_parallel
    return prepare(data, train, rows, load_tokenizer(model, script["MODEL"], data, folder), folder)


EPOCHS = ("train.steps=null", "train.epochs=2")


@pytest.mark.parametrize(
    "sets",
    [
        (),
        EPOCHS,
        (*EPOCHS, "data.packing=false"),
        (*EPOCHS, "data.packing=false", "train.global_batch_size=32", "train.micro_batch_size=4"),
        (*EPOCHS, "train.global_batch_size=20"),
        (
            *EPOCHS,
            "data.train=[{path: data/quickstart/train.jsonl, weight: 1.5}, data/quickstart/eval.jsonl]",
        ),
        (
            *EPOCHS,
            "data.train=[{path: data/quickstart/train.jsonl, limit: 90}, data/quickstart/eval.jsonl]",
            *("data.eval=[]", "data.eval_fraction=0.3", "data.eval_seed=1"),
        ),
    ],
    ids=["steps", "epochs", "padded", "accumulated", "odd batch", "weights", "held out"],
)
def test_planned_steps_equal_the_steps_of_train_py(
    quickstart: Path, model: Path, sets: tuple[str, ...]
) -> None:
    program = lowered(quickstart, *sets)
    counted = statistics(program, model)
    assert isinstance(counted, Statistics)
    prepared = trains(program, model)
    found = planned_length(program, ESTIMATE, counted)
    assert found.steps == prepared.total_steps
    assert found.micro_batches == prepared.accumulation
    report = prepared.report.train
    assert (counted.samples, counted.dropped) == (report.kept, report.read - report.kept)
    assert found.tokens_per_row == pytest.approx(report.row_tokens / report.rows)
    assert found.source == "data" and 0 < found.tokens_per_row <= 128


def test_preference_pair_counts_as_two_rows_of_tokens(quickstart: Path, model: Path, tmp_path: Path) -> None:
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No, not at all so."}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 21 + "nonsense\n")
    program = lowered(
        quickstart,
        *("data.train=[pairs.jsonl]", "data.eval=[]", "data.format=preference", "data.packing=false"),
        *("train.objective=orpo", "train.steps=null", "train.epochs=3", "data.loss_on=completion"),
    )
    counted = statistics(program, model, tmp_path)
    assert isinstance(counted, Statistics)
    assert (counted.samples, counted.dropped, counted.rows, counted.answers) == (21, 1, 21, 2)
    found = planned_length(program, ESTIMATE, counted)
    assert found.steps == 3 * 3
    # A micro-batch has fsdp 4 x 1 pair x 2 answers.
    assert found.tokens_per_second == pytest.approx(8 * found.tokens_per_row / ESTIMATE.seconds)
    assert "21 pairs, 1 row left out; 21 rows of two answers an epoch" in found.note


def test_paper_run_has_the_published_steps_hours_and_rate(
    root: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan 9,952 samples of 922 tokens at 1.21 s a step: 1,244 steps, 3.34 hours, 763 tokens/s."""
    lengths = np.tile([422, 922, 1422, 922], 9952 // 4)
    tokens = np.zeros(lengths.sum(), np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    origins = np.full(len(lengths), b"a:1")
    samples = Samples(tokens, tokens == 0, offsets, np.zeros(len(lengths), np.int32), origins)
    report = SplitReport(read=10_000, kept=9_952, tokens=len(tokens), row_length=3072)
    monkeypatch.setattr("recipec.runtime.data.prepare.read_split", lambda *given: (samples, report))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    program = lowered(root / "recipes" / "gemma4-31b-paper.yaml")

    counted = statistics(program, model, tmp_path)
    assert counted == Statistics(samples=9_952, dropped=48, rows=9_952, answers=1, tokens=922 * 9_952)
    found = planned_length(program, replace(ESTIMATE, seconds=1.21), counted)
    assert (found.steps, found.micro_batches, found.tokens_per_row) == (1_244, 8, 922)
    assert found.hours == pytest.approx(3.34, abs=0.006) and found.interval == ESTIMATE.interval
    assert found.usd == pytest.approx(56.11, abs=0.1) and found.usd_per_hour == pytest.approx(16.80)
    assert found.tokens_per_second == pytest.approx(763, abs=2)
    assert found.usd_per_million_tokens == pytest.approx(found.usd / (922 * 9_952) * 1e6)
    assert found.note == (
        "Counted in the data: 9,952 samples, 48 rows left out; 9,952 rows an epoch, with 922 of 3,072 tokens "
        "on average (30.0 % full). Evaluation, checkpoints, start-up and compilation are not counted."
    )


def test_missing_data_and_tokenizers_are_named(recipe_file: Path, model: Path, tmp_path: Path) -> None:
    program = lowered(recipe_file)
    assert statistics(program, model) == Unavailable("there is no train.jsonl next to the recipe")
    conversations(tmp_path / "train.jsonl", 30)
    assert statistics(program) == Unavailable(
        "the tokenizer of google/gemma-4-31B-it is not on this machine (--model DIR names a folder with one)"
    )
    hub = lowered(recipe_file, "data.train=[hf://owner/name]")
    assert statistics(hub, model) == Unavailable("the data hf://owner/name is not on this machine")
    other = lowered(recipe_file, "model.tokenizer=owner/name")
    missing = statistics(other, model)
    assert isinstance(missing, Unavailable) and "the tokenizer of owner/name" in missing.reason


def test_tokenizer_is_found_in_the_hub_cache(recipe_file: Path, model: Path, tmp_path: Path) -> None:
    conversations(tmp_path / "train.jsonl", 30)
    for name in ("google--gemma-4-31B-it", "owner--name"):
        repository = tmp_path / "hub" / f"models--{name}"
        (repository / "snapshots").mkdir(parents=True)
        (repository / "snapshots" / "abc").symlink_to(model)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
    given = statistics(lowered(recipe_file), model)
    assert isinstance(given, Statistics) and given.samples == 30
    assert statistics(lowered(recipe_file)) == given
    assert statistics(lowered(recipe_file, "model.tokenizer=owner/name")) == given


def test_missing_folder_or_data_named_by_the_user_is_an_error(
    recipe_file: Path, model: Path, tmp_path: Path
) -> None:
    program = lowered(recipe_file)
    with pytest.raises(ArtifactError, match="nowhere: no such folder"):
        statistics(program, model, tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"there is no .*train\.jsonl"):
        statistics(program, model, tmp_path)
    conversations(tmp_path / "train.jsonl", 3)
    with pytest.raises(ArtifactError, match="elsewhere: no such folder"):
        statistics(program, tmp_path / "elsewhere")


def test_data_that_train_py_refuses_is_an_error(recipe_file: Path, model: Path, tmp_path: Path) -> None:
    conversations(tmp_path / "train.jsonl", 3)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(ArtifactError, match=r"1 of 4 rows of data\.train cannot be used") as error:
        statistics(lowered(recipe_file), model)
    assert error.value.help and not kept()


def test_data_statistics_are_cached_by_data_content(
    recipe_file: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations(tmp_path / "train.jsonl", 30)
    program = lowered(recipe_file)
    first = statistics(program, model)
    calls = []
    count = counting._count
    monkeypatch.setattr(counting, "_count", lambda found, load: calls.append(found) or count(found, load))
    batches = lowered(
        recipe_file, "train.epochs=3", "train.global_batch_size=8", "mesh.axes={fsdp: 2, tp: 2}"
    )
    assert statistics(batches, model) == first and not calls

    assert statistics(lowered(recipe_file, "data.packing=false"), model) != first
    conversations(tmp_path / "train.jsonl", 31)
    assert statistics(program, model) != first
    assert len(calls) == 2 and len(kept()) == 3

    for file in kept():
        file.write_text("{")
    again = statistics(program, model)
    assert isinstance(again, Statistics) and again.samples == 31 and len(calls) == 3


def test_run_length_without_data_uses_the_recipe_steps(recipe_file: Path) -> None:
    program = lowered(recipe_file, "train.epochs=null", "train.steps=90", "train.global_batch_size=16")
    found = planned_length(program, ESTIMATE, Unavailable("there is no train.jsonl next to the recipe"))
    assert (found.source, found.steps, found.micro_batches, found.tokens_per_row) == ("steps", 90, 4, 128)
    assert found.hours == pytest.approx(90 * 4 * ESTIMATE.seconds / 3600)
    assert found.tokens_per_second == pytest.approx(4 * 128 / ESTIMATE.seconds)
    assert found.note == (
        "The steps are the recipe's, and there is no train.jsonl next to the recipe: tokens/s counts every "
        "row as full (128 tokens), which is an upper bound. Evaluation, checkpoints, start-up and "
        "compilation are not counted."
    )


FORMATS = {
    "chat": {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so " * 9}]},
    "instruction": {"instruction": "Say why.", "input": "the sky", "output": "because"},
    "prompt_completion": {"prompt": "one, two, ", "completion": "three"},
    "text": {"text": "one, two, three"},
    "preference": {"prompt": "why?", "chosen": "because", "rejected": "no"},
}


@pytest.mark.parametrize("format", FORMATS)
def test_quick_statistics_give_the_same_steps_as_training(
    recipe_file: Path, tmp_path: Path, model: Path, format: str
) -> None:
    """Count without transformers: the planned steps equal those that training takes."""
    (tmp_path / "train.jsonl").write_text((json.dumps(FORMATS[format]) + "\n") * 30)
    sets = [f"data.format={format}", f"data.packing={'false' if format == 'preference' else 'true'}"]
    sets += ["train.objective=dpo"] if format == "preference" else []
    (tmp_path / "tokenizer").symlink_to(model)
    program = lowered(recipe_file, *sets, "model.tokenizer=./tokenizer")
    quick = quick_statistics(program)
    assert isinstance(quick, Statistics) and quick == statistics(program)
    length = run_length(program.recipe, tmp_path)
    assert length.exact and length.steps == trains(program, model).total_steps
    assert length.data is not None
    assert length.data.tokens[0] == length.data.tokens[1] == quick.tokens / quick.samples / quick.answers


def test_run_length_without_a_tokenizer_is_an_upper_bound(recipe_file: Path, tmp_path: Path) -> None:
    assert planned_length(lowered(recipe_file), ESTIMATE).source == "unknown"
    conversations(tmp_path / "train.jsonl", 30)
    found = planned_length(
        lowered(recipe_file), ESTIMATE, Unavailable("its tokenizer is not on this machine")
    )
    assert (found.source, found.steps) == ("bound", 8)
    assert found.hours == pytest.approx(8 * ESTIMATE.seconds / 3600) and found.usd is not None
    assert found.note.startswith(
        "At most 8 steps, by the lines of its data, since its tokenizer is not on this machine; "
    )
    assert "the data was not read" in planned_length(lowered(recipe_file), ESTIMATE).note


def test_run_price_comes_from_the_recipe_or_is_unknown(recipe_file: Path) -> None:
    steps = ("train.epochs=null", "train.steps=100")
    own = planned_length(lowered(recipe_file, *steps, "cost.train_usd_per_hour=10"), ESTIMATE)
    assert own.usd_per_hour == 10 and own.usd == pytest.approx(10 * 100 * ESTIMATE.seconds / 3600)
    free = planned_length(lowered(recipe_file, *steps, "cost.train_usd_per_hour=0"), ESTIMATE)
    assert (free.usd, free.usd_per_million_tokens) == (0, 0)
    ironwood = ("mesh.accelerator=tpu7x-8", "mesh.axes={fsdp: 8, tp: 1}", "train.global_batch_size=8")
    without = planned_length(lowered(recipe_file, *steps, *ironwood), ESTIMATE)
    assert (without.usd, without.usd_per_hour, without.usd_per_million_tokens) == (None, None, None)
    assert without.hours == pytest.approx(100 * ESTIMATE.seconds / 3600)


def test_refused_step_has_no_hours_and_no_cost(recipe_file: Path) -> None:
    refused = replace(ESTIMATE, seconds=0.0)
    found = planned_length(lowered(recipe_file, "train.epochs=null", "train.steps=100"), refused)
    assert (found.steps, found.hours, found.usd, found.tokens_per_second) == (100, None, None, 0)
    assert found.usd_per_million_tokens is None
