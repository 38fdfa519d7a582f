"""Tests of serve/bench.sh and `recipe serve bench`: both run one sweep, with a recipe's values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.emitters.emit import emit
from recipec.compiler.emitters.server import bench_flags, emit_bench
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.program import Program
from recipec.compiler.vllm import published
from tests.clients.benching import Bench, point_of
from tests.clients.fake_vllm import Start
from tests.emit import emitting

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "serve/bench.sh"
RECIPE = """\
recipe: 1
name: tuned
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 16}
data: {train: [{path: data/train.jsonl}]}
serve: {accelerator: v6e-8, kv_cache_dtype: fp8}
benchmark: {input_lengths: [512, 4096], request_rates: [0.5, inf], output_length: 16, prompts: 10}
"""


def program_of(folder: Path, *sets: str) -> Program:
    return emitting.program_of(folder, sets, RECIPE)


def served_from(program: Program, model: str | None) -> Program:
    """Change the served weights, even if the checks would refuse them: templates must quote them anyway."""
    if model is None:
        return program
    assert program.recipe.serve is not None
    serve = program.recipe.serve.model_copy(update={"model": model})
    return replace(program, recipe=program.recipe.model_copy(update={"serve": serve}))


def words_of(program: Program) -> list[str]:
    assert program.serve_accelerator is not None
    return [word for line in bench_flags(program.recipe, program.serve_accelerator) for word in line]


HUB = "google/gemma-3-27b-it"
ODD: dict[str, tuple[list[str], str | None]] = {
    "plain": ([], None),
    "hub": ([], HUB),
    "bucket": (["merge.output=gs://bucket/merged"], None),
    "quotes": ([], '/a "b" $(touch pwned) `touch pwned` }/model'),
    "unknown": ([], "s3://bucket/model"),
    "ipv6": (["serve.host='::1'", "serve.port=9000"], None),
}


@pytest.mark.parametrize(("sets", "model"), ODD.values(), ids=ODD)
def test_bench_sh_passes_the_recipe_values_through_bash_quoting(
    sets: list[str], model: str | None, tmp_path: Path
) -> None:
    """Compare bash's words with those of `recipe serve bench`, and run shellcheck."""
    program = served_from(program_of(tmp_path, *sets), model)
    text = emit_bench(program)[SCRIPT]
    (tmp_path / "serve").mkdir()
    (tmp_path / SCRIPT).write_text(text)
    (tmp_path / "requirements-train.txt").write_text("recipec-runtime==1\n")
    wheel = tmp_path.parent / "recipec_runtime-1-py3-none-any.whl"
    wheel.touch()
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, tmp_path / SCRIPT], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert max(map(len, text.splitlines())) < 140 and not text.endswith("\n\n") and "\n\n\n" not in text
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "python3").write_text('#!/bin/sh\nprintf "%s\\0" "$PYTHONPATH" "$@"\n')
    for name in ("vllm", "python3"):
        (tmp_path / "bin" / name).chmod(0o755)

    def words(*more: str, **environment: str) -> list[str]:
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": "/home/x y", **environment}
        done = subprocess.run(
            ["bash", tmp_path / SCRIPT, *more], env=env, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\0")[:-1]

    said = words("--machine", "my box", MODEL_DIR="/m d")
    assert said[0] == f"{tmp_path}/serve/../..:{wheel}" and said[1:3] == ["-m", "runtime.clients.bench"]
    assert said[-2:] == ["--machine", "my box"]
    own = words_of(program)
    assert said[3:7:2] == ["--results", "--lock"] and said[7 : 7 + len(own)] == own
    tokenizer = said[said.index("--tokenizer") + 1]
    assert tokenizer == (HUB if model == HUB else "/m d")
    assert not (tmp_path / "pwned").exists()
    (tmp_path / "bin" / "vllm").unlink()
    said = words()
    assert said[-4:-2] == ["--compose", f"{tmp_path}/serve/compose.yaml"]
    assert said[said.index("--tokenizer") + 1] == (HUB if model == HUB else "/model")


def test_bench_sh_default_model_folder_follows_the_serve_model(tmp_path: Path) -> None:
    assert emit_bench(program_of(tmp_path, "serve=null")) == {}
    for model, line in (
        (None, 'model="${MODEL_DIR:-$here/../merged}"'),
        ("~/models/it", 'model="${MODEL_DIR:-$HOME/models/it}"'),
        ("gs://bucket/merged", 'model="${MODEL_DIR:-$HOME/.cache/tuned/model}"'),
        ("/models/a b", 'model="${MODEL_DIR:-$default_model}"'),
    ):
        assert f"    {line}\n" in emit_bench(served_from(program_of(tmp_path), model))[SCRIPT]


def test_published_figures_are_passed_only_for_the_same_server_settings(tmp_path: Path) -> None:
    words = words_of(program_of(tmp_path))
    beside = " ".join(words[words.index("--published-source") :])
    assert beside == (
        "--published-source arXiv 2605.25645 "
        "--published input=512 peak_output_tokens_per_s=1403 usd_per_million_output_tokens=4.27 "
        "--published input=4096 peak_output_tokens_per_s=1206 usd_per_million_output_tokens=4.95 "
        "--published input=4096 rate=4 median_ttft_ms=61 "
        "--published lowest_tpot_ms=13.5 highest_tpot_ms=24"
    )
    found = published.serving()
    # The published price per million output tokens follows from the published peak, to a cent.
    for length in ("512", "4096"):
        figures = found.by_input_length[length]
        usd = found.usd_per_hour / 3600 / figures["peak_output_tokens_per_s"] * 1e6
        assert usd == pytest.approx(figures["usd_per_million_output_tokens"], abs=0.011)
    assert found.is_of("google/gemma-4-31B-it", "v6e-8", 8, 1, "fp8_e4m3")
    assert not found.is_of("google/gemma-4-31B-it", "tpu7x-8", 8, 1, "fp8_e4m3")
    for another in (
        "serve.kv_cache_dtype=bfloat16",
        "serve.tensor_parallel_size=4",
        "serve.quantization=fp8",
        "model.id=google/gemma-3-27b-it",
    ):
        assert "--published-source" not in words_of(program_of(tmp_path, another))


def test_hourly_price_comes_from_the_recipe_or_else_the_catalog(tmp_path: Path) -> None:
    def price(*sets: str) -> list[str]:
        words = words_of(program_of(tmp_path, *sets))
        at = words.index("--accelerator-usd-per-hour")
        return [words[at + 1], words[at + 3]]

    assert price() == ["21.52", "list price of 2026-05, on demand: 8 chips at US$ 2.69"]
    assert price("cost.serve_usd_per_hour=12.5") == ["12.5", "the recipe"]


@pytest.fixture
def measured(tmp_path: Path, fake: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, fake(["tuned"]).url)
    monkeypatch.setenv("PATH", made.path)
    yield made


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Write an artifact's folder, next to the runtime."""
    program = program_of(tmp_path)
    folder = tmp_path / "generated" / "tuned"
    for path, data in (emit(program) | {SCRIPT: emit_bench(program)[SCRIPT].encode()}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder.parent / "runtime").symlink_to(ROOT / "runtime")
    return folder


def test_bench_sh_measures_the_recipe_points(artifact: Path, measured: Bench) -> None:
    url = measured.words[1]
    done = subprocess.run(
        ["bash", artifact / SCRIPT, "--url", url, "--output-length", "3"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    calls = measured.calls()
    names = ["input-512-rate-0.5", "input-512-rate-inf", "input-4096-rate-0.5", "input-4096-rate-inf"]
    # 4,096 + 3 tokens exceed the fake's limit.
    assert [point_of(call["words"]) for call in calls] == names[:2]
    words = calls[0]["words"]
    assert words[words.index("--tokenizer") + 1] == f"{artifact}/serve/../merged"
    results = artifact / "results" / "bench"
    assert {path.stem for path in results.glob("input-*.json")} == set(names[:2])
    record = json.loads((results / f"{names[0]}.json").read_text())
    assert record["settings"]["recipe"]["max_num_seqs"] == 64 and record["settings"]["output_length"] == 3
    # A CPU replaces the accelerator: the report omits the accelerator's price and published figures.
    text = (results / "summary.md").read_text()
    assert "It is not the recipe's v6e-8" in text and "US$ 21.52" not in text and "arXiv" not in text


def command(*words: object) -> tuple[int, str]:
    """Run `recipe serve bench`, and return its status and error."""
    done = CliRunner().invoke(app, ["serve", "bench", *map(str, words)])
    error = done.exception
    return done.exit_code, str(error) if isinstance(error, ArtifactError) else done.output


def test_bench_command_measures_a_server_at_another_url(
    artifact: Path, measured: Bench, tmp_path: Path
) -> None:
    url = measured.words[1]
    status, said = command(artifact, "--url", url)
    assert status == 1 and "are not on this machine" in said
    (artifact / "merged").mkdir()
    (artifact / "merged" / "config.json").write_text("{}")
    words = ["--url", url, "--results", tmp_path / "here", "--machine", "v6e-8", "--usd-per-hour", 36]
    status, said = command(artifact, *words)
    assert status == 0, said
    first, *_ = measured.calls()
    assert first["words"][first["words"].index("--tokenizer") + 1] == str(artifact / "merged")
    text = (tmp_path / "here" / "summary.md").read_text()
    assert "at US$ 36.00 an hour (--usd-per-hour)" in text and "arXiv 2605.25645" in text
    # 8 tokens/s: 0.0288 million in an hour of US$ 36.
    assert "| 512 | 0.5 | 8.0 | 51.7 | 103 | 10.5 | 21.0 | 1,250.00 | measured |" in text


@pytest.fixture
def docker(tmp_path: Path, measured: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake `docker exec` with this machine's processes, and log its arguments in docker.log."""
    program = tmp_path / "docker" / "docker"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/docker.log\n'
        '[ "$1 $2 $3 $4 $5 $6" = "compose --project-name tuned exec -T vllm" ] || exit 9\nshift 6\n'
        'VLLM_API_KEY=of-the-container exec "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{measured.path}")
    return program


def test_bench_command_measures_inside_the_container(
    artifact: Path, measured: Bench, docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server is at the recipe's address.
    monkeypatch.setattr("recipec.compiler.vllm.bench_flags.own_address", lambda host: "127.0.0.1")
    port = int(measured.words[1].rpartition(":")[2])
    lock = json.loads((artifact / "recipe.lock.json").read_text())
    lock["recipe"]["serve"]["port"] = port
    (artifact / "recipe.lock.json").write_text(json.dumps(lock))
    status, said = command(artifact, "--machine", "v6e-8")
    assert status == 0, said
    calls = measured.calls()
    # The point with 4,096 input tokens is left out, because the fake accepts only that many in total.
    assert len(calls) == 2 and {call["OPENAI_API_KEY"] for call in calls} == {"of-the-container"}
    assert calls[0]["words"][calls[0]["words"].index("--tokenizer") + 1] == "/model"
    assert "of-the-container" not in (tmp_path / "docker.log").read_text()
    text = (artifact / "results" / "bench" / "summary.md").read_text()
    assert "Measured on v6e-8, as --machine says" in text and "arXiv 2605.25645" in text
