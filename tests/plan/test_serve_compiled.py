"""Tests of serving plans by compiling: from the worker's answers to plans, and the search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.serve.compile import extrapolated, job
from recipec.compiler.plan.serve.configuration import serving
from recipec.compiler.plan.serve.results import (
    COMPILED_SERVING,
    SERVING_SEARCH,
    ServeAnswer,
    ServeJob,
    ServeProgram,
)
from tests.plan.serve_answers import GLOBAL, LOCAL, RECIPE, answered, lowered, planned_texts


def test_serving_figures_are_extrapolated_linearly_to_all_layers(example: Program) -> None:
    weights, page, programs = extrapolated(answered(job(example, (6, 12))), 60)
    assert weights == pytest.approx(0.3523e9 + 7.324e9)
    assert page == 10 * 114688
    assert programs[0].timeline.memory == pytest.approx((60_000 + 11_310_000) / 1.75e9)
    assert programs[0].timeline.exposed == pytest.approx(2e-3)
    assert dict(programs[0].kernels) == {LOCAL: 50.0, GLOBAL: 10.0}
    assert {c.kind: c.count for c in programs[0].collectives} == {"all-gather": 30, "all-reduce": 131}


def test_refusal_at_one_depth_refuses_the_extrapolated_program(example: Program) -> None:
    done = answered(job(example, (6, 12)))
    refused = replace(done.depths[1].programs[0], refusal="Ran out of memory in memory space hbm.")
    last = replace(done.depths[1], programs=(refused, done.depths[1].programs[1]))
    programs = extrapolated(replace(done, depths=(done.depths[0], last)), 60)[2]
    assert programs[0].refusal and not programs[1].refusal


def test_reference_server_plan_fits_and_cites_published_times(example: Program) -> None:
    planned = serving(example, say=lambda line: None, run=answered)
    assert planned.weights == pytest.approx(7.75e9, rel=0.02)
    assert planned.fits and planned.used < planned.available
    assert planned.cache_tokens == 19636 * 16
    assert 0.008 < planned.decode_alone < planned.decode_full < 0.03
    assert [(p.input_length, p.request_rate) for p in planned.points] == [
        (512, 1.0), (512, None), (4096, 1.0), (4096, None)
    ]  # fmt: skip
    assert any("published 45 to 61 ms" in sentence for sentence in planned.published)
    slow, fast = planned.points[2], planned.points[3]
    assert slow.tokens_per_second == pytest.approx(512) and not slow.saturated
    assert fast.saturated and fast.tpot > slow.tpot > planned.decode_alone


def test_changed_serving_recipe_is_not_compared_with_published_times(tmp_path: Path) -> None:
    program = lowered(tmp_path, RECIPE, "serve.kv_cache_dtype=auto")
    assert serving(program, say=lambda line: None, run=answered).published == ()


def test_compiled_serving_plan_is_printed_and_written_as_json(example: Program) -> None:
    text, written = planned_texts(example, say=lambda line: None, run=answered)
    assert "estimates" in text and "7.68 GB" in text and "extrapolated from 6 and 12 layers" in text
    assert "(-1.0%)" in text  # of the published weights
    assert COMPILED_SERVING.validate_python(written).tensor_parallel == 8


def test_serving_plan_with_too_large_cache_does_not_fit(tmp_path: Path) -> None:
    program = lowered(tmp_path, RECIPE, "serve.extra_args={num_gpu_blocks_override: 40000}")
    text, written = planned_texts(program, say=lambda line: None, run=answered)
    assert "does not fit" in text and "help: a larger tensor_parallel_size" in text
    planned = COMPILED_SERVING.validate_python(written)
    assert not planned.fits and planned.points == ()


def test_serving_plan_prints_first_line_of_the_compilers_refusal(example: Program) -> None:
    def refused(made: ServeJob, say: Any) -> ServeAnswer:
        done = answered(made)
        said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.1G of 31.24G hbm.\nmore"
        programs = tuple(ServeProgram(b.kind, b.tokens, refusal=said) for b in made.buckets)
        return replace(done, depths=tuple(replace(depth, programs=programs) for depth in done.depths))

    text, _ = planned_texts(example, say=lambda line: None, run=refused)
    assert "Used 40.1G of 31.24G hbm." in text and "more" not in text


def test_serving_search_refuses_too_small_tp_and_picks_small_blocks(example: Program) -> None:
    def run(made: ServeJob, say: Any) -> ServeAnswer:
        done = answered(made)
        blocks = dict(made.environment).get("RPA_V3_DECODE_BLOCK_SIZES")
        if blocks is None:
            return done
        size = int(blocks.split(",")[1])
        names = {LOCAL: f"RPAd-p_16-bq_1_1-bkv_{size}_{size}-sw_1024"}
        names[GLOBAL] = f"RPAd-p_16-bq_1_1-bkv_{size}_{size}"

        def renamed(program: ServeProgram) -> ServeProgram:
            return replace(program, kernels=tuple((names[name], n) for name, n in program.kernels))

        return replace(
            done, depths=tuple(replace(d, programs=tuple(map(renamed, d.programs))) for d in done.depths)
        )

    text, written = planned_texts(example, search=True, say=lambda line: None, run=run)
    found = SERVING_SEARCH.validate_python(written)
    tried = {(c.tensor_parallel, c.data_parallel) for c in found.candidates if c.status == "compiled"}
    assert tried == {(8, 1), (4, 2)}
    refused = {c.tensor_parallel: c.reason for c in found.candidates if c.status == "refused"}
    assert set(refused) == {1, 2} and "the weights take" in refused[1]
    assert "less than one sequence of max_model_len" in refused[2]  # 28.6 of 28.75 GiB are weights
    assert found.candidates[0].sets == ()
    assert found.best is not None
    best = found.candidates[found.best]
    assert best.decode_blocks == "1,1024,1,1024"
    assert "untested on hardware" in text and f"tensor_parallel_size: {best.tensor_parallel}" in text


def test_serving_search_fails_block_sizes_that_the_kernel_does_not_use(example: Program) -> None:
    _, data = planned_texts(example, search=True, say=lambda line: None, run=answered)
    found = SERVING_SEARCH.validate_python(data)
    failed = [c for c in found.candidates if c.decode_blocks and c.status == "failed"]
    assert failed and all("refused" in c.reason for c in failed)


@pytest.mark.parametrize(
    ("own", "without", "smaller"),
    [
        (
            "serve.env={RPA_V3_DECODE_BLOCK_SIZES: '1,512,1,512', USE_BATCHED_RPA_KERNEL: '0'}",
            'serve.env={USE_BATCHED_RPA_KERNEL: "0"}',
            'serve.env={RPA_V3_DECODE_BLOCK_SIZES: "1,1024,1,1024", USE_BATCHED_RPA_KERNEL: "0"}',
        ),
        (
            "serve.decode_block_sizes=[1, 512, 1, 512]",
            "serve.decode_block_sizes=null",
            "serve.decode_block_sizes=[1, 1024, 1, 1024]",
        ),
    ],
)
def test_serving_search_says_how_to_change_the_recipes_block_sizes(
    own: str, without: str, smaller: str, tmp_path: Path
) -> None:
    program = lowered(tmp_path, RECIPE, own)
    text, data = planned_texts(program, search=True, say=lambda line: None, run=answered)
    found = SERVING_SEARCH.validate_python(data)
    sets = {c.decode_blocks: c.sets for c in found.candidates if len(c.sets) == 1 and c.tensor_parallel == 8}
    assert sets[None] == (without,) and sets["1,1024,1,1024"] == (smaller,)
    best = found.candidates[found.best or 0]
    assert best.decode_blocks is None and f"  {without.partition('.')[2].replace('=', ': ', 1)}\n" in text
    assert not any("batched" in note for c in found.candidates if c.serving for note in c.serving.notes)
