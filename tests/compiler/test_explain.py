"""Tests of `recipe explain`: values, their origins, and their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipec.compiler.explain.explain import detail, explain, leaves, summary, unknown_path
from recipec.compiler.lower import lower
from recipec.compiler.pages.document import sheet
from recipec.compiler.pages.text import UNLIMITED, write
from recipec.spec.key_paths import join
from recipec.spec.language import Recipe
from recipec.spec.load import Loaded

Load = Callable[..., Loaded]


ROW = (
    '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello to you"}]}\n'
)


@pytest.fixture
def explained(loaded: Load) -> Callable[..., str]:
    def run(path: str | None = None, *sets: str) -> str:
        found = loaded(*sets)
        lowered = lower(found)
        assert lowered.program is not None, lowered.diagnostics
        return write(explain(lowered.program, found, path), UNLIMITED)

    return run


def line(text: str, start: str) -> list[str]:
    """Return the cells of the first line with this start."""
    return next(row for row in text.splitlines() if row.startswith(start)).split("  ")


def cells(text: str, start: str) -> list[str]:
    return [cell.strip() for cell in line(text, start) if cell.strip()]


def test_each_value_has_its_origin(explained: Callable[..., str], recipe_file: Path) -> None:
    text = explained(None, "train.seed=7")
    assert cells(text, "lora.rank")[1] == "64"
    assert cells(text, "lora.rank")[2].endswith("recipe.yaml:5")
    assert cells(text, "lora.init") == ["lora.init", "peft", "default"]
    assert cells(text, "train.seed") == ["train.seed", "7", "--set train.seed=7"]


@pytest.mark.parametrize("text", ["True", ".inf"])
def test_text_that_reads_as_another_type_is_explained_in_quotes(
    explained: Callable[..., str], text: str
) -> None:
    shown = explained("data", f"data.train=['{text}']")
    assert cells(shown, "data.train[0].path")[1] == f'"{text}"'


def test_explain_describes_the_accelerator_and_its_devices(explained: Callable[..., str]) -> None:
    assert "v5p-8: 4 chips (the number in its name counts TensorCores), topology 2x2x1, 95 GiB" in explained(
        "mesh"
    )
    assert "4 data-parallel devices (fsdp)" in explained("mesh.axes.fsdp")


def test_lora_parameter_counts_match_peft(explained: Callable[..., str]) -> None:
    text = explained("lora")
    assert "489,717,760 trained parameters" in text
    rows = [row for row in text.splitlines() if row.startswith("k_proj ") and " global " in row]
    assert [cell.strip() for cell in rows[0].split("  ") if cell.strip()] == [
        "k_proj", "layers.*.attn.k_proj.w", "10 global", "[5376, 64] x [64, 4, 512]", "4,751,360",
    ]  # fmt: skip
    totals = text[text.index("in all") :]
    assert cells(totals, "v_proj") == ["v_proj", f"{50 * 64 * (5376 + 4096):,}"]
    assert cells(totals, "q_proj") == ["q_proj", f"{64 * (50 * (5376 + 8192) + 10 * (5376 + 16384)):,}"]


def test_int8_products_are_explained_with_their_peak_rate(explained: Callable[..., str]) -> None:
    stored = explained("model", "model.quantization=int8")
    assert "linear layers and experts are stored in int8" in stored and "products with" not in stored
    text = explained("model.quantized_matmul", "model.quantization=int8", "model.quantized_matmul=forward")
    assert "products with the frozen weights are in int8, backward in bfloat16: at most 918 TFLOP/s" in text


def test_qat_is_explained_with_group_size_and_start_step(explained: Callable[..., str]) -> None:
    text = explained("train.qat", "train.qat={group_size: 64, start_step: 9, activations: null}")
    assert (
        "the adapted projections are computed with rounded operands: weights to int4 in groups of 64;" in text
    )
    assert "the first 9 steps are not rounded" in text and "quantize the merged model afterwards" in text


def test_every_parameter_and_adapter_has_its_partition_spec(
    explained: Callable[..., str], loaded: Load
) -> None:
    text = explained("sharding", "sharding.rules=[{match: '.*down_proj.kernel', spec: [null, fsdp]}]")
    assert cells(text, "layers.*.attn.v_proj.w ")[1:4] == [
        "50 local",
        "[5376, 16, 256]",
        "P('fsdp', 'tp', None)",
    ]
    assert cells(text, "layers.*.mlp.down_proj.kernel ")[3] == "P(None, 'fsdp') (changed)"
    assert cells(text, "layers.*.mlp.down_proj.kernel ")[4] == "[21504, 1344]"
    assert "layers.*.attn.k_proj.w_lora_b" in text
    program = lower(loaded()).program
    assert program is not None
    assert {p.path.partition(".")[2].lstrip("0123456789.") for p in program.parameters} <= {
        row.split(" ")[0].removeprefix("layers.*.").partition("norm.w")[0]
        and row.split(" ")[0].partition(".")[2].lstrip("*.")
        for row in explained("sharding").splitlines()
        if row
    }


def test_the_optimizer_chain_is_in_order(explained: Callable[..., str]) -> None:
    text = explained("train.optimizer")
    chain = next(row for row in text.splitlines() if row.startswith("optimizer:"))
    places = [
        chain.index(word) for word in ("mean gradient of 2 micro-batches", "clip_by_global_norm(1)", "adamw(")
    ]
    assert places == sorted(places)
    assert "no clipping" in explained("train.optimizer", "train.optimizer.max_grad_norm=null")


def test_steps_are_exact_when_given_and_bounded_by_local_data(
    explained: Callable[..., str], tmp_path: Path
) -> None:
    assert "1,244 steps, at most 40,763,392 tokens" in explained("train.steps", "train.steps=1244")
    assert "steps = epochs x rows" in explained("train.epochs")
    (tmp_path / "train.jsonl").write_text(ROW * 20)
    text = explained("train.epochs", "data.train=[train.jsonl]", "train.epochs=2")
    assert "about 2 steps of at most 32,768 tokens, from 20 rows at hand" in text


def test_held_out_rows_and_row_limits_are_explained(explained: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(ROW * 20)
    given = ("data.train=[{path: train.jsonl, limit: 17}]", "data.eval_fraction=0.05", "train.epochs=2")
    text = explained("data", *given)
    assert "0.05 of the rows are held out to evaluate on: 1 of those at hand; datasets'" in text
    assert "of train.jsonl only the first 17 rows" in text
    assert "at most 4 steps of at most 32,768 tokens, from 16 rows at hand" in explained(
        "train.epochs", *given, "data.packing=false"
    )


def test_schedules_are_explained_in_words(explained: Callable[..., str]) -> None:
    text = explained(
        "train.schedule",
        "train.schedule={name: linear, warmup_ratio: 0.1, min_lr_ratio: 0.1}",
        "train.steps=45",
    )
    assert "from 0 to 0.0001 in 5 steps, then linearly to 1e-05 one step after the last" in text
    text = explained("train.schedule", "train.schedule.name=constant")
    assert "learning rate from 0.0001, constant" in text


@pytest.mark.parametrize(
    ("path", "help"),
    [
        ("lora.rnk", "did you mean `lora.rank`?"),
        ("rank", "did you mean `lora.rank`?"),
        ("serve.port", "add it"),
        ("[0]", "sections are"),
        ("data.train[3].path", "did you mean `data.train[0].path`?"),
    ],
)
def test_an_unknown_path_is_a_diagnostic(loaded: Load, path: str, help: str) -> None:
    found = unknown_path(path, loaded())
    assert found is not None and found.code == "E0040"
    assert help in str(found.help)


def test_every_path_can_be_explained(loaded: Load) -> None:
    found = loaded(
        "serve={}",
        "sharding.rules=[{match: '.*', spec: []}]",
        "data.eval=[gs://b/e.jsonl]",
        "sharding.rules=[]",
    )
    program = lower(found).program
    assert program is not None and found.recipe is not None
    for parts, _ in leaves(found.recipe):
        for end in range(1, len(parts) + 1):
            path = join(parts[:end])
            assert unknown_path(path, found) is None, path
            assert write(explain(program, found, path)).startswith(path + "\n")
    for section in Recipe.model_fields:
        assert all(isinstance(row, str) for row in summary(section, program))
        assert write(sheet("", *detail([section], program)))


def test_explained_key_of_several_words_lists_them(explained: Callable[..., str]) -> None:
    text = explained("lora.kind")
    assert "choice  meaning\nlora    A and B of each projection.\ndora    A, B and a magnitude" in text
    assert "meaning" not in explained("lora.rank")
