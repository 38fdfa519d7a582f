"""Tests of `recipe new`: what it writes for every model, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from recipec.compiler import catalog
from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.lowering.first_rows import MOST
from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.lowering.recorded import to_record
from recipec.compiler.lowering.run_length import ENOUGH_STEPS, run_length
from recipec.compiler.lowering.runtime_settings import run_settings
from recipec.compiler.new import written_files
from recipec.compiler.new.data_source import NewData, look, recognize
from recipec.compiler.new.new_recipe import Made, NewRecipeOptions, make
from recipec.spec.load import load
from recipec.spec.recipe_text import to_yaml
from tests.runtime.chats import chat

ACCELERATORS = ("v5e-8", "v5p-8", "v6e-8", "tpu7x-8", "cpu-8")
GOLDEN = Path(__file__).parent / "golden"
MODELS = [name for name, entry in catalog.entries().items() if "unsupported" not in entry]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def new(*words: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["new", *words])
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result


def made(model: str, accelerator: str, method: str | None = None, serve: str | None = None) -> Made:
    chat = catalog.find(model, Path()).chat
    judged = {"dpo": "preference", "kto": "unpaired_preference"}
    format = judged.get(str(method), "text" if chat is False else "chat")
    asked = NewRecipeOptions(
        "sample",
        model,
        from_name(accelerator),
        method,
        NewData("data/train.jsonl", format),
        from_name(serve) if serve else None,
        Path("recipes/sample.yaml"),
    )
    return make(asked)


def checked(text: str) -> None:
    """Check that the text passes every check without a warning, except for missing data."""
    lowered = lower(load(Path("recipes/sample.yaml"), text=text))
    worse = [d for d in lowered.diagnostics if d.severity != "note" and d.code != "W0401"]
    assert lowered.program is not None and not worse, worse


def test_models_of_all_kinds_get_a_recipe_that_passes_checks() -> None:
    """Try the smallest model of every third family. e2e tries all models."""
    first_last = {catalog.entries()[name]["family"]: name for name in reversed(MODELS)}
    for model, accelerator in zip([*first_last.values()][::3], cycle(ACCELERATORS), strict=False):
        if catalog.find(model, Path()).architecture.routing[0]:
            accelerator = "v5p-128"
        found = made(model, accelerator).diagnostics
        assert {d.code for d in found if d.severity != "note"} <= {"W0401", "W0805"}, model


def test_generated_recipes_match_golden_files(request: pytest.FixtureRequest) -> None:
    """Compare golden texts: a 31B with its server, preferences, all weights, and a CPU."""
    texts = {
        "gemma4-31b-served": made("google/gemma-4-31B-it", "v6e-8", serve="v6e-8").text,
        "qwen3-14b-dpo": made("Qwen/Qwen3-14B", "v5e-8", "dpo").text,
        "llama32-1b-full": made("meta-llama/Llama-3.2-1B-Instruct", "v5p-8", "full").text,
        "gemma3-270m-cpu": made("google/gemma-3-270m", "cpu-8").text,
    }
    for name, text in texts.items():
        golden = GOLDEN / f"{name}.yaml"
        if request.config.getoption("--update"):
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(text, encoding="utf-8")
        assert text == golden.read_text(encoding="utf-8"), name
        checked(text)


EDITED = (
    *("lora.rank", "lora.alpha", "lora.targets", "train.optimizer", "train.beta", "remat.policy"),
    *("checkpoint.directory", "data.max_length"),
)
"""Keys that a new recipe writes for people to edit, although their defaults are the same."""


@pytest.mark.parametrize(
    ("model", "accelerator", "method"),
    [
        ("google/gemma-4-31B-it", "v6e-8", None),
        ("Qwen/Qwen3-8B", "v6e-8", None),
        ("Qwen/Qwen3-4B", "v5p-8", "dpo"),
        ("meta-llama/Llama-3.2-1B-Instruct", "v5p-8", "full"),
        ("google/gemma-3-270m", "cpu-8", None),
    ],
)
def test_new_recipe_has_the_languages_defaults(model: str, accelerator: str, method: str | None) -> None:
    """Remove what people edit: with the defaults of the language, the program is the same."""
    path = Path("recipes/sample.yaml")
    written = load(path, text=made(model, accelerator, method).text)
    values = json.loads(json.dumps(written.raw))
    short = ("data.max_length",) if accelerator == "cpu-8" or method == "dpo" else ()
    for section, _, key in (name.partition(".") for name in EDITED if name not in short):
        if isinstance(values.get(section), dict):
            values[section].pop(key, None)
    assert values != written.raw
    bare = load(path, text=to_yaml(values))
    first, second = (lower(loaded).program for loaded in (written, bare))
    assert first is not None and second is not None
    assert to_record(first.recipe) == to_record(second.recipe)
    assert run_settings(first) == run_settings(second)


def test_draft_uses_qlora_only_if_lora_does_not_fit() -> None:
    draft = made("Qwen/Qwen3-32B", "v5e-8").draft
    assert (draft.method, draft.quantize, draft.sure) == ("qlora", True, True)
    assert made("Qwen/Qwen3-4B", "v5e-8").draft.method == "lora"


def test_accelerator_suggested_in_error_fits_the_model() -> None:
    with pytest.raises(ArtifactError) as refused:
        made("meta-llama/Llama-3.1-70B-Instruct", "v6e-1")
    assert refused.value.help is not None
    named = refused.value.help.removeprefix("it fits ").replace(" or ", ", ").split(", ")
    assert named
    machine = named[0].partition(" ")[0]
    checked(made("meta-llama/Llama-3.1-70B-Instruct", machine).text)


def test_the_command_writes_a_recipe_with_its_schema(folder: Path) -> None:
    result = new("demo", "--model", "google/gemma-3-1b-it", "--accelerator", "v6e-1")
    recipe = folder / "recipes/demo.yaml"
    assert recipe.read_text().startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert json.loads((folder / "recipes/recipe.schema.json").read_text())["title"] == "recipec recipe"
    assert "recipes/demo.yaml: LoRA on v6e-1" in result.output
    assert CliRunner().invoke(app, ["check", "recipes/demo.yaml"]).exit_code == 0


def test_existing_recipe_and_schema_are_not_overwritten(folder: Path) -> None:
    (folder / "recipes").mkdir()
    for name in ("demo.yaml", "recipe.schema.json"):
        (folder / "recipes" / name).write_text("mine\n")
    words = ("--model", "google/gemma-3-1b-it", "--accelerator", "v6e-1")
    result = new("demo", *words, exit_code=1)
    assert "recipes/demo.yaml already exists" in str(result.exception)
    new("other", *words)
    assert {path.name for path in (folder / "recipes").iterdir()} == {
        "demo.yaml",
        "other.yaml",
        "recipe.schema.json",
    }
    assert (folder / "recipes/recipe.schema.json").read_text() == "mine\n"


DEMO = "demo --model google/gemma-3-1b-it --accelerator v6e-1"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("demo --model google/gemma-3-1b-it", 2, "give --accelerator"),
        (f"{DEMO} --data hf://a/b", 2, "--format"),
        (DEMO.replace("demo", "Demo"), 2, "lower-case"),
        ("demo --model gemma-3-1b --accelerator v6e-1", 1, "is not in the catalog"),
        ("demo --model google/gemma-3-1b-it --accelerator v6e-7", 1, "there is no TPU v6e"),
        (f"{DEMO} --serve cpu-8", 1, "does not serve"),
        (f"{DEMO} --data no.jsonl", 1, "no no.jsonl"),
        ("demo --model Qwen/Qwen3-8B-AWQ --accelerator v6e-8", 1, "stored quantized"),
    ],
)
def test_wrong_arguments_give_a_message_and_write_no_file(
    folder: Path, words: str, status: int, said: str
) -> None:
    result = new(*words.split(), exit_code=status)
    text = result.output + str(getattr(result.exception, "help", "")) + str(result.exception)
    assert said in text
    assert not list(folder.iterdir())


def rows(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_data_file_determines_format_fields_and_max_length(folder: Path) -> None:
    rows(folder / "recipes/data/qa.jsonl", *[{"question": "why?", "answer": "because " * 900}] * 60)
    new("qa", "--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", "--data", "recipes/data/qa.jsonl")
    recipe = load(folder / "recipes/qa.yaml").recipe
    assert recipe is not None
    assert recipe.data.format == "instruction"
    assert recipe.data.fields == {"instruction": "question", "output": "answer"}
    assert recipe.data.train[0].path == "data/qa.jsonl"
    assert recipe.data.max_length >= 900 * 8 // 4
    assert CliRunner().invoke(app, ["check", "recipes/qa.yaml"]).exit_code == 0


@pytest.mark.parametrize(("count", "short"), [(5, True), (20_000, False)])
def test_sample_count_determines_epochs_and_few_samples_warning(
    folder: Path, count: int, short: bool
) -> None:
    sample = {"instruction": "Say why the sky is as blue as it is.", "output": "because " * 20}
    rows(folder / "data.jsonl", *[sample] * count)
    result = new("few", "--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-8", "--data", "data.jsonl")
    assert ("the samples are too few; give more samples" in result.output) == short
    assert "W05" not in result.output and "N0506" not in result.output
    text = Path("few.yaml").read_text()
    assert ("since the samples are few: learning takes 50 or more" in text) == short
    assert ("epochs: 1 " in text) == (count == 20_000)


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo"),
        ({"prompt": "a", "completion": "b", "label": True}, "kto"),
    ],
)
def test_preference_data_selects_dpo_or_kto_objective(folder: Path, row: dict[str, Any], method: str) -> None:
    rows(folder / "pairs.jsonl", row)
    new("pairs", "--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", "--data", "pairs.jsonl")
    recipe = load(folder / "pairs.yaml").recipe  # next to its data
    assert recipe is not None and recipe.train.objective == method
    assert recipe.train.micro_batch_size > 1 or method == "dpo"
    words = ("--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", "--data", "pairs.jsonl")
    result = new("other", *words, "--method", "lora", exit_code=1)
    assert "cannot be used with" in str(result.exception)


def test_epochs_of_kto_are_counted_at_a_batch_that_kto_can_have(folder: Path) -> None:
    """KTO needs two rows on each device: 8 rows on 8 devices are no batch."""
    answers = [{"prompt": "a", "completion": "b", "label": number % 2 == 0} for number in range(100)]
    rows(folder / "answers.jsonl", *answers)
    new("few", "--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-8", "--data", "answers.jsonl")
    program = lower(load(folder / "few.yaml")).program
    assert program is not None and program.recipe.train.global_batch_size == 16
    steps = run_length(program.recipe, folder)
    assert steps.least is not None and steps.least >= ENOUGH_STEPS
    assert steps.words() in (folder / "few.yaml").read_text()


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "google/gemma-4-26B-A4B-it"])
def test_experts_are_split_over_ep(model: str, folder: Path) -> None:
    new("experts", "--model", model, "--accelerator", "v6e-8", "--data", "hf://a/b", "--format", "chat")
    program = lower(load(folder / "recipes/experts.yaml")).program
    assert program is not None and program.recipe.mesh.axes == {"fsdp": 1, "ep": 8, "tp": 1}
    assert program.recipe.model.quantization is None  # with fsdp, gathered experts leave no room
    text = (folder / "recipes/experts.yaml").read_text()
    assert "keeps 1/8 of the experts, all of the other weights" in text.replace("\n  # ", " ")


def test_data_anywhere_on_the_disk_gets_a_link(folder: Path) -> None:
    data = rows(folder / "data/train.jsonl", {"text": "a"})
    words = ("--model", "google/gemma-3-4b-pt", "--accelerator", "v6e-1", "--data", str(data))
    result = new("demo", *words, "-o", "recipes")
    link = folder / "recipes/data/train.jsonl"
    assert link.samefile(data) and not link.readlink().is_absolute()
    assert "recipes/data/train.jsonl: a link to ../../data/train.jsonl" in result.output
    assert "W0401" not in result.output  # the checks count the rows through it
    assert "`recipe check` does not read samples behind a link" in result.output
    checked((folder / "recipes/demo.yaml").read_text())
    new("again", *words, "-o", "recipes")  # the same link
    new("demo", *words)
    assert "path: data/train.jsonl" in (folder / "demo.yaml").read_text()
    away = rows(folder.parent / "elsewhere" / "train.jsonl", {"text": "b"})
    new("away", *words[:-1], str(away), "-o", "others")
    assert (folder / "others/data/train.jsonl").readlink() == away
    refused = new("other", *words[:-1], str(away), "-o", "recipes", exit_code=1)
    assert "needs recipes/data/train.jsonl, which exists" in str(refused.exception)
    assert not (folder / "recipes/other.yaml").exists()


def test_links_are_removed_if_no_recipe_is_written(folder: Path) -> None:
    away = rows(folder.parent / "away.jsonl", {"text": "b"})
    words = ("--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", "--data", str(away))
    assert "cannot be used with" in str(new("demo", *words, "--method", "dpo", exit_code=1).exception)
    assert not list(folder.iterdir())


def test_repeated_data_is_all_in_the_recipe(folder: Path) -> None:
    """Several files: the second has other column names, and the third another format."""
    sample = "because " * 30
    rows(folder / "a.jsonl", *[{"instruction": "why?", "output": sample}] * 60)
    rows(folder / "b.jsonl", *[{"question": "why?", "answer": sample * 20}] * 60)
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": sample}]
    rows(folder / "c.jsonl", *[{"messages": turns}] * 60)
    named = [word for name in "abc" for word in ("--data", f"{name}.jsonl")]
    new("all", "--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", *named)
    recipe = load(folder / "all.yaml").recipe
    assert recipe is not None and recipe.data.format == "instruction"
    assert [source.path for source in recipe.data.train] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    second, third = recipe.data.train[1:]
    assert second.fields == {"instruction": "question", "output": "answer"} and second.format is None
    assert third.format == "chat"
    assert recipe.data.max_length >= len(sample) * 20 // 4  # the longest of all
    checked((folder / "all.yaml").read_text())
    rows(folder / "pairs.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    words = (
        "--model",
        "Qwen/Qwen3-4B",
        "--accelerator",
        "v6e-1",
        "--data",
        "a.jsonl",
        "--data",
        "pairs.jsonl",
    )
    assert "preference" in str(new("mixed", *words, exit_code=1).exception)


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_few_rows_are_advised_on_in_every_format(folder: Path, kind: str) -> None:
    samples = [{"instruction": f"Say why {n}.", "output": "because " * 20} for n in range(40)]
    rows(folder / "a.jsonl", *samples)
    (folder / "b.json").write_text(json.dumps(samples))
    lines = [f"{row['instruction']},{row['output']}" for row in samples]
    (folder / "b.csv").write_text("\n".join(["instruction,output", *lines]) + "\n")
    words = ("--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-8", "--data")
    said = new("a", *words, "a.jsonl").output
    assert new("b", *words, f"b.{kind}").output.replace("b.yaml", "a.yaml").splitlines()[1:] == [
        line for line in said.splitlines()[1:] if "recipe.schema.json" not in line
    ]
    texts = [(folder / f"{name}.yaml").read_text() for name in "ab"]
    assert (
        texts[1].replace("name: b", "name: a").replace(f"b.{kind}", "a.jsonl").splitlines()[6:]
        == (texts[0].splitlines()[6:])
    )


@pytest.mark.parametrize(
    ("model", "accelerator", "id", "name"),
    [
        ("qwen3-8b", "trillium", "Qwen/Qwen3-8B", "v6e-1"),
        ("qwen/qwen3-8B", "ironwood-8", "Qwen/Qwen3-8B", "tpu7x-8"),
        ("Qwen/Qwen3-8b", "v6e", "Qwen/Qwen3-8B", "v6e-1"),
        ("gemma-3-27b-it", "V6E", "google/gemma-3-27b-it", "v6e-8"),
        ("Qwen/Qwen3-8B", "tpu-v6e-8", "Qwen/Qwen3-8B", "v6e-8"),
        ("Qwen/Qwen3-8B", "v7-8", "Qwen/Qwen3-8B", "tpu7x-8"),
    ],
)
def test_usual_spellings_of_models_and_machines_are_understood(
    folder: Path, model: str, accelerator: str, id: str, name: str
) -> None:
    result = new("demo", "--model", model, "--accelerator", accelerator)
    recipe = load(folder / "recipes/demo.yaml").recipe
    assert recipe is not None and (recipe.model.id, recipe.mesh.accelerator) == (id, name)
    assert (f"{model} is {id}" in result.output) == (model != id)


def test_lengths_stay_within_the_models_positions() -> None:
    for model, most in {
        "meta-llama/Meta-Llama-3-8B-Instruct": 8192,
        "google/gemma-2-9b-it": 8192,
        "microsoft/Phi-3-mini-4k-instruct": 4096,
        "microsoft/phi-2": 2048,
    }.items():
        recipe = load(Path("recipes/sample.yaml"), text=made(model, "v6e-8", serve="v6e-8").text).recipe
        assert recipe is not None and recipe.serve is not None
        assert recipe.serve.max_model_len == most and recipe.data.max_length <= most


def test_recipe_that_only_fits_by_the_estimate_says_that_a_plan_must_confirm_it(folder: Path) -> None:
    result = new("demo", "--model", "mistralai/Mistral-Small-Instruct-2409", "--accelerator", "v5e-1")
    text = " ".join((folder / "recipes/demo.yaml").read_text().replace("#", "").split())
    assert "may not fit v5e-1: run `recipe plan` before you train" in result.output
    assert "it may not fit: plan it before you train." in text
    found = made("mistralai/Mistral-Small-Instruct-2409", "v5e-1").draft
    assert not found.sure and found.policy == "decoder" and found.need.least < 15.75 * 2**30 < found.need.most


def test_recipes_of_many_models_and_machines_have_no_findings_about_themselves() -> None:
    """Try models of the whole catalog on machines of all sizes, with methods and servers in turn."""
    machines = ("v5e-1", "v6e-8", "tpu7x-8", "v5p-128", "v6e-1", "v5p-8", "v5e-8")
    methods, servers = (None, "full", "dpo", None, "kto", "qlora"), (None, "v6e-8", "v5e-8")
    written = 0
    for turn, model in enumerate(MODELS[::23]):
        machine, method = machines[turn % len(machines)], methods[turn % len(methods)]
        try:
            recipe = made(model, machine, method, servers[turn % len(servers)])
        except ArtifactError:
            continue
        written += 1
        codes = {found.code for found in recipe.diagnostics if found.severity != "note"}
        # W0401: the data does not exist yet; W0805: the checkpoint was made with dropout.
        assert codes <= {"W0401", "W0805"}, (model, machine, method, codes)
    assert written > len(MODELS[::23]) // 2


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": chat("a", "b")}, "chat"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"instruction": "a", "input": "", "output": "b"}, "instruction"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
    ],
)
def test_column_names_determine_data_format(row: dict[str, object], format: str) -> None:
    assert recognize([row]) == ((format, {}), "")


@pytest.mark.parametrize(
    ("row", "model", "format"),
    [
        ({"question": "a", "answer": "b"}, "Qwen/Qwen3-4B", "instruction"),
        ({"question": "a", "answer": "b"}, "google/gemma-3-4b-pt", "prompt_completion"),
    ],
)
def test_question_answer_format_depends_on_columns_and_chat_model(
    folder: Path, row: dict[str, object], model: str, format: str
) -> None:
    rows(folder / "qa.jsonl", row)
    new("qa", "--model", model, "--accelerator", "v6e-4", "--data", "qa.jsonl")
    recipe = load(folder / "qa.yaml").recipe
    assert recipe is not None and recipe.data.format == format


def test_unusable_data_file_gives_its_reason(folder: Path) -> None:
    cases = {
        "empty.jsonl": (b"", "has no rows"),
        "binary.jsonl": (bytes(range(256)), "cannot be read"),
        "list.jsonl": (b"[1]\n", "line 1 is not a JSON object"),
        "comma.jsonl": (
            b'{"text": "a"}\n{"text" "b"}\n',
            "not JSON at line 2, column 9: Expecting ':' delimiter",
        ),
        "comma.json": (b'[{"text": "a"}\n {"text": "b"}]', "not JSON at line 2, column 2: Expecting ','"),
        "notes.txt": (b"words\n", "its name ends in none of .jsonl, "),
        "long.jsonl": (b'{"text": "%s"}' % (b"a" * MOST), "line 1 has more than 8 MB"),
    }
    for name, (content, said) in cases.items():
        (folder / name).write_bytes(content)
        with pytest.raises(ArtifactError) as refused:
            look(folder / name, None)
        assert said in str(refused.value), name


def test_byte_order_mark_blank_first_line_and_long_cell_are_read(folder: Path) -> None:
    sample = b'{"text": "a"}'
    files = {"a.jsonl": sample, "b.json": b"[%s]" % sample, "c.json": sample}
    files["d.csv"] = b"text\n%s\n" % (b"a" * 200_000)
    for name, content in files.items():
        for before in (b"\xef\xbb\xbf", *([] if name == "d.csv" else [b"\n", b"\xef\xbb\xbf\r\n"])):
            (folder / name).write_bytes(before + content)
            found = look(folder / name, None)
            assert (found.format, found.rows) == ("text", 1), (name, before)


def test_unrecognized_columns_are_refused_or_asked_for_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(folder / "odd.jsonl", {"foo": "a", "output": "b"})
    words = ("odd", "--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", "--serve", "none")
    refused = new(*words, "--data", "odd.jsonl", exit_code=1).exception
    assert "has the columns foo and output" in str(refused)
    assert "fields: {prompt: COLUMN, completion: COLUMN}" in str(getattr(refused, "help", ""))
    monkeypatch.setattr("recipec.compiler.new.ask.possible", lambda: True)
    answers = ("odd.txt", "odd.jsonl", "instruction", "neither", "foo", "")
    asked = CliRunner().invoke(app, ["new", *words], input="\n".join(answers) + "\n")
    assert asked.exit_code == 0, asked.output
    assert "there is no odd.txt" in asked.output and "--format" not in asked.output
    given = ("new", "also", *words[1:], "--data", "odd.jsonl", "--format", "instruction")
    assert CliRunner().invoke(app, [*given], input="foo\n\n").exit_code == 0
    for name in ("odd", "also"):
        recipe = load(folder / f"{name}.yaml").recipe
        assert recipe is not None and recipe.data.format == "instruction"
        assert recipe.data.fields == {"instruction": "foo"}


def test_model_directory_is_written_relative_to_recipe_folder(folder: Path) -> None:
    config = {**catalog.entries()["google/gemma-3-1b-it"]["config"]}
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint/config.json").write_text(json.dumps(config))
    new("local", "--model", "checkpoint", "--accelerator", "v6e-1")
    assert "id: ../checkpoint" in (folder / "recipes/local.yaml").read_text()
    assert CliRunner().invoke(app, ["check", "recipes/local.yaml"]).exit_code == 0


def test_failed_write_leaves_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when the second of two files is moved to its place."""
    place, calls = written_files.os.replace, []

    def failing(source: str, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        place(source, target)

    monkeypatch.setattr(written_files.os, "replace", failing)
    with pytest.raises(OSError):
        written_files.write({folder / "a/b/one": "1", folder / "two": "2"}, {})
    assert len(calls) == 2 and not list(folder.iterdir())
