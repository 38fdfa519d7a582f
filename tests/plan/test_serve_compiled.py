"""Tests of serving plans by compiling: from the worker's answers to plans, and the search."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import store
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.results import Collective
from recipec.compiler.plan.server_step import environment
from recipec.compiler.plan.server_step.compile import (
    ANSWER,
    WorkerKilled,
    answer,
    compile_program,
    config_of,
    depths,
    extrapolated,
    job,
    padded,
    parse,
    replica_topology,
    run_worker,
    worker_environment,
)
from recipec.compiler.plan.server_step.configuration import cache_reads, serving
from recipec.compiler.plan.server_step.hlo import AttentionKernel, attention_kernel, read
from recipec.compiler.plan.server_step.server_plan import (
    COMPILED_SERVING,
    JOB,
    SERVING_SEARCH,
    Bucket,
    ServeAnswer,
    ServeJob,
    ServeProgram,
)
from tests.plan.serve_answers import GLOBAL, HLO, LOCAL, RECIPE, answered, lowered, planned_texts
from tests.waiting import gone


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


@pytest.mark.usefixtures("full_speed")
def test_read_extracts_times_collectives_and_kernels_from_hlo() -> None:
    found = ServeProgram("decode", 64, **read(HLO, "v6e:2x4", 8))
    # The cycles of two fusions at 1.75 GHz. The kernel's time depends on the cache.
    assert found.timeline.products + found.timeline.memory == pytest.approx(4300 / 1.75e9)
    assert found.timeline.kernels == 0
    assert {moved.kind for moved in found.timeline.transfers} == {kind.kind for kind in found.collectives}
    assert set(found.collectives) == {
        Collective("all-gather", ("model",), False, 1, 128 * 4 * 512),  # 64 of a tile's 128
        Collective("all-reduce", ("model",), False, 1, 64 * 5376 * 2),
        Collective("collective-permute", ("model",), False, 1, 64 * 4 * 64 * 2),
    }
    assert found.kernels == ((GLOBAL, 1.0),)
    with pytest.raises(ValueError, match="entry"):
        read("HloModule nothing", "v6e:2x4", 8)


def test_attention_kernel_name_gives_block_size_and_window() -> None:
    assert attention_kernel(LOCAL) == AttentionKernel(True, 16384, 1024)
    assert attention_kernel(GLOBAL) == AttentionKernel(True, 8192, None)
    assert attention_kernel("RPAm-p_16-bq_32_64-bkv_1024_512") == AttentionKernel(False, 1024, None)
    assert attention_kernel("quantized_matmul") is None


def test_window_saves_cache_reads_only_with_small_blocks() -> None:
    sizes = {"sliding_attention": 1024.0, "full_attention": 2048.0}
    default = ServeProgram("decode", 64, kernels=((LOCAL, 50.0), (GLOBAL, 10.0)))
    small = replace(
        default,
        kernels=(("RPAd-p_16-bq_1_1-bkv_1024_1024-sw_1024", 50.0), ("RPAd-p_16-bq_1_1-bkv_1024_1024", 10.0)),
    )
    # 64 sequences of 4,096 tokens: 50 x 1 KiB and 10 x 2 KiB a token. With small blocks,
    # the local layers read only 1,024 tokens.
    assert 64 * cache_reads(default, sizes, 4096) == 64 * 4096 * 70 * 1024
    assert 64 * cache_reads(small, sizes, 4096) == 64 * (1024 * 50 + 4096 * 20) * 1024


def test_serve_job_has_the_topology_and_buckets_of_the_recipe(example: Program) -> None:
    made = job(example, (6, 12))
    assert (made.topology, made.tensor_parallel, made.model_layers) == ("v6e:2x4", 8, 60)
    assert made.buckets == (Bucket("decode", 64), Bucket("prefill", 1024))
    assert made.hbm_bytes == 31.25 * 2**30
    assert JOB.validate_json(JOB.dump_json(made)) == made


def test_config_of_a_catalog_gemma_4_is_the_text_model(example: Program) -> None:
    config = config_of(example)
    assert config["architectures"] == ["Gemma4ForCausalLM"]
    assert len(config["text_config"]["layer_types"]) == 60
    assert config["text_config"]["max_position_embeddings"] >= 16384


def test_flags_and_environment_reach_the_job(tmp_path: Path) -> None:
    flags = "serve.extra_args={gpu_memory_utilization: 0.8, block-size: 32, limit_mm_per_prompt: {video: 0}}"
    program = lowered(tmp_path, RECIPE, flags, "serve.env={A: b}", "serve.max_num_batched_tokens=512")
    made = job(program, (6,))
    assert (made.memory_share, made.page_tokens, made.environment) == (0.8, 32, (("A", "b"),))
    assert made.buckets[1].tokens == 512


def test_decode_block_sizes_reach_the_job_by_key_or_environment(tmp_path: Path) -> None:
    sizes = ("RPA_V3_DECODE_BLOCK_SIZES", "1,1024,1,1024")
    key = lowered(tmp_path, RECIPE, "serve.decode_block_sizes=[1, 1024, 1, 1024]", "serve.env={A: b}")
    assert job(key, (6,)).environment == (("A", "b"), sizes)
    variable = lowered(tmp_path, RECIPE, f"serve.env={{{sizes[0]}: '{sizes[1]}'}}")
    assert job(variable, (6,)).environment == (sizes,)


def test_depths_are_whole_repeats_of_the_layer_pattern(example: Program, tmp_path: Path) -> None:
    assert depths(example, exact=False) == [(6, 12)]
    assert depths(example, exact=True) == [(60,), (6, 12)]
    shared = lowered(tmp_path, RECIPE.replace("31B", "E2B"), "serve.tensor_parallel_size=1")
    assert depths(shared, exact=False) == [(35,)]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 16), (64, 64), (65, 128), (1000, 1024)])
def test_step_tokens_are_padded_to_a_server_bucket(tokens: int, bucket: int) -> None:
    assert padded(tokens) == bucket


def test_replica_gets_the_smallest_topology_with_enough_chips() -> None:
    assert [replica_topology("v6e", n) for n in (1, 2, 4, 8)] == ["v6e:2x2", "v6e:2x2", "v6e:2x2", "v6e:2x4"]
    assert replica_topology("tpu7x", 16) == "tpu7x:2x2x2"


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("serve.quantization=fp8",), "only with bfloat16 weights"),
        (("model.id=google/gemma-3-27b-it",), "vLLM's PyTorch model"),
        (
            ("serve.accelerator=v5p-8", "serve.tensor_parallel_size=4", "serve.kv_cache_dtype=auto"),
            "not for v5p",
        ),
        (("serve.env={MODEL_IMPL_TYPE: vllm}",), "vLLM's PyTorch model"),
    ],
)
def test_serving_recipes_that_cannot_be_compiled_are_refused(
    tmp_path: Path, sets: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ArtifactError, match=why):
        job(lowered(tmp_path, RECIPE, *sets), (6,))


def worker(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """Replace the worker by a program, and return the interpreter."""
    path = folder / "worker.py"
    path.write_text(code)
    monkeypatch.setattr("recipec.compiler.plan.server_step.compile.WORKER", path)
    return Path(sys.executable)


def test_worker_reads_its_job_from_stdin_and_its_answer_is_parsed(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {
        "page_tokens": 16,
        "pages": 10,
        "token_bytes": {"full_attention": 2048.0},
        "depths": [{"layers": 6, "weights": 1, "page": 2, "programs": [{"kind": "decode", "tokens": 64}]}],
        "head": {"kind": "head", "tokens": 64, "text": "head.hlo"},
        "peak_rss": 1,
        "seconds": 2,
    }
    (tmp_path / "head.hlo").write_text(HLO)
    code = "import json, sys; assert json.load(sys.stdin)['topology'] == 'v6e:2x4'"
    code += f"; print({json.dumps(plain)!r})"
    python = worker(tmp_path, monkeypatch, code)
    made = job(example, (6,))
    done = parse(run_worker(python, made, tmp_path, lambda line: None), tmp_path, made)
    assert done.head.timeline.exposed > 0 and done.head.collectives[0].kind == "all-reduce"
    with pytest.raises(ArtifactError, match="cannot be read"):
        parse("nothing", tmp_path, made)


def test_failed_worker_error_quotes_its_last_line(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = worker(tmp_path, monkeypatch, "raise ValueError('no such head size')")
    with pytest.raises(ArtifactError, match="ValueError: no such head size"):
        run_worker(python, job(example, (6,)), tmp_path, lambda line: None)


def test_worker_that_exceeds_the_timeout_is_ended(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "pid"
    code = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    python = worker(tmp_path, monkeypatch, code)
    with pytest.raises(ArtifactError, match="longer than"):
        run_worker(python, job(example, (6,)), tmp_path, lambda line: None, timeout=1.5)
    assert gone(int(marker.read_text()))


def test_killed_worker_is_retried_with_fewer_layers(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = worker(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    def run(made: ServeJob, say: Any) -> ServeAnswer:
        if made.layers == (60,):
            run_worker(python, made, tmp_path, say)
        return answered(made)

    said: list[str] = []
    made, _, notes = compile_program(example, True, said.append, run)
    assert made.layers == (6, 12)
    assert "compiling 60 layers was killed by the system" in notes[0] and notes[0] in said

    def always(made: ServeJob, say: Any) -> ServeAnswer:
        raise WorkerKilled

    with pytest.raises(ArtifactError, match="memory ran out"):
        compile_program(example, False, said.append, always)


def test_worker_answers_are_cached_by_job(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "recipec.compiler.plan.server_step.environment.make", lambda say: Path(sys.executable)
    )
    ran: list[ServeJob] = []

    def fake(python: Path, made: ServeJob, folder: Path, say: Any) -> str:
        ran.append(made)
        return ANSWER.dump_json(answered(made)).decode()

    monkeypatch.setattr("recipec.compiler.plan.server_step.compile.run_worker", fake)
    made = job(example, (6, 12))
    first = answer(made, lambda line: None)
    assert answer(made, lambda line: None) == first and len(ran) == 1
    answer(replace(made, kv_cache_dtype="auto"), lambda line: None)
    assert len(ran) == 2
    (kept,) = [p for p in store.folder().rglob("*.json") if '"peak_rss"' in p.read_text()][:1]
    kept.write_text("damaged")
    answer(made, lambda line: None)
    answer(replace(made, kv_cache_dtype="auto"), lambda line: None)
    assert len(ran) == 3


def test_worker_environment_has_job_variables_and_no_pythonpath(
    example: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    made = replace(job(example, (6,)), environment=(("RPA_V3_DECODE_BLOCK_SIZES", "1,1024,1,1024"),))
    environment = worker_environment(made)
    assert "PYTHONPATH" not in environment and "XLA_FLAGS" not in environment
    assert environment["RPA_V3_DECODE_BLOCK_SIZES"] == "1,1024,1,1024"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "serve"))
    return tmp_path / "serve"


def installing(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | None = None) -> None:
    """Replace the two steps of an installation."""

    def run(command: list[str], building: Path) -> None:
        if "venv" in command:
            (building / "bin").mkdir()
            (building / "bin" / "python").touch()
            (building / "pyvenv.cfg").touch()
        elif outcome:
            raise outcome

    monkeypatch.setattr(environment, "interpreter", lambda: Path(sys.executable))
    monkeypatch.setattr(environment, "_run", run)


def test_serving_environment_is_installed_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installing(monkeypatch)
    said: list[str] = []
    assert environment.find() is None
    assert environment.make(said.append) == place / "bin" / "python"
    assert "vllm-tpu==0.32.0" in said[0] and "7 GB" in said[0]
    said.clear()
    assert environment.make(said.append) == place / "bin" / "python" and not said


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ArtifactError("pip failed")])
def test_interrupted_or_failed_installation_leaves_no_files(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    installing(monkeypatch, fault)
    with pytest.raises(type(fault)):
        environment.make()
    assert not place.exists() and not list(place.parent.glob(".serve.*"))


def test_leftovers_of_a_killed_installation_are_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = place.parent / ".serve.abc"
    left.mkdir()
    installing(monkeypatch)
    environment.make()
    assert not left.exists() and environment.find()


def test_an_environment_of_another_version_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir()
    (place / "pyvenv.cfg").touch()
    (place / environment.STAMP).write_text("vllm-tpu==0.1.0")
    installing(monkeypatch)
    environment.make()
    assert environment.find()


def test_make_refuses_to_replace_an_unrelated_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir()
    (place / "notes.txt").touch()
    installing(monkeypatch)
    with pytest.raises(ArtifactError, match="in the way"):
        environment.make()
    assert (place / "notes.txt").exists()


def test_installation_is_refused_with_too_little_disk_space(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installing(monkeypatch)
    monkeypatch.setattr(environment, "DISK_BYTES", 1e18)
    with pytest.raises(ArtifactError, match="GB left"):
        environment.make()


def test_missing_python_error_says_how_to_install_python_3_12(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"needs Python 3\.12") as caught:
        environment.make()
    assert caught.value.help and "uv python install 3.12" in caught.value.help


def test_failed_installation_step_error_quotes_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('ERROR: no matching distribution'); raise SystemExit(1)"]
    with pytest.raises(ArtifactError, match="no matching distribution"):
        environment._run(command, tmp_path)
