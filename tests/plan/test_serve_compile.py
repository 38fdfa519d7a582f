"""The serving step, planned by compiling: everything but the compile itself."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiler.artifact import ArtifactError
from compiler.lower import lower
from compiler.plan import store
from compiler.plan.results import Collective
from compiler.plan.serve import compile as serve_compile
from compiler.plan.serve import environment as serve_environment
from compiler.plan.serve.estimate import cache_reads, collective_seconds, machine
from compiler.plan.serve.hlo import AttentionKernel, attention_kernel, read
from compiler.plan.serve.job import JOB, Bucket, ServeAnswer, ServeDepth, ServeJob, ServeProgram
from compiler.plan.serve.plan import plan_serve, serving
from compiler.plan.serve.program import config_of, depths, job, padded, replica_topology
from compiler.plan.serve.results import COMPILED_SERVING, SERVING_SEARCH
from compiler.program import Program
from spec.load import load

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 64}
data: {train: [gs://bucket/train.jsonl], max_length: 512}
serve: {accelerator: v6e-8, tensor_parallel_size: 8, kv_cache_dtype: fp8}
benchmark: {input_lengths: [512, 4096], output_length: 512, request_rates: [1, inf]}
"""

HLO = """\
HloModule jit_run_model_impl, is_scheduled=true, entry_computation_layout={(bf16[64,5376]{1,0})->bf16[64]{0}}

%add.2.clone (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  ROOT %add.1 = bf16[] add(%x, %y), backend_config={"window_config":{"estimated_cycles":"777"}}
}

ENTRY %main.50_spmd (param.57: bf16[64,5376]) -> bf16[64] {
  %param.57 = bf16[64,5376]{1,0:T(8,128)(2,1)} parameter(0), sharding={devices=[8,1]<=[8]}
  %fusion.1 = bf16[64,5376]{1,0:T(8,128)(2,1)S(1)} fusion(%param.57), kind=kLoop, calls=%f.95, \
backend_config={"window_config":{"estimated_cycles":"4260","iteration_bounds":["1"]}}
  %all-reduce.1 = bf16[64,5376]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.1), channel_id=3, \
replica_groups=mesh['data'=1,'model'=8] {'model'}, to_apply=%add.2.clone
  %all-gather.2 = f8e4m3fn[64,4,512]{0,2,1:T(8,128)(4,1)S(1)} all-gather(%all-reduce.1), dimensions={2}
  %collective-permute-start = (bf16[64,4,64]{0,2,1}, bf16[64,4,64]{0,2,1}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%fusion.1), channel_id=15, source_target_pairs={{0,1},{1,2}}
  %collective-permute-done = bf16[64,4,64]{0,2,1} collective-permute-done(%collective-permute-start)
  %RPAd-p_16-bq_1_1-bkv_8192_8192.1 = (bf16[1,64,2,2,512]{4,3,2,1,0}, f8e4m3fn[40,16,1,4,512]{4,3,2,1,0}) \
custom-call(%all-gather.2), custom_call_target="tpu_custom_call", backend_config={"body":""}
  %custom-call.7 = bf16[64]{0} custom-call(%fusion.1), custom_call_target="ConcatBitcast"
  ROOT %fusion.2 = bf16[64]{0} fusion(%custom-call.7), kind=kOutput, \
backend_config={"window_config":{"estimated_cycles":"40"}}
}
"""
"""A cut-out of Gemma 4 31B's decode step on v6e-8, as libtpu 0.0.48 wrote it."""

LOCAL, GLOBAL = "RPAd-p_16-bq_1_1-bkv_16384_16384-sw_1024", "RPAd-p_16-bq_1_1-bkv_8192_8192"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return lowered(tmp_path_factory.mktemp("recipe"), RECIPE)


def lowered(folder: Path, recipe: str, *sets: str) -> Program:
    path = folder / "recipe.yaml"
    path.write_text(recipe)
    program = lower(load(path, sets)).program
    assert program is not None
    return program


def program_of(kind: str, tokens: int, layers: int, pages: int) -> ServeProgram:
    """What was compiled of Gemma 4 31B, TP 8, rounded, as a line in the depth."""
    tens = layers / 6
    return ServeProgram(
        kind,
        tokens,
        arguments=0.352e9 + tens * (0.7324e9 + pages * 114688),
        temporaries=tens * (10.5e6 if kind == "decode" else 34e6),
        code=tens * 24e6,
        outputs=0.7e6,
        cycles=60_000 + tens * (1_131_000 if kind == "decode" else 4_800_000),
        collectives=(
            Collective("all-gather", ("model",), False, round(3 * tens), 4e5 * tens),
            Collective(
                "all-reduce", ("model",), False, round(1 + 13 * tens), tokens * 10752 * (1 + 13 * tens)
            ),
        ),
        kernels=((LOCAL, 5 * tens), (GLOBAL, tens)),
        seconds=10.0,
    )


def answered(made: ServeJob, say: Any = None) -> ServeAnswer:
    """A worker's answer without a worker."""
    pages = made.pages or 19636
    return ServeAnswer(
        page_tokens=16,
        pages=pages,
        token_bytes={"sliding_attention": 1024.0, "full_attention": 2048.0},
        depths=tuple(
            ServeDepth(
                layers,
                0.3523e9 + layers / 6 * 0.7324e9,
                layers / 6 * 114688,
                tuple(program_of(bucket.kind, bucket.tokens, layers, pages) for bucket in made.buckets),
            )
            for layers in made.layers
        ),
        head=ServeProgram("head", 64, arguments=0.35e9, cycles=468_000),
        peak_rss=3.5e9,
        seconds=100.0,
    )


def planned_texts(program: Program, **options: Any) -> tuple[str, dict[str, Any]]:
    """What plan_serve prints, and its values."""
    served = plan_serve(program, **options)
    ((_, text),) = served.sections
    return text, json.loads(json.dumps(served.data))


# From programs to jobs


def test_a_job_says_what_the_recipe_says(example: Program) -> None:
    made = job(example, (6, 12))
    assert (made.topology, made.tensor_parallel, made.model_layers) == ("v6e:2x4", 8, 60)
    assert made.buckets == (Bucket("decode", 64), Bucket("prefill", 1024))
    assert made.hbm_bytes == 31.25 * 2**30
    assert JOB.validate_json(JOB.dump_json(made)) == made


def test_the_catalogues_model_is_compiled_without_a_vision_tower(example: Program) -> None:
    config = config_of(example)
    assert config["architectures"] == ["Gemma4ForCausalLM"]
    assert len(config["text_config"]["layer_types"]) == 60
    assert config["text_config"]["max_position_embeddings"] >= 16384


def test_flags_and_environment_reach_the_job(tmp_path: Path) -> None:
    flags = "serve.extra_args={gpu_memory_utilization: 0.8, block-size: 32}"
    program = lowered(tmp_path, RECIPE, flags, "serve.env={A: b}", "serve.max_num_batched_tokens=512")
    made = job(program, (6,))
    assert (made.memory_share, made.page_tokens, made.environment) == (0.8, 32, (("A", "b"),))
    assert made.buckets[1].tokens == 512


def test_depths_are_whole_repeats_of_the_layer_pattern(example: Program, tmp_path: Path) -> None:
    assert depths(example, exact=False) == [(6, 12)]
    assert depths(example, exact=True) == [(60,), (6, 12)]
    shared = lowered(tmp_path, RECIPE.replace("31B", "E2B"), "serve.tensor_parallel_size=1")
    assert depths(shared, exact=False) == [(35,)]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 16), (64, 64), (65, 128), (1000, 1024)])
def test_steps_are_padded_as_the_server_pads_them(tokens: int, bucket: int) -> None:
    assert padded(tokens) == bucket


def test_a_replica_has_the_smallest_topology() -> None:
    assert [replica_topology("v6e", n) for n in (1, 2, 4, 8)] == ["v6e:2x2", "v6e:2x2", "v6e:2x2", "v6e:2x4"]
    assert replica_topology("tpu7x", 16) == "tpu7x:2x2x2"


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("serve.quantization=fp8",), "bfloat16 weights alone"),
        (("model.id=google/gemma-3-27b-it",), "vLLM's PyTorch model"),
        (
            ("serve.accelerator=v5p-8", "serve.tensor_parallel_size=4", "serve.kv_cache_dtype=auto"),
            "not for v5p",
        ),
        (("serve.env={MODEL_IMPL_TYPE: vllm}",), "vLLM's PyTorch model"),
    ],
)
def test_what_is_not_compiled_is_refused(tmp_path: Path, sets: tuple[str, ...], why: str) -> None:
    with pytest.raises(ArtifactError, match=why):
        job(lowered(tmp_path, RECIPE, *sets), (6,))


# What compiled programs say


def test_the_text_of_a_program_is_read() -> None:
    cycles, collectives, kernels = read(HLO)
    assert cycles == 4300
    assert collectives == (
        Collective("all-gather", ("model",), False, 1, 64 * 4 * 512),
        Collective("all-reduce", ("model",), False, 1, 64 * 5376 * 2),
        Collective("collective-permute", ("model",), False, 1, 64 * 4 * 64 * 2),
    )
    assert kernels == ((GLOBAL, 1.0),)
    with pytest.raises(ValueError, match="entry"):
        read("HloModule nothing")


def test_a_kernels_name_tells_its_blocks() -> None:
    assert attention_kernel(LOCAL) == AttentionKernel(True, 16384, 1024)
    assert attention_kernel(GLOBAL) == AttentionKernel(True, 8192, None)
    assert attention_kernel("RPAm-p_16-bq_32_64-bkv_1024_512") == AttentionKernel(False, 1024, None)
    assert attention_kernel("quantized_matmul") is None


def test_a_window_saves_reads_only_where_blocks_are_small() -> None:
    sizes = {"sliding_attention": 1024.0, "full_attention": 2048.0}
    default = ServeProgram("decode", 64, kernels=((LOCAL, 50.0), (GLOBAL, 10.0)))
    small = replace(
        default,
        kernels=(("RPAd-p_16-bq_1_1-bkv_1024_1024-sw_1024", 50.0), ("RPAd-p_16-bq_1_1-bkv_1024_1024", 10.0)),
    )
    # 64 sequences of 4,096 tokens: 50 x 1 KiB and 10 x 2 KiB of each token, or of 1,024 in the local layers.
    assert 64 * cache_reads(default, sizes, 4096) == 64 * 4096 * 70 * 1024
    assert 64 * cache_reads(small, sizes, 4096) == 64 * (1024 * 50 + 4096 * 20) * 1024


def test_collectives_run_over_a_ring() -> None:
    reduce = ServeProgram("decode", 64, collectives=(Collective("all-reduce", ("model",), False, 2, 4e8),))
    # 2 x 7/8 of the array through two of four links (200 of 800 GB/s), and 8 hops each.
    assert collective_seconds(reduce, machine("v6e", 8)) == pytest.approx(3.5e-3 + 16e-6)
    assert collective_seconds(reduce, machine("v6e", 1)) == 0


# From answers to plans


def test_figures_are_extrapolated_linearly(example: Program) -> None:
    weights, page, programs = serve_compile.extrapolated(answered(job(example, (6, 12))), 60)
    assert weights == pytest.approx(0.3523e9 + 7.324e9)
    assert page == 10 * 114688
    assert programs[0].cycles == pytest.approx(60_000 + 11_310_000)
    assert dict(programs[0].kernels) == {LOCAL: 50.0, GLOBAL: 10.0}
    assert {c.kind: c.count for c in programs[0].collectives} == {"all-gather": 30, "all-reduce": 131}


def test_a_refusal_at_any_depth_is_one_of_the_whole(example: Program) -> None:
    done = answered(job(example, (6, 12)))
    refused = replace(done.depths[1].programs[0], refusal="Ran out of memory in memory space hbm.")
    last = replace(done.depths[1], programs=(refused, done.depths[1].programs[1]))
    programs = serve_compile.extrapolated(replace(done, depths=(done.depths[0], last)), 60)[2]
    assert programs[0].refusal and not programs[1].refusal


def test_the_reference_run(example: Program) -> None:
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


def test_another_run_is_not_held_against_the_published_one(tmp_path: Path) -> None:
    program = lowered(tmp_path, RECIPE, "serve.kv_cache_dtype=auto")
    assert serving(program, say=lambda line: None, run=answered).published == ()


def test_a_plan_as_text_and_json(example: Program) -> None:
    text, written = planned_texts(example, say=lambda line: None, run=answered)
    assert "estimates" in text and "7.68 GB" in text and "extrapolated from 6 and 12 layers" in text
    assert "(-1.0%)" in text  # of the published weights
    assert COMPILED_SERVING.validate_python(written).tensor_parallel == 8


def test_a_cache_that_is_too_large_does_not_fit(tmp_path: Path) -> None:
    program = lowered(tmp_path, RECIPE, "serve.extra_args={num_gpu_blocks_override: 40000}")
    text, written = planned_texts(program, say=lambda line: None, run=answered)
    assert "does not fit" in text and "help: a larger tensor_parallel_size" in text
    planned = COMPILED_SERVING.validate_python(written)
    assert not planned.fits and planned.points == ()


def test_the_compilers_refusal_is_told(example: Program) -> None:
    def refused(made: ServeJob, say: Any) -> ServeAnswer:
        done = answered(made)
        said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.1G of 31.24G hbm.\nmore"
        programs = tuple(ServeProgram(b.kind, b.tokens, refusal=said) for b in made.buckets)
        return replace(done, depths=tuple(replace(depth, programs=programs) for depth in done.depths))

    text, _ = planned_texts(example, say=lambda line: None, run=refused)
    assert "Used 40.1G of 31.24G hbm." in text and "more" not in text


# The worker as a process


def worker(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """Puts a program in the worker's place; returns the interpreter."""
    path = folder / "worker.py"
    path.write_text(code)
    monkeypatch.setattr(serve_compile, "WORKER", path)
    return Path(sys.executable)


def test_a_worker_gets_its_job_and_its_answer_is_read(
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
    output = serve_compile.run_worker(python, job(example, (6,)), tmp_path, lambda line: None)
    done = serve_compile.parse(output, tmp_path)
    assert done.head.cycles == 4300 and done.head.collectives[1].kind == "all-reduce"
    with pytest.raises(ArtifactError, match="cannot be read"):
        serve_compile.parse("nothing", tmp_path)


def test_a_worker_that_fails_is_reported_by_its_last_line(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = worker(tmp_path, monkeypatch, "raise ValueError('no such head size')")
    with pytest.raises(ArtifactError, match="ValueError: no such head size"):
        serve_compile.run_worker(python, job(example, (6,)), tmp_path, lambda line: None)


def test_a_worker_that_takes_too_long_is_ended(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "pid"
    code = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    python = worker(tmp_path, monkeypatch, code)
    with pytest.raises(ArtifactError, match="longer than"):
        serve_compile.run_worker(python, job(example, (6,)), tmp_path, lambda line: None, timeout=1)
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_a_killed_worker_makes_the_depth_smaller(
    example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = worker(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    def run(made: ServeJob, say: Any) -> ServeAnswer:
        if made.layers == (60,):
            serve_compile.run_worker(python, made, tmp_path, say)
        return answered(made)

    said: list[str] = []
    made, _, notes = serve_compile.compile_program(example, True, said.append, run)
    assert made.layers == (6, 12)
    assert "compiling 60 layers was ended by the system" in notes[0] and notes[0] in said

    def always(made: ServeJob, say: Any) -> ServeAnswer:
        raise serve_compile.WorkerKilled

    with pytest.raises(ArtifactError, match="memory ran out"):
        serve_compile.compile_program(example, False, said.append, always)


def test_answers_are_kept(example: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(serve_environment, "make", lambda say: Path(sys.executable))
    ran: list[ServeJob] = []

    def run_worker(python: Path, made: ServeJob, folder: Path, say: Any) -> str:
        ran.append(made)
        return serve_compile.ANSWER.dump_json(answered(made)).decode()

    monkeypatch.setattr(serve_compile, "run_worker", run_worker)
    made = job(example, (6, 12))
    first = serve_compile.answer(made, lambda line: None)
    assert serve_compile.answer(made, lambda line: None) == first and len(ran) == 1
    serve_compile.answer(replace(made, kv_cache_dtype="auto"), lambda line: None)
    assert len(ran) == 2
    (kept,) = [p for p in store.folder().rglob("*.json") if '"peak_rss"' in p.read_text()][:1]
    kept.write_text("damaged")
    serve_compile.answer(made, lambda line: None)
    serve_compile.answer(replace(made, kv_cache_dtype="auto"), lambda line: None)
    assert len(ran) == 3


def test_the_environment_of_a_worker_is_its_own(example: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    made = replace(job(example, (6,)), environment=(("RPA_V3_DECODE_BLOCK_SIZES", "1,1024,1,1024"),))
    environment = serve_compile.worker_environment(made)
    assert "PYTHONPATH" not in environment and "XLA_FLAGS" not in environment
    assert environment["RPA_V3_DECODE_BLOCK_SIZES"] == "1,1024,1,1024"


# The search


def test_a_search_tries_what_can_work(example: Program) -> None:
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
    assert set(refused) == {2, 1} and "the weights take" in refused[2]
    assert found.candidates[0].sets == ()
    assert found.best is not None
    best = found.candidates[found.best]
    assert best.decode_blocks == "1,1024,1,1024"
    assert "untested on hardware" in text and f"tensor_parallel_size: {best.tensor_parallel}" in text


def test_block_sizes_that_the_kernel_did_not_take_are_told(example: Program) -> None:
    found = SERVING_SEARCH.validate_python(
        plan_serve(example, search=True, say=lambda line: None, run=answered).data
    )
    failed = [c for c in found.candidates if c.decode_blocks and c.status == "failed"]
    assert failed and all("did not take" in c.reason for c in failed)


# The environment


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(serve_environment.VARIABLE, str(tmp_path / "serve"))
    return tmp_path / "serve"


def installing(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | None = None) -> None:
    """Replaces the two steps of an installation."""

    def run(command: list[str], building: Path) -> None:
        if "venv" in command:
            (building / "bin").mkdir()
            (building / "bin" / "python").touch()
            (building / "pyvenv.cfg").touch()
        elif outcome:
            raise outcome

    monkeypatch.setattr(serve_environment, "interpreter", lambda: Path(sys.executable))
    monkeypatch.setattr(serve_environment, "_run", run)


def test_the_environment_is_made_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installing(monkeypatch)
    said: list[str] = []
    assert serve_environment.find() is None
    assert serve_environment.make(said.append) == place / "bin" / "python"
    assert "vllm-tpu==0.32.0" in said[0] and "10 GB" in said[0]
    said.clear()
    assert serve_environment.make(said.append) == place / "bin" / "python" and not said


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ArtifactError("pip failed")])
def test_an_installation_that_ends_early_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    installing(monkeypatch, fault)
    with pytest.raises(type(fault)):
        serve_environment.make()
    assert not place.exists() and not list(place.parent.glob(".serve.*"))


def test_what_a_killed_installation_left_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = place.parent / ".serve.abc"
    left.mkdir()
    installing(monkeypatch)
    serve_environment.make()
    assert not left.exists() and serve_environment.find()


def test_an_environment_of_another_version_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir()
    (place / "pyvenv.cfg").touch()
    (place / serve_environment.STAMP).write_text("vllm-tpu==0.1.0")
    installing(monkeypatch)
    serve_environment.make()
    assert serve_environment.find()


def test_a_folder_of_something_else_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir()
    (place / "notes.txt").touch()
    installing(monkeypatch)
    with pytest.raises(ArtifactError, match="in the way"):
        serve_environment.make()
    assert (place / "notes.txt").exists()


def test_too_little_disk_is_said_before(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installing(monkeypatch)
    monkeypatch.setattr(serve_environment, "DISK_BYTES", 1e18)
    with pytest.raises(ArtifactError, match="GB left"):
        serve_environment.make()


def test_a_machine_without_the_python_is_told_how_to_get_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"needs Python 3\.12") as caught:
        serve_environment.make()
    assert caught.value.help and "uv python install 3.12" in caught.value.help


def test_pips_error_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('ERROR: no matching distribution'); raise SystemExit(1)"]
    with pytest.raises(ArtifactError, match="no matching distribution"):
        serve_environment._run(command, tmp_path)
